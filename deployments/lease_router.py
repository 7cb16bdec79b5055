"""How Serve places calls of the handle transport: leases where there is least to do, a session's calls where its lease is.

A call names its replica in Serve's `session_id` (not the session: consistent hashing would move sessions whenever
replicas come and go, and places leases without a look at load). While that replica is away the call waits; whoever made
it hears of the lease's end and gives it up.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class LeaseRouter(RequestRouter):
    """Leases and questions by the power of two choices, calls to exactly the replica they name."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates for one attempt. None of them free: Serve asks again, after a pause that grows."""
        if pending_request is None:
            return []
        pending_request.routing_context.should_backoff = True  # without it Serve asks again without a pause
        replica_id = pending_request.metadata.session_id
        if replica_id:
            return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == replica_id]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    @property
    def max_num_routing_tasks(self) -> int:
        """Calls that are placed at the same time: a call that waits for its one replica keeps nobody else waiting. (Serve's
        default is two for each replica.)"""
        return 10_000
