"""Assemble a daemon from its settings and run it until it is stopped.

    open      find the model's folder, open the history, load tokenizer and chat template
    listen    accept connections; the health status is NOT_SERVING
    start     wait until the engine process has loaded the model; then the health status is SERVING
    stop      drain, then close connections, engine and history, in this order

`pensieve serve` runs the daemon in the main thread until a signal arrives. `pensieve chat` without an address
runs it in a thread (embedded_daemon.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.api.grpc.admin_socket import socket_path
from pensieve.api.grpc.server import Server
from pensieve.api.grpc.server_info import log_line, server_info
from pensieve.api.http.listener import serve_http
from pensieve.config import Resolved, Settings, shown_store
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.daemon_config import (
    CHAIN_KEEP_SECONDS,
    DAY_SECONDS,
    REQUEST_KEEP_SECONDS,
    SCRUB_SECONDS,
    BackupConfig,
    DaemonConfig,
)
from pensieve.conversations.engine_child import EngineChild
from pensieve.conversations.engine_client import EngineProgram
from pensieve.conversations.history import Texts
from pensieve.conversations.turn_spans import TurnSpans
from pensieve.errors import (
    ConfigError,
    InvalidArgument,
    PensieveError,
    ServerFault,
    whole_line,
)
from pensieve.guard.callers import limits_of, read_tokens
from pensieve.guard.exposure import Listening, check_exposure
from pensieve.jobs.batch_jobs import BatchJobs
from pensieve.jobs.job_store import JobStore
from pensieve.jobs.plugin import JobsPlugin
from pensieve.jobs.worker import JobsConfig
from pensieve.launch import objectives, programs
from pensieve.launch.model_folder import Report, load_texts, model_name, resolve_model
from pensieve.launch.sharing import (
    Sharing,
    announce,
    drain,
    fetch_kv,
    is_server,
    is_shared,
    open_store,
    sharing_of,
)
from pensieve.launch.traces import Traces, open_traces
from pensieve.text import style_named

SWITCH_SECONDS = 0.0005  # how long the store thread may hold the GIL while others wait


@dataclass(frozen=True)
class DaemonSetup:
    """The parts of a daemon, before anything is opened."""

    resolved: Resolved
    holder: str  # names this process in the error of another process that opens the data folder
    listening: Listening
    config: DaemonConfig
    engine_program: tuple[str, ...] = programs.ENGINE
    drain_seconds: float = 0.0  # how long running turns may take when the daemon stops
    check_history_first: bool = False  # after an unclean stop; False: check while turns are served
    traces: Traces | None = None
    tool_calls: str = "auto"  # the format of the model's tool calls: one of `text.tool_calls.NAMES`
    sharing: Sharing = field(default_factory=Sharing)
    # Returns an engine process that is already starting.
    take_prestarted_engine: Callable[[], EngineChild | None] = lambda: None


@dataclass(frozen=True)
class Hooks:
    """Functions that a daemon calls while it starts and stops."""

    report: Report
    ready: Callable[[str], None] = lambda address: None
    stopping: Callable[[], None] = lambda: None


def setup_to_serve(resolved: Resolved) -> DaemonSetup:
    """Return the setup of `pensieve serve`. Raises ConfigError if the daemon would be exposed by accident."""
    settings = resolved.settings
    if settings.backup is not None and is_server(settings.store):
        raise InvalidArgument(
            "backup", "works only with a history in SQLite. Use PostgreSQL's own backups"
        )
    sharing = sharing_of(settings)
    listening = Listening(
        address=settings.address,
        http=_http_address(settings.http),
        http_hosts=frozenset(settings.http_hosts or ()),
        http_origins=frozenset(settings.http_origins or ()),
        socket=socket_path(settings.data),
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        tls_client_ca=settings.tls_client_ca,
        tokens=read_tokens(settings.token_file) if settings.token_file else (),
        token_file=settings.token_file,
        audit_log=settings.audit_log,
        insecure=bool(settings.insecure),
        metrics=settings.metrics or "",
        peers=sharing.credentials() if settings.tls_cert is not None else None,
        peer_tokens=sharing.tokens() if settings.token_file and is_shared(settings.store) else (),
        peer_secret=sharing.secret if is_shared(settings.store) else "",
        hand_over=is_shared(settings.store),
    )
    check_exposure(listening)
    return DaemonSetup(
        resolved,
        "pensieve serve",
        listening,
        DaemonConfig(
            ttft_seconds=settings.ttft,
            limits=limits_of(listening.tokens),
            backup=_backup(settings),
            scrub_seconds=SCRUB_SECONDS,
            request_keep_seconds=REQUEST_KEEP_SECONDS,
            chain_keep_seconds=CHAIN_KEEP_SECONDS,
            conversation_keep_seconds=settings.conversation_keep * DAY_SECONDS,
            store_default=settings.store_default,
            replica=settings.replica or "",
            history=shown_store(settings.store or ""),
        ),
        programs.engine_program(resolved),
        settings.drain_timeout,
        traces=open_traces(settings.replica or "") if settings.traces else None,
        tool_calls=settings.tool_calls,
        sharing=sharing,
    )


def _http_address(given: str | None) -> str:
    """Return HOST:PORT. If only a port is given, the host is 127.0.0.1."""
    given = given or ""
    return f"127.0.0.1:{given}" if given.isdigit() else given


def _backup(settings: Settings) -> BackupConfig | None:
    if settings.backup is None:
        return None
    keep_seconds = settings.backup_keep * DAY_SECONDS
    return BackupConfig(settings.backup.absolute(), keep_seconds)


def open_server(setup: DaemonSetup, report: Report) -> Server:
    """Open everything except the engine process. Call this in the event loop that will run the server."""
    settings = setup.resolved.settings
    folder = resolve_model(settings.model, report)
    store = open_store(settings.data, setup.holder, settings.store or "", setup.sharing)
    try:
        if setup.check_history_first and store.integrity_check_due:
            report("checking the history after an unclean stop")
            if problems := store.integrity_check():
                raise ConfigError(f"the history in {settings.data} is damaged: {problems[0]}")
        if settings.store and store.folder.database_path.exists():
            report(f"the history in {settings.data} is not served: --store names another history")
        if store.folder.is_open_to_others:
            report(
                f"other users can list the data folder {settings.data}, but only its owner can read the "
                f"history. To close the folder, run `chmod 700 {settings.data}`"
            )
        for turn in store.interrupted_at_open:
            report(
                f"a turn of {turn.conversation_id} was interrupted. Its history is unchanged "
                f"(turn {turn.turn_id})"
            )
        texts = load_texts(folder, report, settings.chat_template)
        written = {**setup.resolved.written, "model": str(folder), "data": str(settings.data)}
        name = model_name(settings.model)
        if setup.engine_program[: len(programs.ECHO_ENGINE)] == programs.ECHO_ENGINE:
            name = "echo (arithmetic instead of a model)"
        program = EngineProgram(
            setup.engine_program, written, folder, name, setup.take_prestarted_engine
        )
        daemon = Daemon(store, texts, program, setup.config, report)
        if setup.traces is not None:
            spans = TurnSpans(program.model_name, setup.traces.export)
            daemon.events.ended.subscribe(spans.turn_ended)
        style = style_named(setup.tool_calls, texts.template)
        jobs = _jobs(daemon, settings.data, texts, JobsConfig(call_style=style), report)
        homes = None if jobs is None else jobs.homes
        plugins = [JobsPlugin(jobs, daemon.config.stall_seconds, homes)]
        server = Server(daemon, setup.listening, plugins)
        if setup.listening.http or setup.listening.hand_over:
            serve_http(server, texts.template, style)
        return server
    except BaseException:
        store.close()
        raise


def _jobs(
    daemon: Daemon, data: Path, texts: Texts, config: JobsConfig, report: Report
) -> BatchJobs | None:
    """Open the batch jobs. If that fails, report why and return None; conversations are served anyway."""
    try:
        jobs = JobStore.open(data)
    except PensieveError as error:
        report(f"batch jobs are not available: {whole_line(error)}")
        return None
    for name, problem in jobs.unreadable.items():
        report(f"cannot read batch job {name}: {problem}")
    return BatchJobs(daemon, jobs, texts, config=config)


async def run(server: Server, setup: DaemonSetup, hooks: Hooks, hurry: asyncio.Event) -> None:
    """Serve until `server.stopping` is set. From then on, `hurry` interrupts the running turns."""
    sys.setswitchinterval(SWITCH_SECONDS)
    daemon, loop = server.daemon, asyncio.get_running_loop()
    drain_seconds = 0.0
    try:
        address = await server.listen()
        await announce(server, setup.sharing.announced)
        starting = loop.create_task(daemon.start())
        stopping = loop.create_task(server.stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _check_objectives(setup, daemon)
            fetch_kv(server, setup.sharing)
            drain_seconds = setup.drain_seconds
            hooks.report(log_line(server_info(daemon)))
            if server.metrics_url:
                hooks.report(f"metrics at {server.metrics_url}")
            hooks.ready(address)
            if daemon.store.integrity_check_due:
                daemon.damage.check(hooks.report)
            await stopping
        else:
            _kill(daemon.engine.pid)
            starting.cancel()
        hooks.stopping()
        await drain(server)
        if server.failure is not None:
            drain_seconds = 0.0
            raise ServerFault(
                f"the daemon failed: {whole_line(server.failure)}. The log has the details"
            )
    finally:
        closing = loop.create_task(server.close(drain_seconds))
        hurrying = loop.create_task(hurry.wait())
        await asyncio.wait({closing, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            daemon.hurry()
        hurrying.cancel()
        await closing
        if setup.traces is not None:
            await asyncio.to_thread(setup.traces.close)


def _check_objectives(setup: DaemonSetup, daemon: Daemon) -> None:
    """Raise ConfigError if the first engine cannot meet an objective."""
    if (ready := daemon.engine.ready) is not None:
        smallest = objectives.SmallestTbt(ready.tbt_seconds_min, ready.tbt_source)
        objectives.check(setup.resolved.settings.tbt, smallest)


def _kill(engine_pid: int | None) -> None:
    """Kill an engine that is loading its model. It has nothing to save, and could take seconds to react."""
    if engine_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine_pid, signal.SIGKILL)
