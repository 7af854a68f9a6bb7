"""The table of all metrics, and a writer of Prometheus' text format (version 0.0.4).

If vLLM has a metric, its name, labels and bounds here are the same. All samples also have the labels
`model_name` and `engine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from pensieve.engine.distributions import Histogram


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricKind


class MetricFamily(NamedTuple):
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


def _family(name: str, kind: MetricKind, text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, kind, text, labels)


FAMILIES = (
    # turns and latencies
    _family("num_requests_running", GAUGE, "Turns that run in the engine."),
    _family("num_requests_waiting", GAUGE, "Turns that wait in the engine."),
    _family(
        "num_requests_waiting_by_reason",
        GAUGE,
        "Turns that wait in the engine, by reason.",
        "reason",
    ),
    _family("turns_live", GAUGE, "Turns in flight."),
    _family("turns_streamed", GAUGE, "Running turns whose KV is streamed from the host tier."),
    _family("stream_undelivered_tokens", GAUGE, "Reply tokens that clients have not received yet."),
    _family("queue_wait_seconds", GAUGE, "Predicted waiting time of a new turn."),
    _family("turns_total", COUNTER, "Ended turns.", "outcome"),
    _family("request_success_total", COUNTER, "Ended turns that did not fail.", "finished_reason"),
    _family("admission_rejections_total", COUNTER, "Refused turns and warms.", "reason"),
    _family("call_errors_total", COUNTER, "Calls that ended with an error.", "reason"),
    _family("num_preemptions_total", COUNTER, "Suspensions of running turns."),
    _family(
        "time_to_first_token_seconds",
        HISTOGRAM,
        "Seconds from the accepted request to the first token.",
    ),
    _family("inter_token_latency_seconds", HISTOGRAM, "Seconds between two tokens of a reply."),
    _family(
        "e2e_request_latency_seconds",
        HISTOGRAM,
        "Seconds from the accepted request to the stored reply.",
    ),
    _family(
        "request_queue_time_seconds", HISTOGRAM, "Seconds that a turn waits in the engine's queue."
    ),
    _family(
        "request_prefill_time_seconds",
        HISTOGRAM,
        "Seconds from the start of a turn to its first token.",
    ),
    _family("request_decode_time_seconds", HISTOGRAM, "Seconds from the first to the last token."),
    # tokens and cache hits
    _family("prompt_tokens_total", COUNTER, "Context tokens of ended turns."),
    _family("prompt_tokens_cached_total", COUNTER, "Context tokens whose KV was cached."),
    _family(
        "prompt_tokens_cached_by_source_total",
        COUNTER,
        "Context tokens whose KV was cached, by tier.",
        "source",
    ),
    _family("generation_tokens_total", COUNTER, "Tokens generated."),
    _family("prefix_cache_queries_total", COUNTER, "Tokens looked up in the device tier."),
    _family("prefix_cache_hits_total", COUNTER, "Tokens found in the device tier."),
    _family("external_prefix_cache_queries_total", COUNTER, "Tokens looked up in the host tier."),
    _family("external_prefix_cache_hits_total", COUNTER, "Tokens found in the host tier."),
    _family(
        "kv_recomputed_tokens_total",
        COUNTER,
        "Tokens whose KV was recomputed, by reason.",
        "reason",
    ),
    _family("tenant_tokens_total", COUNTER, "Tokens computed for a tenant.", "tenant"),
    _family("idle_tokens_total", COUNTER, "Tokens computed for turns that had already ended."),
    _family("request_prompt_tokens", HISTOGRAM, "Tokens of a turn's context."),
    _family("request_generation_tokens", HISTOGRAM, "Tokens of a reply."),
    _family("iteration_tokens_total", HISTOGRAM, "Tokens per iteration."),
    # the cache
    _family(
        "kv_cache_usage_perc",
        GAUGE,
        "Share of device pages with KV that has no copy in the host tier.",
    ),
    _family(
        "kv_pages",
        GAUGE,
        "Pages of a tier: used, clean (copied to the host tier), free.",
        "tier",
        "state",
    ),
    _family("kv_copy_bytes_total", COUNTER, "Bytes of KV copied between the tiers.", "direction"),
    _family("kv_chunks_total", COUNTER, "Events of chunks.", "event"),
    _family(
        "conversations", GAUGE, "Conversations: stored, with KV in a tier, with a turn.", "state"
    ),
    # the engine process
    _family("engine_up", GAUGE, "Whether the engine accepts turns."),
    _family("engine_restarts_total", COUNTER, "Restarts of the engine."),
    _family("engine_heartbeat_age_seconds", GAUGE, "Seconds since the engine's last heartbeat."),
    # the service process and the history
    _family("serving", GAUGE, "Whether the daemon accepts new turns."),
    _family("uptime_seconds", GAUGE, "Seconds since the start of the daemon."),
    _family(
        "event_loop_lag_seconds", GAUGE, "Delay of the event loop in the last minute.", "quantile"
    ),
    _family("calls", GAUGE, "Running calls of clients."),
    _family("store_commit_seconds", HISTOGRAM, "Seconds that a transaction waited for the disk."),
    _family("store_jobs", GAUGE, "Unfinished jobs of the store threads."),
    _family(
        "store_oldest_job_seconds", GAUGE, "Age of the oldest unfinished job of the store threads."
    ),
    _family("store_journal_bytes", GAUGE, "Length of the history's write-ahead log."),
    _family("erasure_pending", GAUGE, "Whether deleted text is still in the files."),
    _family("history_problems", GAUGE, "Damaged places found in the history."),
    _family("disk_full", GAUGE, "Whether the disk of the history is full."),
    _family("scrub_passes_total", COUNTER, "Complete checks of the history."),
    _family(
        "backup_age_seconds",
        GAUGE,
        "Age of the newest state in the backup; none without --backup.",
    ),
    _family(
        "backup_failing", GAUGE, "Whether the backup cannot be written; none without --backup."
    ),
    _family(
        "audit_lines_lost", GAUGE, "Lines that the audit log lost since its last written line."
    ),
)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = float | Histogram
Samples = Mapping[str, Sequence[tuple[tuple[str, ...], Value]]]  # by name: label values, value
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(
    families: Sequence[MetricFamily], samples: Samples, prefix: str, common: Mapping[str, str]
) -> Iterator[str]:
    """Yield lines. A family without samples has only its lines HELP and TYPE."""
    for family in families:
        name = prefix + family.name
        yield f"# HELP {name} {family.help}"
        yield f"# TYPE {name} {family.kind.value}"
        for values, value in samples.get(family.name, ()):
            labels = {**common, **dict(zip(family.labels, values, strict=True))}
            if isinstance(value, Histogram):
                yield from _histogram(name, labels, value)
            else:
                yield f"{name}{_label_text(labels)} {_number(value)}"


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    counts = list(accumulate(value.counts))
    for bound, count in zip((*value.bounds, math.inf), counts, strict=True):
        yield f"{name}_bucket{_label_text({**labels, 'le': _number(float(bound))})} {count}"
    yield f"{name}_count{_label_text(labels)} {counts[-1]}"
    yield f"{name}_sum{_label_text(labels)} {_number(value.sum)}"


def _label_text(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value + 0)  # `+ 0` makes a bool a number
