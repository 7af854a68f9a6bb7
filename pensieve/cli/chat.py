"""`pensieve chat` connects a terminal to a daemon, its own or one that runs elsewhere.

It talks to the daemon at --address, else to the `pensieve serve` that has the same data folder.  Without
either it runs the same daemon in this process, on a private socket in the data folder
(launch/embedded_daemon.py).  Ctrl-C while the model loads ends the program,
in order (ctrl_c.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.flags import tls_to
from pensieve.config import REACHING, SETTINGS, Resolved
from pensieve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    ServerFault,
    Unavailable,
)

if TYPE_CHECKING:
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import Chat
    from pensieve.client import Client, ServerInfo
    from pensieve.client.admin import Admin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversation", metavar="ID", help="continue this conversation, or begin it"
    )
    parser.add_argument(
        "--prefix",
        metavar="ID",
        help="begin new conversations under this declared prefix (see `pensieve admin prefixes`)",
    )
    parser.add_argument(
        "-q",
        "--message",
        action="append",
        metavar="TEXT",
        help="send this, print the reply and exit; several are sent one after the other; -: what standard "
        "input holds",
    )


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    messages, started = _messages(arguments.message or ()), time.monotonic()
    quiet = bool(messages)
    with CtrlC() as ctrl_c, contextlib.ExitStack() as stack:
        address = resolved.values["daemon"]
        if address is None:
            _check_reaching(resolved)
            address = _daemon_of(resolved.settings.data)
        if address is None:
            chat, name = _with_daemon_here(stack, resolved, quiet, ctrl_c)
        else:
            chat, name = _with_daemon_at(stack, resolved, address, quiet, ctrl_c)
        ctrl_c.check()
        if arguments.prefix is not None:
            if resolved.sources["system"] == "flag":
                raise InvalidArgument("--system", "the prefix brings a system prompt of its own")
            chat.begin_under(arguments.prefix)
        if arguments.conversation is not None:
            if resolved.sources["system"] == "flag":
                chat.check_system(arguments.conversation)
            chat.open(arguments.conversation)
        for message in messages:
            ctrl_c.check()
            chat.say(message)
        if quiet:
            return 0
        print(
            f"ready: {name} ({time.monotonic() - started:.1f} s). /help for help.",
            file=sys.stdout if sys.stdin.isatty() else sys.stderr,
            flush=True,
        )
        chat.loop(resolved.settings.data / "chat_history")
    return 0


def _messages(given: Sequence[str]) -> list[str]:
    """The messages of -q, with standard input in the place of -."""
    if given.count("-") > 1:
        raise InvalidArgument("--message", "standard input can be one message only")
    return [_standard_input() if each == "-" else each for each in given]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise InvalidArgument("--message", "what is on standard input is not UTF-8") from None


def _daemon_of(data: Path) -> str | None:
    """The socket of the `pensieve serve` that has the data folder now, if there is one."""
    from pensieve.service.admin_socket import is_listened_to, socket_address, socket_path
    from pensieve.store.folder import holder_of

    holder = holder_of(data)
    if not holder.startswith("pensieve serve"):
        return None
    try:
        path = socket_path(data)
    except ConfigError:
        return None
    if not is_listened_to(path):
        return None
    print(f"talking through {holder}, which has {data}", file=sys.stderr, flush=True)
    return socket_address(path)


def _check_whose(resolved: Resolved, address: str, info: ServerInfo | None) -> None:
    """Settings of a daemon that is not started here; those that all commands share do not count."""
    from pensieve.launch.model_folder import model_name

    given = [
        "MODEL" if setting.name == "model" else setting.flag
        for setting in SETTINGS
        if setting.name != "data" and resolved.sources[setting.name] == "flag"
    ]
    if "MODEL" in given and info is not None and model_name(resolved.settings.model) == info.model:
        given.remove("MODEL")
    if given:
        what = "its own model and settings; leave out what is for another"
        raise InvalidArgument(", ".join(given), f"the daemon at {address} has {what}")


def _check_reaching(resolved: Resolved) -> None:
    """The daemon of this data folder has neither TLS nor tokens for those who come through its socket."""
    given = [each.flag for each in REACHING if resolved.sources[each.name] == "flag"]
    if given:
        raise InvalidArgument(", ".join(given), "is for a daemon at --address")


def _with_daemon_here(
    stack: contextlib.ExitStack, resolved: Resolved, quiet: bool, ctrl_c: CtrlC
) -> tuple[Chat, str]:
    """A daemon is started in this process; the chat, and what it talks to."""
    _log_errors(stack)
    _make_model(resolved.settings.model, ctrl_c)
    with _status(quiet) as report:
        report("opening the history")
        from pensieve.launch.embedded_daemon import EmbeddedDaemon

        daemon = stack.enter_context(
            EmbeddedDaemon(resolved, "pensieve chat", report, given_up=lambda: ctrl_c.pressed)
        )
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import Waiting
    from pensieve.client import Client
    from pensieve.client.admin import Admin

    screen = Screen()
    waiting = Waiting(ctrl_c, screen, "the engine")
    client = stack.enter_context(Client(daemon.address, sleep=waiting))
    name = resolved.settings.model or "the built-in model (for trying the machinery)"
    info = client.server_info()
    parts = (client, lambda: Admin(daemon.address), lambda: daemon.ended, ctrl_c, screen)
    return _chat(resolved, quiet, info, *parts), name


def _make_model(model: str, ctrl_c: CtrlC) -> None:
    """What is done for a model at its first time, said in lines that stay."""
    from pensieve.launch.model_folder import needs_making, resolve_model

    def check() -> None:
        if ctrl_c.pressed:
            raise KeyboardInterrupt

    if needs_making(model):
        resolve_model(model, lambda line: print(line, file=sys.stderr, flush=True), check)


def _with_daemon_at(
    stack: contextlib.ExitStack, resolved: Resolved, address: str, quiet: bool, ctrl_c: CtrlC
) -> tuple[Chat, str]:
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import Waiting
    from pensieve.client import Client, Retry
    from pensieve.client.admin import Admin

    data, token = resolved.settings.data, resolved.values["token"]
    tls = tls_to(address, resolved)
    with Client(address, token=token, tls=tls, timeout=5.0, retry=Retry(retries=0)) as first:
        info = _reached(first)
    _check_whose(resolved, address, info)
    screen = Screen()
    waiting = Waiting(ctrl_c, screen, address)
    client = stack.enter_context(
        Client(address, token=token, tls=tls, retry=Retry(retries=12), sleep=waiting)
    )
    data.mkdir(mode=0o700, parents=True, exist_ok=True)

    def admin() -> Admin:
        return Admin(address, token=token, tls=tls, retry=Retry(retries=0))

    name = address if info is None else f"{info.model} at {address}"
    return _chat(resolved, quiet, info, client, admin, lambda: False, ctrl_c, screen), name


def _reached(client: Client) -> ServerInfo | None:
    """Whatever is wrong with address, TLS or token is said before a person has written anything.

    One that loads its model, or starts its engine again, is waited for by whatever is sent first.
    """
    try:
        info = client.server_info()
    except ServerFault:  # a daemon of an earlier version cannot say
        return None
    except (Unavailable, DeadlineExceeded) as error:
        hint = "; `pensieve serve` starts a daemon" if "nothing listens" in str(error) else ""
        raise Unavailable(f"no daemon can be reached at {client.address}: {error}{hint}") from error
    if info.state == "draining":
        raise Unavailable(f"the daemon at {client.address} is about to stop, and takes no turns")
    return info


def _chat(
    resolved: Resolved,
    quiet: bool,
    info: ServerInfo | None,  # None: of a daemon of an earlier version
    client: Client,
    admin: Callable[[], Admin],
    ended: Callable[[], bool],
    ctrl_c: CtrlC,
    screen: Screen,
) -> Chat:
    from pensieve.cli.chat_sampling import ChatSampling
    from pensieve.cli.chat_terminal import Chat, Manner

    values = resolved.values
    of_the_model = info.sampling if info is not None else None
    sampling = ChatSampling(resolved, of_the_model, is_talk=not quiet)
    manner = Manner(sampling, values["system"] or "", bool(values["stats"]))
    return Chat(client, admin, manner, ended, ctrl_c, screen)


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
