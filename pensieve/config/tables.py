"""The settings, as tables from which flags, variables, file keys and help are made."""

from __future__ import annotations

from pensieve.config.backing_up import BACKING_UP
from pensieve.config.parsing import (
    choice,
    device,
    engine,
    file,
    names,
    number,
    parse_tier_size,
    store_url,
    switch,
    whole,
)
from pensieve.config.ranks import RANKING, RANKS
from pensieve.config.setting import Setting, Table
from pensieve.config.sharing import HISTORY_SERVICE, SHARING
from pensieve.config.talking import LOOKING, REACHING, TALKING
from pensieve.config.watching import WATCHING

GRACE_SECONDS = 5.0
TURNS_WAITING_MAX = 1024
STORE = Setting(
    "store",
    store_url,
    "",
    "where the history is, if not in SQLite in the data folder: postgresql://USER@HOST/NAME (its password "
    "is better in a file: docs/postgresql.md), or history://HOST:PORT of a `pensieve history` that several "
    "daemons share (historys:// with TLS)",
    "URL",
    secret=True,
)
DATA = Setting("data", file, "", "folder of the history (default: the user's data folder)", "DIR")
SETTINGS: Table = (
    Setting(
        "model",
        str,
        "",
        "a folder, a hub id, a GGUF file, or smollm2, which is fetched as a package (default: the small "
        "model that ships)",
        "MODEL",
    ),
    Setting(
        "device",
        device,
        "auto",
        "where to compute (auto: a GPU, if there is one)",
        "auto|cpu|cuda[:N]",
    ),
    Setting(
        "dtype",
        choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "type of weights and KV (auto: the checkpoint's)",
        "TYPE",
    ),
    Setting(
        "context_max",
        whole(16, 1 << 31),
        "",
        "most tokens of a conversation (default: the model's own limit); a model with a sliding window is "
        "served up to the window's length",
        "N",
    ),
    Setting(
        "chat_template",
        file,
        "",
        "a Jinja file in the place of the model's chat template, or for a model without one",
        "FILE",
    ),
    Setting(
        "weights",
        choice("native", "int8"),
        "native",
        "int8 halves the bytes read per step and changes replies (see `pensieve bench step`)",
        "native|int8",
    ),
    Setting(
        "kv_dtype",
        choice("auto", "int8", "fp8"),
        "auto",
        "type KV is kept in (auto: that of --dtype); int8, on a CPU, and fp8, on a GPU, take half of the "
        "memory of 16 bits and change replies (see `pensieve bench step`)",
        "auto|int8|fp8",
    ),
    Setting(
        "device_cache",
        parse_tier_size,
        "auto",
        "size of the device tier (auto: a quarter of memory; on a GPU, what is left of its own)",
        "SIZE",
    ),
    Setting(
        "host_cache",
        parse_tier_size,
        "auto",
        "size of the host tier (auto: a quarter of memory)",
        "SIZE",
    ),
    Setting(
        "stream",
        choice("auto", "on", "off"),
        "auto",
        "run turns that find no room on the device with their KV in the host tier (auto: where it pays)",
        "auto|on|off",
    ),
    Setting(
        "check_kv",
        switch,
        "",
        "compare what comes back from the host tier with its checksum, and compute again what has changed",
    ),
    Setting(
        "policy",
        choice("return", "value", "lru"),
        "return",
        "what is evicted first (return: learns which conversations come back; `pensieve simulate` compares)",
        "return|value|lru",
    ),
    Setting(
        "cost",
        file,
        "",
        "what computing and copying cost on this machine, a file of `pensieve profile --output` or "
        "`pensieve simulate --fit` (default: what `pensieve profile` has kept, or an estimate from the "
        "model's shape)",
        "FILE",
    ),
    Setting("token_budget", whole(1, 1 << 20), "512", "most tokens of an iteration", "N"),
    Setting(
        "prompt_seconds",
        number(0, 3600),
        "0.05",
        "how much longer an iteration may take for prompts while other turns generate, in seconds; what "
        "is too long is computed in pieces (0: no limit)",
        "S",
    ),
    Setting(
        "tbt",
        number(0, 3600),
        "0",
        "objective for the time between two tokens of a reply, in seconds: prompts join an iteration as far "
        "as it is predicted to take no longer (0: none)",
        "S",
    ),
    Setting(
        "ttft",
        number(0, 3600),
        "0",
        "objective for the time to the first token of a reply, in seconds: a turn that would wait longer "
        "for its turn is refused at once, and told when to come back (0: none)",
        "S",
    ),
    Setting(
        "share",
        whole(0, 1 << 20),
        "0",
        "tokens of a reply, after which a turn gives its place to one that waits, and goes on later: where "
        "there are too few places first tokens come sooner and replies end later (0: it keeps its place)",
        "N",
    ),
    Setting(
        "turns_max",
        whole(0, 1 << 16),
        "0",
        "most turns that run at once (0: as many as the device tier and --token-budget have room for)",
        "N",
    ),
    Setting(
        "threads",
        whole(0, 1024),
        "0",
        "threads that compute (0: one for each core that this process may use)",
        "N",
    ),
    Setting(
        "tensor_parallel",
        whole(1, 64),
        "1",
        "ranks that share each layer: one GPU each, or processes on the CPU",
        "N",
    ),
    Setting(
        "pipeline_stages",
        whole(1, 64),
        "1",
        "ranks that have some of the layers each, one after another: one GPU each, or processes on the CPU",
        "N",
    ),
    *RANKS,
    DATA,
    STORE,
    Setting("journal", file, "", "append a journal of all iterations to this file", "FILE"),
)
# Of the engine's settings, those that only our own code changes: no flag, no variable, no key of a file.
INTERNAL: Table = (
    Setting("chunk_tokens", whole(1, 1024), "32", "tokens per chunk"),
    Setting(
        "staging_tokens",
        whole(0, 1 << 31),
        "0",
        "of one layer, in both staging arenas (0: a tenth of the device tier; on a CPU no arenas)",
    ),
)
ENGINE: Table = (
    Setting(
        "engine",
        engine,
        "model",
        "echo: arithmetic instead of a model, to measure or test the service alone, with SECONDS for each "
        "iteration; separate: prompts in passes of their own, to compare with (`pensieve bench capacity`)",
        "model|echo[:SECONDS]|separate",
    ),
)

