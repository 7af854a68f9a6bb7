"""Every metric in one table, and its samples in Prometheus' text format (version 0.0.4).

Names, labels and bounds are vLLM's if vLLM has the metric. All samples also have the labels `model_name` and
`engine`.
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
    _family("num_requests_running", GAUGE, "Turns that the engine runs."),
    _family("num_requests_waiting", GAUGE, "Turns that the engine has and does not run."),
    _family("num_requests_waiting_by_reason", GAUGE, "The same, by what they wait as.", "reason"),
    _family("turns_live", GAUGE, "Turns of clients that have begun and not ended."),
    _family("turns_streamed", GAUGE, "Turns that run with their KV in the host tier."),
    _family("stream_undelivered_tokens", GAUGE, "Tokens of replies that readers have not taken."),
    _family("queue_wait_seconds", GAUGE, "What a new turn would wait, as predicted."),
    _family("turns_total", COUNTER, "Turns of clients that have ended.", "outcome"),
    _family("request_success_total", COUNTER, "Turns that were not failures.", "finished_reason"),
    _family("admission_rejections_total", COUNTER, "Turns and warms not admitted.", "reason"),
    _family("call_errors_total", COUNTER, "Calls that ended with an error.", "reason"),
    _family("num_preemptions_total", COUNTER, "Turns that lost their place and wait for another."),
    _family("time_to_first_token_seconds", HISTOGRAM, "From admission to the first token."),
    _family("inter_token_latency_seconds", HISTOGRAM, "From a token of a reply to the next."),
    _family("e2e_request_latency_seconds", HISTOGRAM, "From admission to the stored end."),
    _family("request_queue_time_seconds", HISTOGRAM, "From the engine's queue to a place."),
    _family("request_prefill_time_seconds", HISTOGRAM, "From a place to the first token."),
    _family("request_decode_time_seconds", HISTOGRAM, "From the first token to the last."),
    # tokens and cache hits
    _family("prompt_tokens_total", COUNTER, "Tokens of contexts of turns that have ended."),
    _family("prompt_tokens_cached_total", COUNTER, "Of them, those whose KV was there."),
    _family("prompt_tokens_cached_by_source_total", COUNTER, "The same, by where.", "source"),
    _family("generation_tokens_total", COUNTER, "Tokens generated."),
    _family("prefix_cache_queries_total", COUNTER, "Tokens looked for in the device tier."),
    _family("prefix_cache_hits_total", COUNTER, "Tokens found in the device tier."),
    _family(
        "external_prefix_cache_queries_total", COUNTER, "Tokens then looked for in the host's."
    ),
    _family("external_prefix_cache_hits_total", COUNTER, "Tokens found in the host tier."),
    _family("kv_recomputed_tokens_total", COUNTER, "Tokens whose KV was lost, by why.", "reason"),
    _family("tenant_tokens_total", COUNTER, "Tokens computed for a tenant.", "tenant"),
    _family("idle_tokens_total", COUNTER, "Tokens computed for turns that had ended."),
    _family("request_prompt_tokens", HISTOGRAM, "Tokens of a turn's context."),
    _family("request_generation_tokens", HISTOGRAM, "Tokens of a reply."),
    _family("iteration_tokens_total", HISTOGRAM, "Tokens computed in an iteration."),
    # the cache
    _family("kv_cache_usage_perc", GAUGE, "Share of device pages without which KV would be lost."),
    _family(
        "kv_pages",
        GAUGE,
        "Pages of a tier: used, clean (a copy is in the host's), free.",
        "tier",
        "state",
    ),
    _family("kv_copy_bytes_total", COUNTER, "Bytes of KV that were copied.", "direction"),
    _family("kv_chunks_total", COUNTER, "What happened to chunks.", "event"),
    _family(
        "conversations", GAUGE, "Conversations: stored, with KV in a tier, with a turn.", "state"
    ),
    # the engine process
    _family("engine_up", GAUGE, "Whether the engine takes turns."),
    _family("engine_restarts_total", COUNTER, "How often the engine was started again."),
    _family("engine_heartbeat_age_seconds", GAUGE, "Since the engine was last heard of."),
    # the service process and the history
    _family("serving", GAUGE, "Whether the daemon takes new turns."),
    _family("uptime_seconds", GAUGE, "Since the daemon's start."),
    _family(
        "event_loop_lag_seconds", GAUGE, "How late the loop was in the last minute.", "quantile"
    ),
    _family("calls", GAUGE, "Calls of clients that have not ended."),
    _family("store_commit_seconds", HISTOGRAM, "What a transaction waited for the disk."),
    _family("store_jobs", GAUGE, "Jobs of the history's thread that have not ended."),
    _family("store_oldest_job_seconds", GAUGE, "Since the oldest of them was put in."),
    _family("store_journal_bytes", GAUGE, "Length of the history's write-ahead log."),
    _family("erasure_pending", GAUGE, "Whether deleted text is still in the files."),
    _family("history_problems", GAUGE, "What is damaged in the history."),
    _family("disk_full", GAUGE, "Whether the disk of the history is full."),
    _family("scrub_passes_total", COUNTER, "How often the whole history was looked through."),
    _family("backup_age_seconds", GAUGE, "Age of what the backup lacks; none without --backup."),
    _family(
        "backup_failing", GAUGE, "Whether the backup cannot be written; none without --backup."
    ),
    _family(
        "audit_lines_lost", GAUGE, "Lines that the audit log has lost since it could be written."
    ),
)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = float | Histogram
Samples = Mapping[str, Sequence[tuple[tuple[str, ...], Value]]]  # by name: label values, value
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(
    families: Sequence[MetricFamily], samples: Samples, prefix: str, common: Mapping[str, str]
) -> Iterator[str]:
    """Yield lines; a family without samples still has its help and type."""
    for family in families:
        name = prefix + family.name
        yield f"# HELP {name} {family.help}"
        yield f"# TYPE {name} {family.kind.value}"
        for values, value in samples.get(family.name, ()):
            labels = {**common, **dict(zip(family.labels, values, strict=True))}
            if isinstance(value, Histogram):
                yield from _histogram(name, labels, value)
            else:
                yield f"{name}{_written(labels)} {_number(value)}"


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    counts = list(accumulate(value.counts))
    for bound, count in zip((*value.bounds, math.inf), counts, strict=True):
        yield f"{name}_bucket{_written({**labels, 'le': _number(float(bound))})} {count}"
    yield f"{name}_count{_written(labels)} {counts[-1]}"
    yield f"{name}_sum{_written(labels)} {_number(value.sum)}"


def _written(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value + 0)  # a bool is a number, too
