"""`pensieve chat` connects a terminal to a daemon, its own or one that runs elsewhere.

Without an address it runs the same daemon as `pensieve serve` in this process, on a private socket in
the data folder (launch/embedded_daemon.py).  Ctrl-C while the model loads ends the program.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pensieve.config import Resolved
from pensieve.errors import ServerFault, Unavailable

if TYPE_CHECKING:
    from pensieve.cli.chat_terminal import Chat
    from pensieve.client import Client
    from pensieve.client.admin import Admin

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversation", metavar="ID", help="continue this conversation, or begin it"
    )
    parser.add_argument(
        "-q", "--message", metavar="TEXT", help="send this, print the reply and exit"
    )


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    quiet, started = arguments.message is not None, time.monotonic()
    with contextlib.ExitStack() as stack:
        if resolved.values["daemon"] is None:
            chat, name = _with_daemon_here(stack, resolved, quiet)
        else:
            chat, name = _with_daemon_at(stack, resolved, resolved.values["daemon"])
        if arguments.conversation is not None:
            chat.open(arguments.conversation)
        if quiet:
            chat.say(arguments.message)
            return 0
        print(f"ready: {name} ({time.monotonic() - started:.1f} s). /help for help.")
        chat.loop(resolved.settings.data / "chat_history")
    return 0


def _with_daemon_here(
    stack: contextlib.ExitStack, resolved: Resolved, quiet: bool
) -> tuple[Chat, str]:
    """A daemon is started in this process; the chat, and what it talks to."""
    _log_errors(stack)
    with _status(quiet) as report:
        report("opening the history")
        from pensieve.launch.embedded_daemon import EmbeddedDaemon

        daemon = stack.enter_context(EmbeddedDaemon(resolved, "pensieve chat", report))
    from pensieve.client import Client
    from pensieve.client.admin import Admin

    client = stack.enter_context(Client(daemon.address))
    name = resolved.settings.model or "the built-in model (for trying the machinery)"
    return _chat(resolved, client, lambda: Admin(daemon.address), lambda: daemon.ended), name


def _with_daemon_at(
    stack: contextlib.ExitStack, resolved: Resolved, address: str
) -> tuple[Chat, str]:
    from pensieve.client import Client, Retry
    from pensieve.client.admin import Admin
    from pensieve.service.admin_socket import socket_address, socket_path

    token, tls = resolved.values["token"], resolved.values["tls_ca"] or False
    options: dict[str, Any] = {"token": token, "tls": tls}
    client = stack.enter_context(Client(address, retry=Retry(retries=12), **options))
    if not client.healthy():
        raise Unavailable(f"no daemon serves at {address}; `pensieve serve` starts one")
    resolved.settings.data.mkdir(parents=True, exist_ok=True)

    def admin() -> Admin:
        path = socket_path(resolved.settings.data)
        local = socket_address(path) if path.exists() else address
        return Admin(local, retry=Retry(retries=0), **options)

    name = address
    with contextlib.suppress(ServerFault):  # a daemon of an earlier version cannot say
        name = f"{client.server_info().model} at {address}"
    return _chat(resolved, client, admin, lambda: False), name


def _chat(
    resolved: Resolved, client: Client, admin: Callable[[], Admin], ended: Callable[[], bool]
) -> Chat:
    from pensieve.cli.chat_terminal import Chat, Manner

    values = resolved.values
    sampling = {name: values[name] for name in SAMPLING if values[name] is not None}
    manner = Manner(sampling, values["system"] or "", bool(values["stats"]))
    return Chat(client, admin, manner, ended)


def _log_errors(stack: contextlib.ExitStack) -> None:
    """Of what a daemon logs, a terminal shows its errors."""
    log, handler = logging.getLogger("pensieve"), logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("! %(message)s"))
    log.addHandler(handler)
    stack.callback(log.removeHandler, handler)


@contextlib.contextmanager
def _status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Stages on standard error: one changing line on a terminal, plain lines in a log."""
    if not sys.stderr.isatty():
        yield (
            (lambda line: None)
            if quiet
            else (lambda line: print(line, file=sys.stderr, flush=True))
        )
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        keep = ("KV pools", "chat template", "a turn of", "conversation ")

        def report(line: str) -> None:
            if line.startswith(keep) and not quiet:
                console.print(line, style="dim", highlight=False)
            status.update(line)

        yield report
