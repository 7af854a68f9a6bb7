"""`pensieve chat`: a conversation in a terminal, with a daemon or with an engine in this process.

Ctrl-C ends the turn and keeps what was said of it; at the prompt it clears the line.  Ctrl-D ends the
program.  Whatever was answered is in the data folder, and `/resume ID` goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.config import Resolved
from pensieve.errors import InvalidArgument, NotFound, PensieveError, TurnFailed, Unavailable

if TYPE_CHECKING:
    from pensieve.cli.chat_backends import Partner, Spoken

HELP = """\
/new [ID]        begin another conversation
/list            the latest conversations
/resume ID       go on with one of them
/messages        what was said in this one
/fork [ID]       go on with a copy of this conversation
/undo            take back the last turn
/delete          forget this conversation, on disk as well
/stats           what the engine has done
/bye             leave (or Ctrl-D)
Ctrl-C           stop the reply; what was said of it stays"""


SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversation", metavar="ID", help="go on with (or begin) this one")
    parser.add_argument("-q", "--message", metavar="TEXT", help="say this, print the reply, leave")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    quiet, values = arguments.message is not None, resolved.values
    sampling = {name: values[name] for name in SAMPLING if values[name] is not None}
    with contextlib.ExitStack() as stack:
        partner, name, seconds = _partner(stack, resolved, quiet)
        talk = Talk(partner, sampling, values["system"] or "", bool(values["stats"]))
        talk.open(arguments.conversation or _new_id())
        if quiet:
            talk.say(arguments.message)
            return 0
        print(f"ready: {name} ({seconds:.1f} s). /help for help.")
        talk.loop(resolved.settings.data / "chat_history")
    return 0


def _partner(
    stack: contextlib.ExitStack, resolved: Resolved, quiet: bool
) -> tuple[Partner, str, float]:
    """Who to talk to, what it is called, and how long it took to get there."""
    from pensieve.cli import chat_backends as partners

    started = time.monotonic()
    address = resolved.values["daemon"]
    if address is None:
        with _status(quiet) as report:
            from pensieve.launch.engine import start

            report("opening the history")
            runtime = stack.enter_context(start(resolved.settings, "pensieve chat", report))
        name = resolved.settings.model or "the built-in model (for trying the machinery)"
        return partners.EngineHere(runtime), name, time.monotonic() - started

    from pensieve.client import Client, Retry
    from pensieve.client.admin import Admin
    from pensieve.launch.admin_socket import socket_path

    token, tls = resolved.values["token"], resolved.values["tls_ca"] or False
    options: dict[str, Any] = {"token": token, "tls": tls}
    client = stack.enter_context(Client(address, retry=Retry(retries=12), **options))
    if not client.healthy():
        raise Unavailable(f"no daemon serves at {address}; `pensieve serve` starts one")
    resolved.settings.data.mkdir(parents=True, exist_ok=True)

    def admin() -> Admin:
        path = socket_path(resolved.settings.data)
        local = f"unix:{path.absolute()}" if path.exists() else address
        return Admin(local, retry=Retry(retries=0), **options)

    return partners.Daemon(client, admin), address, time.monotonic() - started


class Talk:
    """One terminal, one conversation at a time."""

    def __init__(
        self, partner: Partner, sampling: dict[str, Any], system: str, stats: bool
    ) -> None:
        self.partner = partner
        self.sampling = sampling
        self.system = system
        self.stats = stats
        self.conversation_id = ""

    def open(self, conversation_id: str) -> None:
        """Go on with a conversation; one that is new is created with its first message."""
        self.conversation_id = conversation_id

    def loop(self, history: Path) -> None:
        self._read_history(history)
        try:
            while True:
                try:
                    line = input("> ").strip()
                except KeyboardInterrupt:
                    print()
                    continue
                except EOFError:
                    print()
                    return
                if line == "/bye":
                    return
                try:
                    if line.startswith("/"):
                        self.command(line)
                    elif line:
                        self.say(line)
                except (TurnFailed, InvalidArgument, NotFound) as error:
                    print(f"! {error}")
                except Unavailable as error:
                    if self.partner.dead():
                        raise
                    print(f"! {error}")
                except PensieveError as error:
                    print(f"! {error}")
        finally:
            self._write_history(history)

    # -- a turn --

    def say(self, text: str) -> None:
        """Stream the reply to the terminal."""
        pieces = self.partner.say(self.conversation_id, text, self.system, self.sampling)
        piece = next(pieces, None)
        while piece is not None:
            try:
                sys.stdout.write(piece)
                sys.stdout.flush()
                piece = next(pieces, None)
            except KeyboardInterrupt:  # the partner's to handle, wherever it came
                try:
                    piece = pieces.throw(KeyboardInterrupt)
                except StopIteration:
                    piece = None
        print()
        if self.stats:
            print(self.partner.cost(), file=sys.stderr)

    # -- commands --

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        commands = {
            "/help": self._help,
            "/new": self._new,
            "/list": self._list,
            "/resume": self._resume,
            "/messages": self._messages,
            "/fork": self._fork,
            "/undo": self._undo,
            "/delete": self._delete,
            "/stats": self._stats,
        }
        if name not in commands:
            raise InvalidArgument(name, "is no command; /help lists them")
        commands[name](argument)

    def _help(self, argument: str) -> None:
        print(HELP)

    def _new(self, argument: str) -> None:
        self.open(argument or _new_id())
        print(f"conversation {self.conversation_id}")

    def _list(self, argument: str) -> None:
        found = self.partner.latest()
        for each in found:
            mark = "*" if each.conversation_id == self.conversation_id else " "
            print(
                f"{mark} {each.conversation_id:<28} {each.updated_at:%Y-%m-%d %H:%M}  "
                f"{each.num_messages:>4} messages  {each.num_tokens:>7,} tokens"
            )
        if not found:
            print("none yet")

    def _resume(self, argument: str) -> None:
        messages = self.partner.messages(argument or self.conversation_id)
        self.open(argument or self.conversation_id)
        self._show(messages[-2:])

    def _messages(self, argument: str) -> None:
        self._show(self.partner.messages(self.conversation_id))

    def _show(self, messages: list[Spoken]) -> None:
        for message in messages:
            print(f"{message.role}: {message.text}")

    def _fork(self, argument: str) -> None:
        target = argument or _new_id()
        self.partner.fork(self.conversation_id, target)
        self.open(target)
        print(f"conversation {self.conversation_id}")

    def _undo(self, argument: str) -> None:
        revisions = sorted({each.revision for each in self.partner.messages(self.conversation_id)})
        if not revisions or revisions[-1] == 0:
            raise InvalidArgument("/undo", "nothing was said yet")
        self.partner.rewind(self.conversation_id, revisions[-2] if len(revisions) > 1 else 0)
        print("the last turn is taken back")

    def _delete(self, argument: str) -> None:
        self.partner.delete(self.conversation_id)
        self._new("")

    def _stats(self, argument: str) -> None:
        for name, value in self.partner.stats():
            print(f"{name.replace('_', ' '):<32} {value:>14,.6g}")

    # -- the line editor's history --

    @staticmethod
    def _read_history(path: Path) -> None:
        try:
            import readline
        except ImportError:  # a Python without it still reads lines
            return
        readline.set_auto_history(True)
        with contextlib.suppress(OSError):
            readline.read_history_file(path)

    @staticmethod
    def _write_history(path: Path) -> None:
        try:
            import readline
        except ImportError:
            return
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)


def _new_id() -> str:
    return f"chat-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


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
