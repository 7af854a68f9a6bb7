"""`pensieve chat`: connect a terminal to a daemon.

reaching.py finds or starts the daemon. Ctrl-C while the model is loading ends the program cleanly
(ctrl_c.py).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.flags import tls_to
from pensieve.cli.reaching import (
    check_engine_flags,
    check_reach_flags,
    daemon_of,
    server_info_of,
    start_daemon,
)
from pensieve.config import Resolved
from pensieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import ChatTerminal
    from pensieve.client import Client, ServerInfo
    from pensieve.client.admin import Admin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversation", metavar="ID", help="continue this conversation, or start it"
    )
    parser.add_argument(
        "--prefix",
        metavar="ID",
        help="start new conversations with this declared prefix (see `pensieve admin prefixes`)",
    )
    parser.add_argument(
        "-q",
        "--message",
        action="append",
        metavar="TEXT",
        help="send TEXT, print the reply and exit; repeat the flag to send several messages, one after the "
        "other; `-` stands for standard input",
    )


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    messages, started = _messages(arguments.message or ()), time.monotonic()
    quiet = bool(messages)
    with CtrlC() as ctrl_c, contextlib.ExitStack() as stack:
        address = resolved.settings.daemon
        if address is None:
            check_reach_flags(resolved)
            address = daemon_of(resolved.settings.data)
        if address is None:
            chat, name = _chat_with_own_daemon(stack, resolved, quiet, ctrl_c)
        else:
            chat, name = _chat_with_daemon_at(stack, resolved, address, quiet, ctrl_c)
        ctrl_c.check()
        chat.warn()
        if arguments.prefix is not None:
            if resolved.sources["system"] == "flag":
                raise InvalidArgument("--system", "the prefix has a system prompt of its own")
            chat.talk.begin_under_prefix(arguments.prefix)
        if arguments.conversation is not None:
            if resolved.sources["system"] == "flag":
                chat.talk.check_system(arguments.conversation)
            chat.talk.open(arguments.conversation)
        for message in messages:
            ctrl_c.check()
            chat.talk.say(message)
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
    """Return the messages of -q. `-` stands for standard input."""
    if given.count("-") > 1:
        raise InvalidArgument("--message", "only one message can be read from standard input")
    return [_standard_input() if each == "-" else each for each in given]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise InvalidArgument("--message", "the text on standard input is not UTF-8") from None


def _chat_with_own_daemon(
    stack: contextlib.ExitStack, resolved: Resolved, quiet: bool, ctrl_c: CtrlC
) -> tuple[ChatTerminal, str]:
    """Start a daemon in this process. Return the chat and the name of the model."""
    daemon = start_daemon(stack, resolved, "pensieve chat", quiet, ctrl_c)
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import RetryNotice
    from pensieve.client import Client
    from pensieve.client.admin import Admin

    screen = Screen(bool(resolved.settings.plain))
    retry_notice = RetryNotice(ctrl_c, screen, "the engine")
    client = stack.enter_context(Client(daemon.address, sleep=retry_notice))
    info = client.server_info()
    name = resolved.settings.model or "the built-in model (for trying out Pensieve)"
    if resolved.settings.engine.startswith("echo"):
        name = info.model
    parts = (client, lambda _: Admin(daemon.address), lambda: daemon.ended, ctrl_c, screen)
    return _chat(resolved, quiet, info, *parts), name


def _chat_with_daemon_at(
    stack: contextlib.ExitStack, resolved: Resolved, address: str, quiet: bool, ctrl_c: CtrlC
) -> tuple[ChatTerminal, str]:
    from pensieve.cli.chat_screen import Screen
    from pensieve.cli.chat_terminal import RetryNotice
    from pensieve.client import Client, Retry
    from pensieve.client.admin import Admin

    data, token = resolved.settings.data, resolved.settings.token
    tls = tls_to(address, resolved)
    with Client(address, token=token, tls=tls, timeout=5.0, retry=Retry(retries=0)) as probe:
        info = server_info_of(probe)
    check_engine_flags(resolved, address, info)
    screen = Screen(bool(resolved.settings.plain))
    retry_notice = RetryNotice(ctrl_c, screen, address)
    client = stack.enter_context(
        Client(address, token=token, tls=tls, retry=Retry(retries=12), sleep=retry_notice)
    )
    data.mkdir(mode=0o700, parents=True, exist_ok=True)

    def admin(conversation_id: str) -> Admin:
        home = client.address_of(conversation_id)
        return Admin(home, token=token, tls=tls_to(home, resolved), retry=Retry(retries=0))

    name = address if info is None else f"{info.model} at {address}"
    return _chat(resolved, quiet, info, client, admin, lambda: False, ctrl_c, screen), name


def _chat(
    resolved: Resolved,
    quiet: bool,
    info: ServerInfo | None,  # None: a daemon of an earlier version
    client: Client,
    admin: Callable[[str], Admin],  # connects to the daemon of a conversation
    ended: Callable[[], bool],
    ctrl_c: CtrlC,
    screen: Screen,
) -> ChatTerminal:
    from pensieve.cli.chat_sampling import ChatSampling
    from pensieve.cli.chat_talk import TalkSettings
    from pensieve.cli.chat_terminal import ChatTerminal

    settings = resolved.settings
    defaults, from_model = (info.sampling, info.sampling_from_model) if info else (None, False)
    sampling = ChatSampling(resolved, defaults, from_model)
    talk_settings = TalkSettings(sampling, settings.system or "", bool(settings.stats))
    return ChatTerminal(client, admin, talk_settings, ended, ctrl_c, screen)
