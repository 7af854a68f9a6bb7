"""`pensieve chat`: a conversation in a terminal, the engine in a thread of this process.

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
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from pensieve.config import Resolved, print_settings
from pensieve.errors import InvalidArgument, NotFound, PensieveError, TurnFailed, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from pensieve.cli.assembly import Runtime
    from pensieve.core.sampling import Sampling
    from pensieve.service.conversations import LiveTurn

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversation", metavar="ID", help="go on with (or begin) this one")
    parser.add_argument("-q", "--message", metavar="TEXT", help="say this, print the reply, leave")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of new conversations")
    parser.add_argument(
        "--stats", action="store_true", help="say after each reply where its tokens came from"
    )
    group = parser.add_argument_group("sampling", "defaults come from the model's own files")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--max-tokens", type=int, metavar="N", help="of a reply (default: 1024)")
    group.add_argument("--seed", type=int, metavar="N")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    if arguments.print_config:
        print_settings(resolved)
        return 0
    quiet = arguments.message is not None
    with _status(quiet) as report:
        from pensieve.cli.assembly import start

        started = time.monotonic()
        report("opening the history")
        runtime = start(resolved.settings, "pensieve chat", report)
    with runtime:
        sampling = runtime.conversations.defaults
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            if (value := getattr(arguments, name)) is not None:
                sampling = replace(sampling, **{name: value})
        talk = Talk(runtime, sampling, arguments.system or "", arguments.stats)
        talk.open(arguments.conversation or _new_id())
        if quiet:
            talk.say(arguments.message)
            return 0
        name = resolved.settings.model or "the built-in model (for trying the machinery)"
        print(f"ready: {name} ({time.monotonic() - started:.1f} s). /help for help.")
        talk.loop(resolved.settings.data / "chat_history")
    return 0


class Talk:
    """One terminal, one conversation at a time."""

    def __init__(self, runtime: Runtime, sampling: Sampling, system: str, stats: bool) -> None:
        self.runtime = runtime
        self.conversations = runtime.conversations
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
                    if self.runtime.failure is not None:
                        raise
                    print(f"! {error}")
                except PensieveError as error:
                    print(f"! {error}")
        finally:
            self._write_history(history)

    # -- a turn --

    def say(self, text: str) -> LiveTurn:
        """Stream the reply to the terminal."""
        try:
            self.runtime.store.get_conversation(self.conversation_id)
        except NotFound:
            self.conversations.create(self.conversation_id, system_prompt=self.system)
        live = self.conversations.send(self.conversation_id, text, sampling=self.sampling)
        shown = 0
        while live.finish is None:
            try:
                event = self.runtime.outbox.get(0.5)
                if event is None:
                    self._raise_if_dead()
                    continue
                self.conversations.handle(event)
                for delta in live.deltas[shown:]:
                    sys.stdout.write(delta.text)
                    shown += 1
                sys.stdout.flush()
            except KeyboardInterrupt:
                self.conversations.cancel(live)
        print()
        if live.failure is not None:
            self._raise_if_dead()
            raise live.failure
        if self.stats:
            print(_cost(live), file=sys.stderr)
        return live

    def _raise_if_dead(self) -> None:
        failure = self.runtime.failure
        if isinstance(failure, PensieveError):
            raise failure
        if failure is not None:
            raise Unavailable(f"the engine stopped: {type(failure).__name__}: {failure}")

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
        page = self.runtime.store.list_conversations(20)
        for each in page.conversations:
            when = datetime.fromtimestamp(each.updated_at).strftime("%Y-%m-%d %H:%M")
            mark = "*" if each.conversation_id == self.conversation_id else " "
            print(
                f"{mark} {each.conversation_id:<28} {when}  "
                f"{each.num_messages:>4} messages  {each.num_tokens:>7,} tokens"
            )
        if not page.conversations:
            print("none yet")

    def _resume(self, argument: str) -> None:
        conversation = self.runtime.store.get_conversation(argument or self.conversation_id)
        self.open(conversation.conversation_id)
        for message in self.runtime.store.messages(
            self.conversation_id, max(conversation.num_messages - 2, 0)
        ):
            print(f"{message.role}: {message.content}")

    def _messages(self, argument: str) -> None:
        for message in self.runtime.store.messages(self.conversation_id):
            print(f"{message.role}: {message.content}")

    def _fork(self, argument: str) -> None:
        fork = self.conversations.fork(self.conversation_id, argument or _new_id())
        self.open(fork.conversation_id)
        print(f"conversation {self.conversation_id}")

    def _undo(self, argument: str) -> None:
        messages = self.runtime.store.messages(self.conversation_id)
        revisions = sorted({message.revision for message in messages})
        if not revisions or revisions[-1] == 0:
            raise InvalidArgument("/undo", "nothing was said yet")
        before = revisions[-2] if len(revisions) > 1 else 0
        self.conversations.rewind(self.conversation_id, before)
        print("the last turn is taken back")

    def _delete(self, argument: str) -> None:
        self.conversations.delete(self.conversation_id)
        self._new("")

    def _stats(self, argument: str) -> None:
        from pensieve.engine.mailbox import Answer, GetStats

        query_id = secrets.randbits(32)
        self.runtime.mailbox.put(GetStats(query_id))
        while (event := self.runtime.outbox.get(10.0)) is not None:
            if isinstance(event, Answer) and event.query_id == query_id:
                for name, value in event.figures.items():
                    print(f"{name.replace('_', ' '):<32} {value:>14,.6g}")
                return
            self.conversations.handle(event)
        self._raise_if_dead()

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


def _cost(live: LiveTurn) -> str:
    usage = live.usage
    assert usage is not None
    from pensieve.service.conversations import usage_figures

    figures = usage_figures(usage)
    seconds = figures["total_seconds"] - figures["first_token_seconds"]
    rate = max(usage.output_tokens - 1, 0) / seconds if seconds > 0 else 0.0
    return (
        f"[{usage.prompt_tokens} tokens: {usage.new_tokens} new, {usage.device_tokens} device, "
        f"{usage.host_tokens} host, {usage.recomputed_tokens} recomputed | "
        f"first token {figures['first_token_seconds'] * 1e3:.0f} ms | "
        f"{usage.output_tokens} tokens at {rate:.1f}/s]"
    )


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
