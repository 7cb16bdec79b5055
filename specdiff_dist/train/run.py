"""From answers to a drafter folder: first weights, training, calibration, export."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.train.answers import AnswerStore
from specdiff_dist.train.batches import Batches, BatchOptions, choose_draft_vocab, count_tokens
from specdiff_dist.train.calibrate import fit
from specdiff_dist.train.evaluation import Evaluation, observe
from specdiff_dist.train.export import Record, export
from specdiff_dist.train.features import FeatureStore, make_features
from specdiff_dist.train.network import DraftNetwork
from specdiff_dist.train.processes import is_first, rank_and_world, wait_for_all
from specdiff_dist.train.start import Start, from_drafter, from_verifier, with_features
from specdiff_dist.train.trainer import Trained, Trainer, TrainOptions
from specdiff_dist.verifiers.device import pick_device
from specdiff_dist.verifiers.folder import vocab_size

ARCHITECTURES = ("causal", "features")


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Shape of the drafter and what it starts from."""

    num_layers: int = 4  # of the verifier, unless `layers` names them
    layers: tuple[int, ...] | None = None  # of the verifier, or of `initial`
    initial: Path | None = None  # an exported drafter to go on from
    draft_vocab: int = 8192  # tokens it proposes; 0: all
    trains_prefix: bool = True
    architecture: str = "causal"  # or "features": committed tokens by the verifier's hidden states of them
    feature_layers: tuple[int, ...] | None = None  # of the verifier; None: those that fed the drafter's layers there

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.draft_vocab < 0:
            raise InvalidConfig("a drafter needs at least one layer, and a draft vocabulary of 0 (all) or more")
        if self.architecture not in ARCHITECTURES:
            raise InvalidConfig(f"the architecture is {' or '.join(ARCHITECTURES)}, not {self.architecture!r}")
        if self.architecture == "causal" and self.feature_layers is not None:
            raise InvalidConfig("feature layers need architecture 'features'")
        if self.architecture == "features" and not self.trains_prefix:
            raise InvalidConfig("with architecture 'features' there is no causal prefix whose gradients could be cut")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything but the answers."""

    training: TrainOptions
    network: NetworkOptions = field(default_factory=NetworkOptions)
    batches: BatchOptions = field(default_factory=BatchOptions)
    device: str = "auto"
    export_int8: bool = False  # half the file; not part of what is trained


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The drafter and its numbers."""

    folder: Path
    before: Evaluation
    after: Evaluation
    ece: tuple[float, float]  # before and after calibration, where reached, on answers it was not fitted on
    trained: Trained


def make_drafter(
    folder: Path,
    answers: AnswerStore,
    verifier: str,
    verifier_folder: Path,
    options: RunOptions,
    *,
    command: str,
    on_progress: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Made:
    """Trains in folder/checkpoints, going on where an earlier run stopped, and exports to folder/drafter.

    Raises InvalidConfig (options that do not fit the verifier, the answers or the checkpoint), ModelUnavailable.
    """
    start, device = _start(verifier_folder, options), pick_device(options.device)
    counts = count_tokens(answers, start.config.vocab_size)
    draft_vocab = choose_draft_vocab(counts, options.network.draft_vocab, vocab_size=vocab_size(verifier_folder))
    batches = Batches(
        answers, options.batches, vocab_size=start.config.vocab_size, draft_vocab=draft_vocab,
        features=_features(folder / "features", answers, start, device, on_progress),
    )  # fmt: skip
    network = DraftNetwork(
        start.config, start.embedding, start.output,
        None if draft_vocab is None else torch.from_numpy(draft_vocab),
        trains_prefix=options.network.trains_prefix,
    )  # fmt: skip
    network.load_state_dict(start.weights)
    network.to(device)
    identity: dict[str, Any] = {
        "origin": start.origin, "layers": start.layers, "draft_vocab": options.network.draft_vocab
    }  # fmt: skip
    if start.config.feature_layers:
        identity["features"] = [start.config.feature_layers, start.config.feature_sources]
    trainer = Trainer(
        network, batches, options.training, folder / "checkpoints", identity=identity, on_progress=on_progress
    )
    trained = trainer.run()
    network.load_state_dict(trained.weights)
    calibration = fit(observe(network, batches.held_out_batches(max_answers=512, blocks_per_answer=96)))
    record = Record(
        verifier=verifier_folder.name if Path(verifier).is_dir() else verifier, command=command, origin=start.origin,
        layers=start.layers, verifier_layers=start.verifier_layers, data=answers.meta,
        num_answers=answers.num_answers, options=_plain(options), num_steps=trained.num_steps,
        num_blocks=trained.num_blocks, seconds=trained.seconds, stopped_early=trained.stopped_early,
        machine=_machine(device), before=trained.before, after=trained.after, calibration=calibration,
    )  # fmt: skip
    if is_first():
        export(folder / "drafter", start.config, trained.weights, draft_vocab, record, in_int8=options.export_int8)
    ece = (calibration.ece_before, calibration.ece_after)
    return Made(folder / "drafter", trained.before, trained.after, ece, trained)


def _start(verifier_folder: Path, options: RunOptions) -> Start:
    wanted, size = options.network, options.batches.block_size
    if wanted.initial is not None:
        start = from_drafter(wanted.initial, verifier_folder, layers=wanted.layers, block_size=size)
        if start.config.feature_layers:
            if wanted.architecture != "features" or wanted.feature_layers is not None:
                raise InvalidConfig(
                    f"{wanted.initial} has architecture 'features' and its own feature layers: leave them to it"
                )
            return start
    else:
        start = from_verifier(verifier_folder, num_layers=wanted.num_layers, layers=wanted.layers, block_size=size)
    return with_features(start, wanted.feature_layers) if wanted.architecture == "features" else start


def _features(
    folder: Path,
    answers: AnswerStore,
    start: Start,
    device: torch.device,
    on_progress: Callable[[dict[str, Any]], None],
) -> FeatureStore | None:
    """Every process computes its share; all read all."""
    layers = start.config.feature_layers
    if not layers:
        return None
    rank, world = rank_and_world()
    made = make_features(
        folder, answers, start.folder, layers, device=device, rank=rank, world=world, on_progress=on_progress
    )
    wait_for_all()
    return FeatureStore(made, answers, start.config.feature_size)


def _plain(options: RunOptions) -> dict[str, Any]:
    found = asdict(options)
    initial = options.network.initial
    found["network"]["initial"] = None if initial is None else initial.name
    return found


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
