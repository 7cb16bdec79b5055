"""Serve replicas for the contract tests: the calls run in a replica's process, the engines stay in the test's.

So a test can look into its engine as it does with the other transports. What the replica calls an engine is a proxy that
asks the test's process over a socket (tests may pickle; the product does not).
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.builder import role_options
from deployments.settings import AppSettings
from specdiff_dist.transport.handle_messages import answer_handle
from specdiff_dist.transport.role_service import RoleService, drafter_service, verifier_service

APP = "contract"
SERVICES = {"Drafter": drafter_service, "Verifier": verifier_service}


class EngineAtHome:
    """Answers for one engine: each connection is served by a thread of its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._listener = Listener()
        self.address = self._listener.address
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                while True:
                    name, arguments = connection.recv()
                    connection.send(self._outcome(name, arguments))
            except EOFError:
                pass

    def _outcome(self, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            value = getattr(self._engine, name)
            return True, value(*arguments) if callable(value) else value
        except BaseException as error:  # noqa: BLE001 -- whatever an engine raises is what the test is about
            return False, (type(error), error.args, vars(error))

    def close(self) -> None:
        self._listener.close()


class AwayEngine:
    """What a replica calls: every call, and every question, goes to the engine at home."""

    def __init__(self, address: Any) -> None:
        self._connection = Client(address)
        self._lock = threading.Lock()
        self.info = self._ask("info")

    @property
    def num_sessions(self) -> int:
        return self._ask("num_sessions")

    def draft(self, call: Any) -> Any:
        return self._ask("draft", call)

    def verify(self, call: Any) -> Any:
        return self._ask("verify", call)

    def resolve(self, call: Any) -> Any:
        return self._ask("resolve", call)

    def release(self, session_id: str) -> None:
        self._ask("release", session_id)

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self._connection.send((name, arguments))
            is_fine, value = self._connection.recv()
        if is_fine:
            return value
        kind, args, state = value
        error = kind.__new__(kind)  # not kind(*args): some errors make their message themselves
        error.args = args
        vars(error).update(state)
        raise error


@serve.deployment(name="Host", logging_config={"enable_access_log": False})
class Host:
    """A replica of as many engines as tests need."""

    def __init__(self) -> None:
        self._services: dict[str, RoleService] = {}

    async def open(self, key: str, role: str, address: Any, options: dict[str, Any]) -> str:
        """Returns the replica's id in Serve."""
        self._services[key] = SERVICES[role](AwayEngine(address), **options)
        return serve.get_replica_context().replica_id.unique_id

    async def call(self, method: str, request: bytes, *, key: str) -> bytes:
        return await answer_handle(self._services[key], method, request)

    async def num_queued(self, key: str) -> int:
        return self._services[key].num_queued

    async def close(self, key: str) -> None:
        """Calls are refused from now on, as by a replica that stops."""
        self._services[key].close()


def running_host() -> DeploymentHandle:
    """Two replicas, so that calls have a choice to go wrong."""
    options = {**role_options(AppSettings(transport="handle")), "max_ongoing_requests": 1000}
    return serve.run(
        Host.options(num_replicas=2, ray_actor_options={"num_cpus": 0.1}, **options).bind(), name=APP, route_prefix=None
    )
