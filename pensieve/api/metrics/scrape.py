"""Collect all metrics for Prometheus and `pensieve admin metrics`.

If the engine does not answer within ENGINE_SECONDS, the scrape has no metrics of the engine. Counting the
conversations in the history and calling plugins can be slow, so both happen at most once in COUNT_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pensieve.api.metrics.families import FAMILIES, Value, exposition
from pensieve.api.plugins import Plugin
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.engine_client import Ready
from pensieve.conversations.meter import Meter
from pensieve.conversations.threads import Quantiles
from pensieve.engine.distributions import Histogram
from pensieve.engine.metrics import TURNS_WAITING
from pensieve.errors import PensieveError

ENGINE_SECONDS = 2.0
COUNT_SECONDS = 15.0
PREFIX = "pensieve_"
Collected = dict[str, list[tuple[tuple[str, ...], Value]]]
FINISHED_REASONS = {  # vLLM's names
    "stop": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancelled": "abort",
}
CHUNK_EVENTS = (
    *("swapped_out", "swapped_in", "reclaimed", "dropped"),
    *("copied_on_write", "discarded", "damaged"),
)
COPIES = {
    "swap_out": "tokens_swapped_out",
    "swap_in": "tokens_swapped_in",
    "copy_on_write": "tokens_copied_on_write",
}
TENANT_TOKENS = "tenant_tokens."


class Scrape:
    """Collects all metrics. Runs on the event loop."""

    def __init__(
        self,
        daemon: Daemon,
        plugins: Sequence[Plugin],
        loop_lag: Callable[[], Quantiles],
        audit_lines_lost: Callable[[], int],
    ) -> None:
        self._daemon, self._plugins = daemon, plugins
        self._families = (*FAMILIES, *(family for each in plugins for family in each.families))
        self._loop_lag, self._audit_lines_lost = loop_lag, audit_lines_lost
        self._num_stored = 0
        self._plugin_samples: dict[str, Sequence[tuple[tuple[str, ...], Value]]] = {}
        self._count_due = 0.0  # time of the next count, by the event loop's clock

    async def text(self) -> str:
        daemon, now = self._daemon, asyncio.get_running_loop().time()
        if now >= self._count_due:
            self._count_due = now + COUNT_SECONDS
            await self._count()
        figures = await self._engine_figures()
        running = 0 if daemon.loading else daemon.conversations.turns.num_live
        states = {"stored": float(self._num_stored), "running": float(running)}
        ready = daemon.engine.ready
        engine: Collected = {}
        if figures and ready is not None:
            engine = engine_metrics(figures, ready)
            states["cached"] = figures["conversations_cached"]
        samples = {
            **turn_metrics(daemon.meter),
            **conversation_metrics(daemon),
            **engine,
            **_labelled("conversations", states),
            **service_metrics(daemon, self._loop_lag(), self._audit_lines_lost(), now),
            **self._plugin_samples,
        }
        common = {"model_name": daemon.engine.model_name, "engine": "0"}
        if daemon.config.replica:
            common["replica"] = daemon.config.replica
        return "\n".join([*exposition(self._families, samples, PREFIX, common), ""])

    async def _engine_figures(self) -> dict[str, float]:
        daemon = self._daemon
        if daemon.loading or not daemon.engine.serving:
            return {}
        with suppress(TimeoutError, PensieveError):
            async with asyncio.timeout(ENGINE_SECONDS):
                return (await daemon.stats()).figures
        return {}

    async def _count(self) -> None:
        with suppress(TimeoutError, PensieveError):
            async with asyncio.timeout(ENGINE_SECONDS):
                count = self._daemon.reader.num_conversations
                self._num_stored = await self._daemon.threads.in_read_thread("", count)
                for plugin in self._plugins:
                    self._plugin_samples.update(await plugin.samples())


def turn_metrics(meter: Meter) -> Collected:
    usage = meter.usage
    num_cached = usage.device_tokens + usage.host_tokens
    return {
        **_labelled("turns_total", meter.outcomes),
        **_labelled(
            "request_success_total",
            {word: meter.outcomes[reason] for reason, word in FINISHED_REASONS.items()},
        ),
        **_labelled("admission_rejections_total", meter.rejections),
        **_labelled("kv_recomputed_tokens_total", meter.recomputed),
        **_labelled("prompt_tokens_cached_by_source_total", meter.sources),
        **_plain(
            {
                "prompt_tokens_total": usage.prompt_tokens,
                "prompt_tokens_cached_total": num_cached,
                "generation_tokens_total": meter.generation_tokens,
                "prefix_cache_queries_total": usage.prompt_tokens,
                "prefix_cache_hits_total": usage.device_tokens,
                "external_prefix_cache_queries_total": usage.prompt_tokens - usage.device_tokens,
                "external_prefix_cache_hits_total": usage.host_tokens,
                "e2e_request_latency_seconds": meter.turn_seconds,
                "request_queue_time_seconds": meter.queue_seconds,
                "request_prefill_time_seconds": meter.prefill_seconds,
                "request_decode_time_seconds": meter.decode_seconds,
                "request_prompt_tokens": meter.prompt_tokens,
                "request_generation_tokens": meter.output_tokens,
                "store_commit_seconds": meter.commits,
            }
        ),
    }


def conversation_metrics(daemon: Daemon) -> Collected:
    """Return metrics of the engine's turns; none before the first engine has loaded its model."""
    if daemon.loading:
        return {}
    conversations = daemon.conversations
    return _plain(
        {
            "turns_live": conversations.turns.num_live,
            "stream_undelivered_tokens": conversations.followers.num_undelivered_tokens,
            "queue_wait_seconds": daemon.wait_seconds,
            "time_to_first_token_seconds": conversations.latencies.first_tokens,
            "inter_token_latency_seconds": conversations.latencies.token_gaps,
        }
    )


