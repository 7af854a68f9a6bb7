"""Every metric, in one table: its name without the prefix, its type, labels, and what it says.

Names, labels and bounds are vLLM's where vLLM measures the same; those it has are marked, and
`--metrics-alias vllm` gives them a second time as `vllm:NAME`.  All samples have the labels `model_name` and
`engine` besides.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = Kind


class Family(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    is_vllm: bool = False


def _shared(name: str, kind: Kind, text: str, *labels: str) -> Family:
    """One that vLLM has, too."""
    return Family(name, kind, text, labels, is_vllm=True)


def _own(name: str, kind: Kind, text: str, *labels: str) -> Family:
    return Family(name, kind, text, labels)


FAMILIES = (
    # turns, and how long their clients wait
    _shared("num_requests_running", GAUGE, "Turns that the engine runs."),
    _shared("num_requests_waiting", GAUGE, "Turns that the engine has and does not run."),
    _own("num_requests_waiting_by_reason", GAUGE, "The same, by what they wait as.", "reason"),
    _own("turns_live", GAUGE, "Turns of clients that have begun and not ended."),
    _own("turns_streamed", GAUGE, "Turns that run with their KV in the host tier."),
    _own("stream_undelivered_tokens", GAUGE, "Tokens of replies that readers have not taken."),
    _own("queue_wait_seconds", GAUGE, "What a new turn would wait, as predicted."),
    _own("turns_total", COUNTER, "Turns of clients that have ended.", "outcome"),
    _shared("request_success_total", COUNTER, "Turns that were not failures.", "finished_reason"),
    _shared("admission_rejections_total", COUNTER, "Turns and warms not admitted.", "reason"),
    _own("call_errors_total", COUNTER, "Calls that ended with an error.", "reason"),
    _shared("num_preemptions_total", COUNTER, "Turns that lost their place and wait for another."),
    _shared("time_to_first_token_seconds", HISTOGRAM, "From admission to the first token."),
    _shared("inter_token_latency_seconds", HISTOGRAM, "From a token of a reply to the next."),
    _shared("e2e_request_latency_seconds", HISTOGRAM, "From admission to the stored end."),
    _shared("request_queue_time_seconds", HISTOGRAM, "From the engine's queue to a place."),
    _shared("request_prefill_time_seconds", HISTOGRAM, "From a place to the first token."),
    _shared("request_decode_time_seconds", HISTOGRAM, "From the first token to the last."),
    # tokens, and where those of prompts came from
    _shared("prompt_tokens_total", COUNTER, "Tokens of contexts of turns that have ended."),
    _shared("prompt_tokens_cached_total", COUNTER, "Of them, those whose KV was there."),
    _shared("prompt_tokens_cached_by_source_total", COUNTER, "The same, by where.", "source"),
    _shared("generation_tokens_total", COUNTER, "Tokens generated."),
    _shared("prefix_cache_queries_total", COUNTER, "Tokens looked for in the device tier."),
    _shared("prefix_cache_hits_total", COUNTER, "Tokens found in the device tier."),
    _shared(
        "external_prefix_cache_queries_total", COUNTER, "Tokens then looked for in the host's."
    ),
    _shared("external_prefix_cache_hits_total", COUNTER, "Tokens found in the host tier."),
    _own("kv_recomputed_tokens_total", COUNTER, "Tokens whose KV was lost, by why.", "reason"),
    _own("tenant_tokens_total", COUNTER, "Tokens computed for a tenant.", "tenant"),
    _own("idle_tokens_total", COUNTER, "Tokens computed for turns that had ended."),
    _shared("request_prompt_tokens", HISTOGRAM, "Tokens of a turn's context."),
    _shared("request_generation_tokens", HISTOGRAM, "Tokens of a reply."),
    _shared("iteration_tokens_total", HISTOGRAM, "Tokens computed in an iteration."),
    # the cache
    _shared("kv_cache_usage_perc", GAUGE, "Share of device pages without which KV would be lost."),
    _own(
        "kv_pages",
        GAUGE,
        "Pages of a tier: used, clean (a copy is in the host's), free.",
        "tier",
        "state",
    ),
    _own("kv_copy_bytes_total", COUNTER, "Bytes of KV that were copied.", "direction"),
    _own("kv_chunks_total", COUNTER, "What happened to chunks.", "event"),
    _own("conversations", GAUGE, "Conversations: stored, with KV in a tier, with a turn.", "state"),
    # the engine process
    _own("engine_up", GAUGE, "Whether the engine takes turns."),
    _own("engine_restarts_total", COUNTER, "How often the engine was started again."),
    _own("engine_heartbeat_age_seconds", GAUGE, "Since the engine was last heard of."),
    # the service process and the history
    _own("serving", GAUGE, "Whether the daemon takes new turns."),
    _own("uptime_seconds", GAUGE, "Since the daemon's start."),
    _own("event_loop_lag_seconds", GAUGE, "How late the loop was in the last minute.", "quantile"),
    _own("calls", GAUGE, "Calls of clients that have not ended."),
    _own("store_commit_seconds", HISTOGRAM, "What a transaction waited for the disk."),
    _own("store_jobs", GAUGE, "Jobs of the history's thread that have not ended."),
    _own("store_oldest_job_seconds", GAUGE, "Since the oldest of them was put in."),
    _own("store_journal_bytes", GAUGE, "Length of the history's write-ahead log."),
    _own("erasure_pending", GAUGE, "Whether deleted text is still in the files."),
    _own("history_problems", GAUGE, "What is damaged in the history."),
    _own("disk_full", GAUGE, "Whether the disk of the history is full."),
    _own("scrub_passes_total", COUNTER, "How often the whole history was looked through."),
    _own("backup_age_seconds", GAUGE, "Age of what the backup lacks; none without --backup."),
    _own("backup_failing", GAUGE, "Whether the backup cannot be written; none without --backup."),
    _own("audit_lines_lost", GAUGE, "Lines that the audit log has lost since it could be written."),
    # batch jobs
    _own("jobs", GAUGE, "Batch jobs.", "state"),
    _own("job_lines_running", GAUGE, "Lines of batch jobs that the engine has."),
    _own("job_tokens_per_second", GAUGE, "Tokens of batch jobs in a second."),
)