SERVING: Table = (
    Setting(
        "address",
        str,
        "127.0.0.1:50051",
        "where to listen (port 0: any free one)",
        "HOST:PORT",
        "listening",
    ),
    Setting(
        "http",
        str,
        "",
        "serve the APIs of others over HTTP too: a port of this machine, or where to listen",
        "[HOST:]PORT",
        "listening",
    ),
    Setting(
        "http_hosts",
        names,
        "",
        "host names served where no token is needed, beside IP addresses and its own names (*: any)",
        "NAME,…",
        "listening",
    ),
    Setting(
        "http_origins",
        names,
        "",
        "sites whose pages may call, such as https://chat.example.org (*: any)",
        "URL,…",
        "listening",
    ),
    Setting(
        "ready_file", file, "", "write the address to this file when ready", "FILE", "listening"
    ),
    Setting(
        "token_file",
        file,
        "",
        "tokens that clients need (see `pensieve token`)",
        "FILE",
        "listening",
    ),
    Setting(
        "audit_log",
        file,
        "",
        "append what operators do, deletions, and uses of tokens to this file, as JSON lines",
        "FILE",
        "listening",
    ),
    Setting("tls_cert", file, "", "certificate chain, PEM", "FILE", "listening"),
    Setting("tls_key", file, "", "the certificate's key, PEM", "FILE", "listening"),
    Setting(
        "tls_client_ca",
        file,
        "",
        "clients need a certificate of this authority, PEM",
        "FILE",
        "listening",
    ),
    Setting(
        "insecure",
        switch,
        "",
        "let other machines connect without TLS or tokens",
        group="listening",
    ),
    Setting(
        "reflection",
        switch,
        "",
        "offer gRPC reflection even if tokens are needed",
        group="listening",
    ),
    *WATCHING,
    Setting(
        "turns_waiting_max",
        whole(1, 1 << 20),
        str(TURNS_WAITING_MAX),
        "most turns begun and not ended; more are refused",
        "N",
        "turns",
    ),
    Setting(
        "grace",
        number(0, 86_400),
        f"{GRACE_SECONDS:g}",
        "how long a turn runs on after its connection broke, to be attached to again",
        "SECONDS",
        "turns",
    ),
    Setting(
        "drain_timeout",
        number(0, 86_400),
        "30",
        "how long running turns may go on when the daemon stops",
        "SECONDS",
        "turns",
    ),
    *SHARING,
    *BACKING_UP,
    *ENGINE,
    Setting(
        "tool_calls",
        choice("auto", "hermes", "llama", "mistral", "pythonic", "none"),
        "auto",
        "how the model writes calls of tools, which answers in OpenAI's form hold apart from the text (auto: "
        "as its chat template and tokenizer show; none: calls stay text)",
        "auto|hermes|llama|mistral|pythonic|none",
    ),
    Setting(
        "log_format",
        choice("auto", "text", "json"),
        "auto",
        "auto: text on a terminal",
        "auto|text|json",
    ),
)
# Settings of earlier versions, and what to do instead.
REMOVED = {
    "chain_keep": "a conversation is found by its history for 30 days after its last reply",
    "chunk_tokens": "a chunk has 32 tokens",
    "connections_max": "there may be 512 connections; limit those of each peer in a firewall or proxy",
    "echo_seconds": "write --engine echo:SECONDS",
    "heartbeat": "an engine that is silent for 30 seconds is started again",
    "iteration_timeout": "an iteration may take 300 seconds; lower --token-budget if it takes longer",
    "keepalive": "connections are pinged every 30 seconds",
    "log_turns": "each turn is logged; filter the logger pensieve.turns out with --log-format json",
    "metrics_alias": "metrics have one name each",
    "prefill_ahead": "it gained nothing; raise --turns-max for earlier first tokens",
    "request_keep": "a request_id is known for 7 days after its turn",
    "scrub": "the whole history is read once in 7 days",
    "staging": "the arenas take a tenth of the device tier; --stream off has none",
    "statement_timeout": "a job of the history may compute for 10 seconds",
    "vllm_engine": "routers speak to the APIs of --http",
}
TABLES = (SETTINGS, SERVING, REACHING, LOOKING, TALKING, HISTORY_SERVICE, RANKING)
GROUPS = {
    "settings": "each flag also as PENSIEVE_<NAME> and in the TOML file of --config",
    "daemon": "--address also as PENSIEVE_DAEMON, and as `daemon` in the file",
    "sampling": "defaults come from the model's own files; where they name none, a talk has values of its "
    "own and -q is greedy (docs/operating.md, Sampling)",
}