def engine_metrics(figures: Mapping[str, float], ready: Ready) -> Collected:
    """Return the engine's metrics. Counters start at 0 when the engine process is restarted."""
    waiting = {reason: figures[f"turns_{reason}"] for reason in TURNS_WAITING}
    slot_bytes = ready.page_bytes / ready.chunk_tokens
    tenants = {
        name.removeprefix(TENANT_TOKENS): value
        for name, value in figures.items()
        if name.startswith(TENANT_TOKENS)
    }
    pages = figures["device_pages"]
    free, clean = figures["device_pages_free"], figures["device_pages_clean"]
    host_free = figures["host_pages_free"]
    return {
        **_labelled("num_requests_waiting_by_reason", waiting),
        **_labelled("tenant_tokens_total", tenants),
        **_labelled("kv_chunks_total", {each: figures[f"chunks_{each}"] for each in CHUNK_EVENTS}),
        **_labelled(
            "kv_copy_bytes_total",
            {word: figures[name] * slot_bytes for word, name in COPIES.items()},
        ),
        "kv_pages": [
            (("device", "used"), pages - free - clean),
            (("device", "clean"), clean),
            (("device", "free"), free),
            (("host", "used"), figures["host_pages"] - host_free),
            (("host", "free"), host_free),
        ],
        **_plain(
            {
                "num_requests_running": figures["turns_running"],
                "num_requests_waiting": sum(waiting.values()),
                "turns_streamed": figures["turns_streamed"],
                "num_preemptions_total": figures["suspensions"],
                "idle_tokens_total": figures["tokens_idle"],
                "kv_cache_usage_perc": (pages - free - clean) / max(pages, 1),
                "iteration_tokens_total": Histogram.of_figures("iteration_tokens", figures),
            }
        ),
    }


def service_metrics(daemon: Daemon, lag: Quantiles, audit_lines_lost: int, now: float) -> Collected:
    jobs, oldest = daemon.threads.store_waiting
    found = {
        "engine_up": daemon.engine.serving,
        "engine_restarts_total": daemon.engine.num_restarts,
        "serving": daemon.serving,
        "uptime_seconds": now - daemon.started_at,
        "calls": daemon.admission.allowances.num_calls,
        "store_jobs": jobs,
        "store_oldest_job_seconds": oldest,
        "store_journal_bytes": daemon.store.figures.journal_bytes,
        "erasure_pending": daemon.store.erasure.pending,
        "history_problems": len(daemon.damage.problems),
        "disk_full": daemon.full_disk.is_full,
        "scrub_passes_total": daemon.scrubbing.num_passes,
        "audit_lines_lost": audit_lines_lost,
        **(daemon.backing_up.figures() if daemon.backing_up else {}),
    }
    if daemon.engine.serving:
        found["engine_heartbeat_age_seconds"] = daemon.engine.heartbeat.silent_seconds
    return {
        **_plain(found),
        **_labelled("call_errors_total", daemon.refusals),
        **_labelled("event_loop_lag_seconds", {"0.5": lag.p50, "0.99": lag.p99, "1": lag.most}),
    }


def _plain(values: Mapping[str, Value]) -> Collected:
    return {name: [((), value)] for name, value in values.items()}


def _labelled(name: str, values: Mapping[str, float]) -> Collected:
    return {name: [((label,), value) for label, value in sorted(values.items())]}
