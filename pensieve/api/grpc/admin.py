"""The methods of AdminService, for operators: state, cache and limits of the daemon.

At most WATCHERS_MAX calls of WatchStats run at once. A call whose client reads nothing for `stall_seconds` is
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pensieve.api.grpc import translate
from pensieve.api.grpc.server_info import server_info
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import cache_key, names_of
from pensieve.conversations.threads import Quantiles
from pensieve.engine.distributions import RecentTimes
from pensieve.engine.messages import EvictConversation, Explain, ListCached
from pensieve.errors import (
    InvalidArgument,
    NotFound,
    QueueFull,
)
from pensieve.guard.limits import NO_LIMITS, Allowance, write_within
from pensieve.v1 import admin_pb2 as pb
from pensieve.v1 import admin_pb2_grpc

ESTABLISHED = "01"  # in /proc/net/tcp
WATCHERS_MAX = 64


@dataclass(frozen=True)
class ServerFacts:
    """Figures of the gRPC server that `Daemon` does not know: port, connections, event loop, audit log."""

    loop_lag: Quantiles
    port: int  # 0: the server does not listen on a port
    connections_max: int
    audit_lines_lost: int


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self,
        daemon: Daemon,
        stop: Callable[[], None],
        facts: Callable[[], ServerFacts],
        metrics: Callable[[], Awaitable[str]],
    ) -> None:
        self.daemon = daemon
        self._metrics = metrics
        self._facts = facts
        self.num_watchers = 0
        self._stop = stop
        self._before = (0.0, 0.0)  # seconds and iterations in the previous figures

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(stats=await self._stats())

    async def WatchStats(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request: pb.WatchStatsRequest, context: Any
    ) -> None:
        seconds = request.interval_seconds or 1.0
        if not 0.1 <= seconds <= 3600.0:
            raise InvalidArgument("interval_seconds", "must lie in 0.1..3600")
        if self.num_watchers >= WATCHERS_MAX:
            raise QueueFull(f"{WATCHERS_MAX} calls are watching already; end one first")
        self.num_watchers += 1
        try:
            while True:
                response = pb.WatchStatsResponse(stats=await self._stats())
                await write_within(self.daemon.config.stall_seconds, context.write(response))
                await asyncio.sleep(seconds)
        finally:
            self.num_watchers -= 1

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Any
    ) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(text=await self._metrics())

    async def EvictConversation(
        self, request: pb.EvictConversationRequest, context: Any
    ) -> pb.EvictConversationResponse:
        tenant = await self._tenant_of(request.conversation_id, request.tenant)
        key = cache_key(tenant, request.conversation_id)
        to_host = request.destination == pb.EvictConversationRequest.DESTINATION_HOST
        answer = await self.daemon.engine.query(
            lambda number: EvictConversation(key, to_host, number)
        )
        num_chunks = int(answer.figures["chunks"])
        if to_host:
            return pb.EvictConversationResponse(chunks_moved=num_chunks)
        return pb.EvictConversationResponse(chunks_dropped=num_chunks)

    async def ListCachedConversations(
        self, request: pb.ListCachedConversationsRequest, context: Any
    ) -> pb.ListCachedConversationsResponse:
        limit = request.limit or 20
        if not 1 <= limit <= 1000:
            raise InvalidArgument("limit", "must lie in 1..1000")
        least_valuable = request.order == pb.ListCachedConversationsRequest.ORDER_LEAST_VALUABLE
        answer = await self.daemon.engine.query(
            lambda number: ListCached(number, limit, least_valuable)
        )
        response = pb.ListCachedConversationsResponse(history=self.daemon.config.history)
        for key, on_device, on_host, dropped, idle, value, running in answer.rows:
            tenant, conversation_id = names_of(str(key))
            response.conversations.add(
                conversation_id=conversation_id,
                tenant=tenant,
                device_tokens=int(on_device),
                host_tokens=int(on_host),
                dropped_tokens=int(dropped),
                idle_seconds=float(idle),
                retention_value=float(value),
                running=bool(running),
            )
        return response

    async def ExplainConversation(
        self, request: pb.ExplainConversationRequest, context: Any
    ) -> pb.ExplainConversationResponse:
        tenant = await self._tenant_of(request.conversation_id, request.tenant)
        key = cache_key(tenant, request.conversation_id)
        answer = await self.daemon.engine.query(lambda number: Explain(number, key))
        history = self.daemon.config.history
        response = pb.ExplainConversationResponse(tenant=tenant, history=history)
        if self.daemon.claims is not None:
            owner = await self.daemon.threads.in_read_thread(
                tenant, lambda: self.daemon.reader.owner(request.conversation_id, tenant=tenant)
            )
            if owner is not None:
                response.owner, response.owned = (
                    owner.replica if owner.is_alive else "",
                    owner.is_ours,
                )
        if "running" in answer.figures:
            response.running = bool(answer.figures["running"])
        if "idle_seconds" in answer.figures:
            response.idle_seconds = answer.figures["idle_seconds"]
        for row in answer.rows:
            if len(row) == 4:
                first, count, place, holders = row
                response.runs.add(
                    first_chunk=int(first),
                    num_chunks=int(count),
                    place=str(place),
                    num_holders=int(holders),
                )
            else:
                response.events.add(seconds_ago=float(row[0]), text=str(row[1]))
        return response

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Any
    ) -> pb.ListReplicasResponse:
        found = await self.daemon.threads.in_read_thread("", self.daemon.reader.sessions)
        return pb.ListReplicasResponse(
            replicas=[
                pb.Replica(
                    name=each.replica,
                    address=each.address,
                    metrics_address=each.metrics_address,
                    alive=each.is_alive,
                    draining=each.is_draining,
                )
                for each in found
            ]
        )

    async def CheckIntegrity(
        self, request: pb.CheckIntegrityRequest, context: Any
    ) -> pb.CheckIntegrityResponse:
        return pb.CheckIntegrityResponse(problems=await self.daemon.check())

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any
    ) -> pb.ListTenantsResponse:
        daemon, now = self.daemon, asyncio.get_running_loop().time()
        allowances = daemon.admission.allowances
        stored = await daemon.threads.in_read_thread("", daemon.reader.stored_bytes)
        prefixes = await daemon.threads.in_read_thread("", daemon.reader.num_prefixes)
        response = pb.ListTenantsResponse(history=daemon.config.history)
        for name in sorted({*stored, *allowances.tenants}):
            allowance = allowances.known(name) or Allowance(NO_LIMITS, now)
            response.tenants.add(
                name=name,
                turns=daemon.num_turns_of(name),
                calls=allowance.num_calls,
                stored_bytes=stored.get(name, 0),
                prefixes=prefixes.get(name, 0),
                unread_bytes=allowance.num_unread_bytes,
                tokens_saved=allowance.tokens.level(now),
                requests_saved=allowance.requests.level(now),
                limits=pb.TenantLimits(**vars(allowance.limits)),
            )
        return response

    async def ListTenantPrefixes(
        self, request: pb.ListTenantPrefixesRequest, context: Any
    ) -> pb.ListTenantPrefixesResponse:
        response = pb.ListTenantPrefixesResponse()
        daemon = self.daemon
        for found in await daemon.threads.in_read_thread("", daemon.reader.all_prefixes):
            tenant = found.conversation.tenant
            response.prefixes.add(tenant=tenant, prefix=translate.prefix(found))
        return response

    async def DeleteTenantPrefix(
        self, request: pb.DeleteTenantPrefixRequest, context: Any
    ) -> pb.DeleteTenantPrefixResponse:
        await self.daemon.writable.delete_prefix(request.prefix_id, request.tenant)
        return pb.DeleteTenantPrefixResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._stop()
        return pb.DrainResponse(turns_running=self.daemon.conversations.turns.num_live)

    async def _tenant_of(self, conversation_id: str, tenant: str) -> str:
        """Return `tenant`. If it is empty, return the only tenant that has the conversation."""
        threads, reader = self.daemon.threads, self.daemon.reader
        tenants = await threads.in_read_thread("", reader.tenants_of, conversation_id)
        if tenant in tenants:
            return tenant
        if tenant or not tenants:
            of_tenant = f" of tenant {tenant!r}" if tenant else ""
            raise NotFound(f"there is no conversation {conversation_id!r}{of_tenant}")
        if len(tenants) > 1:
            raise InvalidArgument(
                "tenant",
                f"is required (--tenant): several tenants have a conversation {conversation_id!r}: "
                f"{', '.join(tenants)}",
            )
        return tenants[0]

    async def _stats(self) -> pb.Stats:
        daemon = self.daemon
        stored = await daemon.threads.in_read_thread("", daemon.reader.num_conversations)
        stats = pb.Stats(
            conversations_stored=stored,
            daemon_seconds=asyncio.get_running_loop().time() - daemon.started_at,
            engine_restarts=daemon.engine.num_restarts,
            serving=daemon.serving,
            draining=daemon.draining,
            server=server_info(daemon),
            replica=daemon.config.replica,
            history=daemon.config.history,
        )
        if not daemon.loading:
            latencies, now = daemon.conversations.latencies, asyncio.get_running_loop().time()
            stats.first_token.CopyFrom(_latency(latencies.first_token, now))
            stats.token_gap.CopyFrom(_latency(latencies.token_gap, now))
            stats.more["queue_wait_seconds"] = daemon.wait_seconds
        stats.more["refused_for_ttft"] = daemon.admission.num_refused_for_ttft
        stats.more["erasure_pending"] = daemon.store.erasure.pending
        await self._add_service(stats.service)
        if daemon.backing_up is not None:
            stats.more.update(daemon.backing_up.figures())
        stats.more["history_problems"] = len(daemon.damage.problems)
        stats.more["disk_full"] = daemon.full_disk.is_full
        stats.more["scrub_passes"] = daemon.scrubbing.num_passes
        ready = daemon.engine.ready
        if ready is None or not daemon.engine.serving:
            return stats
        figures = (await daemon.stats()).figures
        _fill(stats, figures)
        slot_bytes = ready.page_bytes / ready.chunk_tokens
        stats.bytes_swapped_out = int(figures["tokens_swapped_out"] * slot_bytes)
        stats.bytes_swapped_in = int(figures["tokens_swapped_in"] * slot_bytes)
        for tier in (stats.device, stats.host):
            tier.chunk_tokens = ready.chunk_tokens
        stats.iterations_per_second = self._rate(figures)
        stats.more["heartbeat_age_seconds"] = daemon.engine.heartbeat.silent_seconds
        return stats

    async def _add_service(self, service: pb.Service) -> None:
        daemon, facts = self.daemon, self._facts()
        lag, waiting = facts.loop_lag, daemon.threads.store_waiting
        store_figures = daemon.store.figures
        commits = Quantiles.of(store_figures.commit_seconds)
        service.loop_lag_max_seconds, service.loop_lag_p99_seconds = lag.most, lag.p99
        service.store_jobs, service.store_oldest_seconds = waiting
        service.commit_p50_seconds, service.commit_p99_seconds = commits.p50, commits.p99
        service.commit_max_seconds, service.commits = commits.most, store_figures.num_commits
        service.journal_bytes = store_figures.journal_bytes
        service.refusals.update(daemon.refusals)
        service.calls = daemon.admission.allowances.num_calls
        service.connections_max = facts.connections_max
        if (
            facts.port
            and (found := await asyncio.to_thread(num_connections, facts.port)) is not None
        ):
            service.connections = found
        if daemon.engine.serving:
            service.heartbeat_age_seconds = daemon.engine.heartbeat.silent_seconds
        service.erasure_pending = daemon.store.erasure.pending
        service.audit_lines_lost = facts.audit_lines_lost

    def _rate(self, figures: Mapping[str, float]) -> float:
        before, self._before = self._before, (figures["seconds"], figures["iterations"])
        seconds, iterations = (now - then for now, then in zip(self._before, before, strict=True))
        if seconds <= 0 or iterations < 0:  # the engine was restarted
            return figures["iterations_per_second"]
        return iterations / seconds


def num_connections(port: int) -> int | None:
    """Count the TCP connections to a local port. Slow if the machine has many connections."""
    found = None
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # not Linux
            continue
        local_port = f":{port:04X}"
        found = (found or 0) + sum(
            row[1].endswith(local_port) and row[3] == ESTABLISHED for row in rows
        )
    return found


def _latency(times: RecentTimes, now: float) -> pb.Latency:
    found = times.spread(now)
    latency = pb.Latency(
        count=found.count, p50_seconds=found.p50, p95_seconds=found.p95, p99_seconds=found.p99
    )
    for seconds, count in times.histogram(now):
        latency.buckets.add(seconds=seconds, count=count)
    return latency


def _fill(stats: pb.Stats, figures: Mapping[str, float]) -> None:
    whole = {name: int(value) for name, value in figures.items()}
    for tier, name in ((stats.device, "device"), (stats.host, "host")):
        tier.pages = whole[f"{name}_pages"]
        tier.pages_free = whole[f"{name}_pages_free"]
        tier.pages_used = tier.pages - tier.pages_free
    stats.device.pages_clean = whole["device_pages_clean"]
    for name in (
        *("turns_queued", "turns_running", "turns_suspended", "conversations_cached"),
        *("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "output_tokens"),
        "iterations",
    ):
        setattr(stats, name, whole[name])
    stats.idle_tokens = whole["tokens_idle"]
    stats.tokens_per_iteration = figures["tokens_per_iteration"]
    stats.engine_seconds = figures["seconds"]
    for name, value in figures.items():
        stats.more[name] = value
