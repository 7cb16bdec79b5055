"""The router deployment: takes the leases, runs the round loop, streams the chunks. No model, no torch, no HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import Context
from functools import partial
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.leases import ClientT, LeasedDrafter, LeasedVerifier, Replicas
from deployments.messages import GenerateCall, RouterInfo, pack_chunk, pack_error, unpack_call
from deployments.settings import AppSettings
from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.calibration import check_table
from specdiff_dist.core.exactness import check_exact
from specdiff_dist.core.features import check_features
from specdiff_dist.core.pair_knowledge import PairKnowledge
from specdiff_dist.drafters import split_name, with_copying
from specdiff_dist.drafters.combined import combined_info
from specdiff_dist.engine import decode
from specdiff_dist.errors import InvalidConfig, InvalidRequest, SpecdiffError
from specdiff_dist.quality import EXACT_TIER
from specdiff_dist.roles import Drafter
from specdiff_dist.simulate.trace import RoundTrace, TraceWriter
from specdiff_dist.text import Tokenizer
from specdiff_dist.transport import envelope
from specdiff_dist.transport.channel_pool import ChannelPool
from specdiff_dist.transport.grpc_client import GrpcDrafter, GrpcVerifier
from specdiff_dist.transport.handle_client import HandleDrafter, HandleVerifier, Send
from specdiff_dist.transport.remote_roles import RemoteDrafter, RemoteVerifier
from specdiff_dist.types import DrafterInfo, GenerateRequest, TokenChunk, VerifierInfo

log = logging.getLogger(__name__)


@serve.deployment
class Router:
    """One replica. Refuses to start when the exact tier could not keep its promise (InexactConfig), or when the drafter
    needs features that the verifier does not give (InvalidConfig)."""

    async def __init__(
        self,
        verifier: DeploymentHandle,
        drafter: DeploymentHandle | None,
        settings: AppSettings,
        load_tokenizer: Callable[[], Tokenizer] | None,
    ) -> None:
        """`load_tokenizer` None: answers carry token ids and no text."""
        self._settings = settings
        self._tiers = settings.tiers()
        self._tokenizer = None if load_tokenizer is None else load_tokenizer()
        self._knowledge = PairKnowledge()  # what speculation policies learn here, from all requests
        caller = ray.get_runtime_context().current_actor
        self._pool = ChannelPool()
        self._verifiers: Replicas[RemoteVerifier]
        self._verifiers = Replicas(verifier, self._connect(verifier, GrpcVerifier, HandleVerifier), caller)
        self._drafters: Replicas[RemoteDrafter] | None = None
        if drafter is not None:
            self._drafters = Replicas(drafter, self._connect(drafter, GrpcDrafter, HandleDrafter), caller)
        self._drafter_handle = drafter
        self._copies = split_name(settings.drafter)[1]
        self._replica_info: DrafterInfo | None = None  # of the drafter replicas
        self._drafter_info: DrafterInfo | None = None  # of whom the round loop asks
        self._asking: asyncio.Task[None] | None = None
        self._verifier_info = envelope.unpack(await verifier.info.remote(), VerifierInfo)
        if drafter is not None:
            await self._ask_drafter(settings.lease_timeout_s)
        check_exact(self._tiers[EXACT_TIER], self._drafter_info)
        self._trace = None if settings.trace_dir is None else _trace_writer(Path(settings.trace_dir), settings)

    async def generate(self, packed_call: bytes) -> AsyncGenerator[bytes, None]:
        """One answer's items (deployments/messages.py), the first without tokens and at once, as HandleStream needs it.

        Both replicas' caches are freed however it ends.
        """
        yield pack_chunk(TokenChunk((), ""))
        rounds: list[RoundTrace] = []
        try:
            call = unpack_call(packed_call)
            config = self._config(call)
            self._ask_drafter_again()
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = self._tokenizer.detokenizer(call.request.prompt_token_ids)
            verifier = self._verifier(call.request)
            chunks = decode(
                call.request,
                config,
                self._drafter(call.request),
                verifier,
                tier=call.tier,
                detokenizer=detokenizer,
                knowledge=self._knowledge.for_session(
                    config, self._drafter_info, is_greedy=call.request.sampling.is_greedy
                ),
                recorder=None if self._trace is None else rounds.append,
            )
            async with verifier.placed(call.request.request_id), aclosing(chunks):
                async for chunk in chunks:
                    yield pack_chunk(chunk)
        except SpecdiffError as error:
            yield pack_error(error)
        except Exception as error:
            log.exception("a request failed")
            yield pack_error(SpecdiffError(f"internal error ({type(error).__name__}); the router's log says more"))
        finally:
            if self._trace is not None and rounds:
                self._trace.write(rounds)

    async def info(self) -> bytes:
        """The packed RouterInfo, from memory."""
        self._ask_drafter_again()
        info = self._verifier_info
        settings = self._settings
        return envelope.pack(
            RouterInfo(
                model=settings.served_model_name,
                max_model_len=info.max_model_len,
                verifier=info,
                drafter=self._drafter_info,
                tiers=tuple(self._tiers),
                default_tier=settings.default_tier,
            )
        )

    def _connect(
        self, handle: DeploymentHandle, over_grpc: Callable[..., ClientT], over_handle: Callable[[Send], ClientT]
    ) -> Callable[[str], ClientT]:
        """How to call the replica that a lease names."""
        if self._settings.transport == "grpc":
            return partial(over_grpc, pool=self._pool)
        return lambda replica_id: over_handle(handle.options(method_name="call", session_id=replica_id).remote)

    def _config(self, call: GenerateCall) -> DecodeConfig:
        tier_config = self._tiers.get(call.tier)
        if tier_config is None:
            raise InvalidRequest(
                f"unknown quality tier {call.tier!r}; the tiers are {', '.join(self._tiers)}", param="quality"
            )
        config = tier_config if call.config is None else call.config
        if call.tier == EXACT_TIER:
            check_exact(config, self._drafter_info, greedy_draft=call.request.sampling.is_greedy)
        return config

    def _verifier(self, request: GenerateRequest) -> LeasedVerifier:
        num_prompt = len(request.prompt_token_ids)
        return LeasedVerifier(
            self._verifiers, self._verifier_info, timeout_s=self._settings.lease_timeout_s, num_tokens=num_prompt,
            max_tokens=num_prompt + request.max_tokens,
        )  # fmt: skip

    def _drafter(self, request: GenerateRequest) -> Drafter | None:
        if self._drafters is None:
            return None
        leased = LeasedDrafter(
            self._drafters, self._replica_info, patience_s=self._settings.drafter_patience_s,
            max_tokens=len(request.prompt_token_ids) + request.max_tokens,
        )  # fmt: skip
        return with_copying(leased, self._verifier_info, max_sessions=1) if self._copies else leased

    def _ask_drafter_again(self) -> None:
        """A drafter that was away when this replica started is asked in the background."""
        if self._drafter_handle is None or self._drafter_info is not None:
            return
        if self._asking is None or self._asking.done():
            asking = self._ask_late_drafter(self._settings.lease_timeout_s)
            self._asking = asyncio.create_task(
                asking, context=Context()
            )  # not cancelled with the request of the moment

    async def _ask_late_drafter(self, timeout_s: float) -> None:
        try:
            await self._ask_drafter(timeout_s)
        except InvalidConfig as error:
            log.error("decoding plainly: %s", error)

    async def _ask_drafter(self, timeout_s: float) -> None:
        """Raises InvalidConfig when it cannot work with this verifier."""
        assert self._drafter_handle is not None
        response = self._drafter_handle.info.remote()
        try:
            async with asyncio.timeout(timeout_s):
                info = envelope.unpack(await response, DrafterInfo)
        except (RayError, RayServeException, TimeoutError) as error:
            response.cancel()
            log.warning("no drafter has answered yet (%s): decoding plainly", type(error).__name__)
            return
        check_features(info, self._verifier_info)
        check_table(info.calibration, what=f"drafter {info.name!r}")
        self._replica_info, self._drafter_info = info, combined_info(info) if self._copies else info


def _trace_writer(folder: Path, settings: AppSettings) -> TraceWriter:
    """One file per router process. Raises InvalidConfig when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"cannot write traces to {folder}: {error.strerror}; check trace_dir") from error
    about: dict[str, object] = {"drafter": settings.drafter, "verifier": settings.model, "dtype": settings.dtype}
    return TraceWriter(folder / f"router-{socket.gethostname()}-{os.getpid()}.trace", about)
