"""The training loop: AdamW over batches that are functions of the step, checkpoints, evaluations, early stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.batches import Batches
from specdiff_dist.train.blocks import BlockBatch
from specdiff_dist.train.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer
from specdiff_dist.train.evaluation import Evaluation, observe, summarise
from specdiff_dist.train.losses import LossOptions, block_loss
from specdiff_dist.train.network import DraftNetwork
from specdiff_dist.train.schedule import NUM_MEASURED, Schedule, steps_that_fit


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Either `num_steps` or `minutes` says how long; minutes include evaluations and are turned into steps by measuring."""

    num_steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 5e-4
    weight_decay: float = 0.01
    warmup_steps: int = 50
    accumulate: int = 1  # batches per step
    clip: float = 1.0  # gradient norm
    num_evaluations: int = 8  # evenly over the run, besides the one before it
    evaluation_answers: int = 64
    evaluation_blocks: int = 16  # per answer
    patience: int = 4  # evaluations without a better score before training stops
    checkpoint_every_s: float = 60.0
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.minutes is None):
            raise InvalidConfig("training takes either a number of steps or minutes")
        if (self.num_steps is not None and self.num_steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise InvalidConfig("training needs at least one step, and more than 0 minutes")
        if self.minutes is not None and self.warmup_steps < NUM_MEASURED:
            raise InvalidConfig(f"with minutes, warmup_steps must be at least {NUM_MEASURED}: their speed is measured")
        for name in ("accumulate", "num_evaluations", "patience", "evaluation_answers", "evaluation_blocks"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a run leaves behind."""

    weights: dict[str, Tensor]  # float32, of the best evaluation
    before: Evaluation
    after: Evaluation  # of `weights`
    num_steps: int
    num_blocks: int
    seconds: float  # of training, evaluations included, over all resumed parts
    stopped_early: bool


class Trainer:
    """One run in one folder. A run that was killed goes on from its last checkpoint with the same losses."""

    def __init__(
        self,
        network: DraftNetwork,
        batches: Batches,
        options: TrainOptions,
        folder: Path,
        *,
        identity: dict[str, Any] | None = None,
        on_progress: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        """folder: for checkpoint.safetensors, best.safetensors and log.jsonl. on_progress: told every line of the log.
        identity: what a checkpoint must agree with to be resumed, besides batch options and loss."""
        self._batches, self._options, self._folder, self._say = batches, options, folder, on_progress
        self._device = network.output.device
        self._rank, self._world = (
            (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        )
        self._network = network
        self._names = [name for name, _ in network.named_parameters()]
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=options.learning_rate, betas=(0.9, 0.95),
            weight_decay=options.weight_decay, fused=True,
        )  # fmt: skip
        self._parallel: nn.Module = network
        if self._world > 1:
            ids = [self._device.index] if self._device.type == "cuda" else None
            self._parallel = DistributedDataParallel(network, device_ids=ids)
        self._identity = json.loads(
            json.dumps({**(identity or {}), "batches": asdict(batches.options), "loss": asdict(options.loss),
                        "world": self._world, "learning_rate": options.learning_rate,
                        "accumulate": options.accumulate, "num_training": len(batches.training)})
        )  # fmt: skip
        self._num_steps = options.num_steps
        self._step = self._num_blocks = 0
        self._seconds = 0.0
        self._evaluations: list[dict[str, Any]] = []

    def run(self) -> Trained:
        """Trains to the end of the schedule, or until evaluations stop improving."""
        self._resume()
        started = time.perf_counter()
        before_s = self._seconds
        if not self._evaluations:
            self._evaluate()
        evaluation_s = time.perf_counter() - started
        saved = time.perf_counter()
        durations: list[float] = []
        self._log({"event": "start", "step": self._step, "identity": self._identity})
        while (self._num_steps is None or self._step < self._num_steps) and not self._has_stalled():
            durations.append(self._take_step())
            self._seconds = before_s + time.perf_counter() - started
            if self._num_steps is None and len(durations) >= NUM_MEASURED:
                self._decide_length(median(durations), evaluation_s)
            if self._is_evaluated(self._step):
                self._evaluate()
            if time.perf_counter() - saved >= self._options.checkpoint_every_s:
                self._save()
                saved = time.perf_counter()
        stopped_early = self._num_steps is None or self._step < self._num_steps
        self._seconds = before_s + time.perf_counter() - started
        self._save()
        return self._trained(stopped_early=stopped_early)

    def _take_step(self) -> float:
        """The seconds it took."""
        schedule = Schedule(self._num_steps, self._options.warmup_steps)
        rate = self._options.learning_rate * schedule.factor(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        count = self._options.accumulate
        total, terms, num_blocks = 0.0, {}, 0
        started = time.perf_counter()
        for micro in range(count):
            index = (self._step * count + micro) * self._world + self._rank
            batch = self._batches.training_batch(index).to(self._device)
            with self._no_sync(micro < count - 1):
                loss, parts = self._loss(batch)
                (loss / count).backward()
            total += float(loss.detach()) / count
            terms = {name: terms.get(name, 0.0) + value / count for name, value in parts.items()}
            num_blocks += len(batch.block_ids)
        norm = float(nn.utils.clip_grad_norm_(self._network.parameters(), self._options.clip))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_blocks += num_blocks * self._world
        spent = time.perf_counter() - started
        self._log({"event": "step", "step": self._step, "loss": total, **terms, "lr": rate, "norm": norm,
                   "blocks_per_s": num_blocks * self._world / spent})  # fmt: skip
        self._step += 1
        return spent

    def _loss(self, batch: BlockBatch) -> tuple[Tensor, dict[str, float]]:
        half = self._device.type == "cuda"
        with torch.autocast(self._device.type, torch.bfloat16) if half else nullcontext():
            logits = self._parallel(batch)
        return block_loss(logits, batch, self._options.loss)

    def _no_sync(self, skips: bool) -> AbstractContextManager[Any]:
        return (
            self._parallel.no_sync() if skips and isinstance(self._parallel, DistributedDataParallel) else nullcontext()
        )

    def _decide_length(self, seconds_per_step: float, evaluation_s: float) -> None:
        options = self._options
        assert options.minutes is not None
        left = options.minutes * 60 - self._seconds - options.num_evaluations * evaluation_s
        num_steps = steps_that_fit(left, seconds_per_step, done=self._step, at_least=options.warmup_steps + 1)
        if self._world > 1:
            shared = torch.tensor(num_steps, device=self._device)
            distributed.broadcast(shared, 0)
            num_steps = int(shared)
        self._num_steps = num_steps
        self._log({"event": "length", "step": self._step, "num_steps": num_steps, "seconds_per_step": seconds_per_step})
        self._save()

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows the first `step` steps."""
        if self._num_steps is None:
            return False
        count = self._options.num_evaluations
        return step == self._num_steps or step * count // self._num_steps > (step - 1) * count // self._num_steps

    def _evaluate(self) -> None:
        """Every rank computes the same one, so that all stop at the same step."""
        found = summarise(observe(self._network, self._held_out()))
        line = {"step": self._step, **found.as_json(), "score": round(found.score, 4)}
        is_best = all(found.score > other["score"] for other in self._evaluations)
        self._evaluations.append(line)
        if is_best and self._rank == 0:
            Checkpoint(dict(self._network.named_parameters()), {"step": self._step}).save(self._best_path)
        self._log({"event": "evaluation", **line})

    def _held_out(self) -> Any:
        return self._batches.held_out_batches(
            max_answers=self._options.evaluation_answers, blocks_per_answer=self._options.evaluation_blocks
        )

    def _has_stalled(self) -> bool:
        scores = [line["score"] for line in self._evaluations]
        return len(scores) - 1 - scores.index(max(scores)) >= self._options.patience

    def _trained(self, *, stopped_early: bool) -> Trained:
        if self._world > 1:
            distributed.barrier()
        best = Checkpoint.load(self._best_path)
        assert best is not None
        weights = {name: best.tensors[name] for name in self._names}
        ranked = max(self._evaluations, key=lambda line: line["score"])
        before, after = (_evaluation_of(line) for line in (self._evaluations[0], ranked))
        return Trained(weights, before, after, self._step, self._num_blocks, self._seconds, stopped_early)

    @property
    def _checkpoint_path(self) -> Path:
        return self._folder / "checkpoint.safetensors"

    @property
    def _best_path(self) -> Path:
        return self._folder / "best.safetensors"

    def _save(self) -> None:
        if self._rank:
            return
        tensors = {**dict(self._network.named_parameters()), **optimizer_tensors(self._optimizer, self._names)}
        state = {
            "step": self._step, "num_steps": self._num_steps, "num_blocks": self._num_blocks, "seconds": self._seconds,
            "evaluations": self._evaluations, "identity": self._identity,
        }  # fmt: skip
        Checkpoint(tensors, state).save(self._checkpoint_path)

    def _resume(self) -> None:
        found = Checkpoint.load(self._checkpoint_path)
        if found is None:
            self._start_log(0)
            return
        state = found.state
        if state["identity"] != self._identity:
            changed = [key for key in self._identity if state["identity"].get(key) != self._identity[key]]
            raise InvalidConfig(
                f"{self._checkpoint_path} was made with other options ({', '.join(changed)}); "
                "use the same ones to go on, or another folder"
            )
        with torch.no_grad():
            for name, parameter in self._network.named_parameters():
                parameter.copy_(found.tensors[name])
        restore_optimizer(self._optimizer, self._names, found.tensors)
        self._step, self._num_blocks, self._seconds = state["step"], state["num_blocks"], state["seconds"]
        self._num_steps, self._evaluations = state["num_steps"], state["evaluations"]
        self._start_log(self._step)

    def _start_log(self, step: int) -> None:
        """Keeps the lines of the steps that are not taken again."""
        if self._rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "log.jsonl"
        text = path.read_text() if path.exists() and step else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]  # a kill may have left half a line at the end
        done = {line["step"] for line in self._evaluations}
        kept = [
            line for line in lines if (line["step"] in done if line["event"] == "evaluation" else line["step"] < step)
        ]
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)

    def _log(self, line: dict[str, Any]) -> None:
        if self._rank:
            return
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        self._say({**line, "num_steps": self._num_steps, "seconds": self._seconds})


def _evaluation_of(line: dict[str, Any]) -> Evaluation:
    return Evaluation(**{name: line[name] for name in Evaluation.__slots__})
