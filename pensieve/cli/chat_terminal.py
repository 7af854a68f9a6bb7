"""Read lines of a chat, and send them as messages or run them as /commands.

Each command prints its result, or one line that says why it was refused. Ctrl-C stops a reply and keeps the
text so far. At the prompt, Ctrl-C clears the line (ctrl_c.py). Ctrl-D ends the program."""

from __future__ import annotations

import contextlib
import difflib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.cli.admin_stats import seconds_text
from pensieve.cli.chat_list import ChatList
from pensieve.cli.chat_sampling import SETTINGS
from pensieve.cli.chat_screen import Screen
from pensieve.cli.chat_talk import NO_TURN, Talk, TalkSettings, new_id
from pensieve.cli.conversation_lines import line_of, markdown_of, openai_message
from pensieve.cli.conversation_table import (
    CACHED_MAX,
    Cached,
    by_id,
    cached_by_id,
    cached_text,
    shortened,
)
from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.line_editor import LineEditor
from pensieve.client import Client, Message, Usage
from pensieve.client.admin import Admin
from pensieve.errors import (
    InvalidArgument,
    NotFound,
    PensieveError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from pensieve.v1 import admin_pb2 as pb

HELP = """\
/help              show this list
/new [ID]          start a new conversation; the system prompt stays
/system [TEXT]     start a new conversation with this system prompt;
                   `/system none`: without one; `/system`: show the prompt
/list [PAGE]       list your conversations, newest first
/resume WHICH      continue a conversation: its number in the list, or the
                   beginning of its id
/messages          show the messages of this conversation
/thinking          show what the model thought before its last reply
/retry             discard the last reply and generate another one
/edit [TEXT]       replace your last message; without TEXT: edit it here
/rewind [N]        remove the last N turns (default: 1); also /undo
/fork [ID]         continue with a copy of this conversation
/save FILE         write this conversation as Markdown, or as JSON if FILE ends
                   with .jsonl
/set [NAME VALUE]  set temperature, top_p, min_p, top_k, max_tokens or seed for
                   this chat; VALUE `default` resets it; without NAME: show all
/delete            delete this conversation, also on disk; asks first
/stats             show figures of this conversation and of the daemon
/bye               leave; also /quit, /exit or Ctrl-D
Several lines      paste them; or end a line with \\; or press Alt-Enter; or put
                   \"\"\" before the first and after the last
Ctrl-C             stop the reply and keep its text so far; at the prompt: clear
                   the line
Ctrl-R             search the lines that you have typed before
Tab                completes commands, settings, and ids after /resume"""

NEAR = 0.7  # minimum similarity of a suggested command
PROMPT_COLUMNS = 60  # how much of a system prompt a line quotes
GOODBYES = ("/bye", "/quit", "/exit")


class Commands:
    """The /commands of a chat."""

    def __init__(
        self,
        talk: Talk,
        client: Client,
        admin: Callable[[str], Admin],  # connects to the daemon of a conversation
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self._talk = talk
        self._client = client
        self._admin = admin
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._chat_list = ChatList(
            client, lambda conversation_id: cached_by_id(partial(admin, conversation_id))
        )
        self._editor: LineEditor | None = None  # the editor in which the command was typed
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/new": self._new,
            "/system": self._system,
            "/list": self._list,
            "/resume": self._resume,
            "/messages": self._messages,
            "/thinking": self._thinking,
            "/retry": self._retry,
            "/edit": self._edit,
            "/rewind": self._rewind,
            "/undo": self._undo,
            "/fork": self._fork,
            "/save": self._save,
            "/set": self._set,
            "/delete": self._delete,
            "/stats": self._stats,
        }

    def run(self, line: str, editor: LineEditor) -> None:
        """Run the command in a line."""
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            near = difflib.get_close_matches(name, [*self._commands, *GOODBYES], 1, NEAR)
            hint = f"Did you mean {near[0]}?" if near else "(try /help)"
            raise InvalidArgument("unknown command", f"{name}{'.' if near else ''} {hint}")
        self._editor = editor
        self._commands[name](argument.strip())

    def completions(self, line: str) -> list[str]:
        """Return completions for a line."""
        name, space, _ = line.partition(" ")
        if not space and line.startswith("/"):
            return [*self._commands, *GOODBYES]
        if name == "/set":
            return list(SETTINGS)
        if name == "/resume":
            with contextlib.suppress(PensieveError):
                return self._chat_list.newest()
        return []

    # -- conversations --

    def _help(self, argument: str) -> None:
        self._screen.line(HELP)

    def _new(self, argument: str) -> None:
        self._open(argument or new_id())
        if self._talk.system:
            prompt = shortened(self._talk.system, PROMPT_COLUMNS).rstrip()
            self._screen.line(f"the system prompt stays: {prompt}  (/system changes it)")

    def _open(self, conversation_id: str) -> None:
        self._talk.open(conversation_id)
        self._screen.line(f"conversation {conversation_id}")

    def _system(self, argument: str) -> None:
        """Start a new conversation, because the system prompt of a conversation cannot change."""
        if argument:
            self._talk.begin_with_system("" if argument == "none" else argument)
            self._open(new_id())
        self._screen.line(f"system prompt of new conversations: {self._talk.system or 'none'}")

    def _list(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and int(argument)):
            raise InvalidArgument("/list", f"needs the number of a page, not {argument!r}")
        lines = self._chat_list.page(int(argument or "1"), self._talk.conversation_id)
        self._screen.line(
            "\n".join(
                lines or ["no conversations yet" if not argument else "there is no such page"]
            )
        )

    def _resume(self, argument: str) -> None:
        name = self._chat_list.find(argument) if argument else self._talk.conversation_id
        messages = list(self._client.conversation(name).messages())
        self._open(name)
        self._show(messages[-2:])

    def _messages(self, argument: str) -> None:
        messages = self._talk.messages()
        if not messages:
            self._screen.line("no messages yet")
        self._show(messages)

    def _thinking(self, argument: str) -> None:
        self._screen.line(self._talk.thinking.strip() or "the last reply has no thinking")

    def _show(self, messages: list[Message]) -> None:
        for message in messages:
            if self._ctrl_c.pressed:
                return
            self._screen.line(f"{message.role}: {message.text}")

    def _fork(self, argument: str) -> None:
        target = argument or new_id()
        self._talk.conversation.fork(conversation_id=target)
        self._open(target)

    def _save(self, argument: str) -> None:
        if not argument:
            raise InvalidArgument("/save", "needs the name of a file, such as talk.md")
        path = Path(argument).expanduser()
        conversation = self._talk.conversation
        state, messages = conversation.get(), conversation.messages()
        write = line_of if path.suffix == ".jsonl" else markdown_of
        try:
            with path.open("x", encoding="utf-8") as file:
                try:
                    file.writelines(write(state, messages))
                except BaseException:
                    # an incomplete file could be mistaken for a complete one
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            raise InvalidArgument("/save", f"{path} exists already; choose another name") from None
        except OSError as error:
            raise InvalidArgument("/save", f"cannot write {path}: {error.strerror}") from None
        self._screen.line(f"saved in {path}")

    def _delete(self, argument: str) -> None:
        try:
            state = self._talk.conversation.get()
        except NotFound:
            raise InvalidArgument("/delete", "this conversation has no messages yet") from None
        if self._editor is not None and self._editor.is_terminal:
            title = f'"{state.title}"' if state.title else "this conversation"
            question = f"Delete {title} ({state.num_messages} messages) for good? [y/N] "
            with contextlib.suppress(EOFError):
                answer = self._ctrl_c.line(question)
                if answer is not None and answer.strip().lower() in ("y", "yes"):
                    self._delete_now()
                    return
            self._screen.line("nothing is deleted")
            return
        self._delete_now()

    def _delete_now(self) -> None:
        self._talk.conversation.delete()
        self._screen.line("deleted")
        self._new("")

    # -- the last turns --

    def _undo(self, argument: str) -> None:
        self._talk.take_back("/undo")
        self._screen.line("the last turn is removed")

    def _rewind(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and int(argument)):
            raise InvalidArgument("/rewind", f"needs a number of turns, not {argument!r}")
        num_turns = int(argument or "1")
        self._talk.take_back("/rewind", num_turns)
        turns = "turn is" if num_turns == 1 else f"{num_turns} turns are"
        self._screen.line(f"the last {turns} removed")

    def _retry(self, argument: str) -> None:
        taken = self._talk.take_back("/retry")
        before = "".join(each.text for each in taken if each.role == "assistant")
        after = self._say_again(taken, [each.text for each in taken])
        if after == before:
            self._screen.notice(f"[the same reply again: {self._talk.sampling.advice} varies it]")

    def _edit(self, argument: str) -> None:
        """Edit the last message. The old turn is kept until the new message is entered."""
        messages = self._talk.messages()
        last = next((each for each in reversed(messages) if each.role == "user"), None)
        if last is None or not last.revision:
            raise InvalidArgument("/edit", NO_TURN)
        text: str | None = argument
        if not argument:
            if self._editor is None or not self._editor.can_prefill:
                raise InvalidArgument("/edit", "needs the new message")
            text = self._editor.message(last.text)
        if not text:
            self._screen.line("" if text is None else "nothing is changed")
            return
        num_turns = len({each.revision for each in messages if each.revision >= last.revision})
        taken = self._talk.take_back("/edit", num_turns)
        turn = [each for each in taken if each.revision == last.revision]
        self._say_again(turn, [text if each.index == last.index else each.text for each in turn])

    def _say_again(self, taken: list[Message], texts: list[str]) -> str:
        """Send the messages of a turn that was removed, with these texts; return the new reply."""
        sent = [
            {**openai_message(each), "content": text}
            for each, text in zip(taken, texts, strict=True)
            if not each.finish_reason  # leave out the reply
        ]
        options: dict[str, Any] = {"metadata": taken[0].metadata} if taken[0].metadata else {}
        if "seed" in self._talk.sampling.options:
            options["seed"] = secrets.randbits(63)
        try:
            return self._talk.say(sent, **options).text
        except PensieveError as error:
            texts_sent = "\n".join(each["content"] for each in sent)
            self._screen.line(
                f"! the last turn was removed, but its message could not be sent again:\n{texts_sent}"
            )
            raise error

    # -- settings and figures --

    def _set(self, argument: str) -> None:
        sampling, words = self._talk.sampling, argument.split()
        pairs = [each.split("=", 1) for each in words]
        if not all(len(each) == 2 for each in pairs):
            pairs = [argument.replace("=", " ", 1).split(None, 1)]
        for name, *text in pairs:
            if text and text[0]:
                sampling.set(name, text[0])
        names = [each[0] for each in pairs]
        self._screen.line("\n".join(map(sampling.line, names) if names else sampling.lines()))

        if warning := sampling.warning:
            self._screen.notice(warning)

    def _stats(self, argument: str) -> None:
        cached: Cached = {}
        try:
            with self._admin(self._talk.conversation_id) as admin:
                daemon_figures = list(daemon_rows(admin.stats()))
                cached = by_id(admin.cached(limit=CACHED_MAX))
        except (PermissionDenied, Unauthenticated):
            daemon_figures = [("daemon", "its figures need an admin token")]
        rows = [*self._conversation_rows(cached), *daemon_figures]
        width = max(len(name) for name, _ in rows) + 2
        self._screen.line("\n".join(f"{name:<{width}}{text}" for name, text in rows))

    def _conversation_rows(self, cached: Cached) -> Iterator[tuple[str, str]]:
        try:
            state = self._talk.conversation.get()
        except NotFound:
            yield "conversation", "no messages yet"
        else:
            most = f" of {state.context_max_tokens:,}" if state.context_max_tokens else ""
            sizes = f"{state.num_messages:,} messages, {state.num_tokens:,}{most} tokens"
            yield "conversation", sizes
            if share := cached_text(state, cached.get(state.conversation_id)):
                yield "cached", share
        if self._talk.usage is not None:
            yield from usage_rows(self._talk.usage)


def usage_rows(usage: Usage) -> Iterator[tuple[str, str]]:
    """Return the usage of a turn as rows of a table."""
    num_earlier = usage.prompt_tokens - usage.new_tokens
    num_cached = usage.device_tokens + usage.host_tokens
    share = f", {num_cached / num_earlier:.0%} of the earlier tokens cached" if num_earlier else ""
    yield "last prompt", f"{usage.prompt_tokens:,} tokens, {usage.new_tokens:,} new{share}"
    seconds = usage.total_seconds - usage.first_token_seconds
    rate = f", {(usage.output_tokens - 1) / seconds:.1f}/s" if seconds > 0 else ""
    first = f"first token after {usage.first_token_seconds * 1e3:,.0f} ms"
    yield "last reply", f"{usage.output_tokens:,} tokens{rate}, {first}"


def daemon_rows(stats: pb.Stats) -> Iterator[tuple[str, str]]:
    """Return the statistics of a daemon that are useful in a chat, as rows of a table."""
    state = "draining" if stats.draining else "serving" if stats.serving else "not serving"
    model = " ".join(filter(None, (stats.server.model, stats.server.dtype, stats.server.device)))
    yield "daemon", f"{model}, {state}, up {seconds_text(stats.daemon_seconds)}"
    for name, tier in (("device", stats.device), ("host", stats.host)):
        if tier.pages:
            used, whole = (n * tier.chunk_tokens for n in (tier.pages_used, tier.pages))
            yield f"{name} cache", f"{used:,} of {whole:,} tokens ({used / whole:.0%})"
    counts = f"{stats.conversations_cached:,} cached of {stats.conversations_stored:,}"
    yield "conversations", counts
    yield "turns", f"{stats.turns_running} running, {stats.turns_queued} waiting"
    history = stats.device_tokens + stats.host_tokens + stats.recomputed_tokens
    if history:
        saved = (stats.device_tokens + stats.host_tokens) / history
        yield "saved", f"{saved:.0%} of {history:,} history tokens came from the cache"


class RetryNotice:
    """Waits between two attempts of the client. A line says that the client retries. Ctrl-C gives up."""

    def __init__(self, ctrl_c: CtrlC, screen: Screen, name: str) -> None:
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._name = name

    def __call__(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)  # a thread of CtrlC retries the call that stops a reply
            return
        if not self._ctrl_c.at_prompt:  # at the prompt, completion must not wait
            self._screen.show_temporary(f"[{self._name} is not ready; retrying, Ctrl-C gives up]")
            if self._ctrl_c.sleep(seconds):
                return
        raise Unavailable(f"{self._name} is not ready")


class ChatTerminal:
    """The chat of one terminal."""

    def __init__(
        self,
        client: Client,
        admin: Callable[[str], Admin],  # connects to the daemon of a conversation
        settings: TalkSettings,
        ended: Callable[[], bool],  # returns whether the daemon has ended and will not restart
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self.talk = Talk(client, settings, ctrl_c, screen)
        self._commands = Commands(self.talk, client, admin, ctrl_c, screen)
        self._ended = ended
        self._ctrl_c = ctrl_c
        self._screen = screen

    def warn(self) -> None:
        """Show a warning if the flags contain unusual sampling values."""
        if warning := self.talk.sampling.warning:
            self._screen.notice(warning)

    def loop(self, history: Path) -> None:
        """Run until the user leaves. `history` is the file of entered lines."""
        editor = LineEditor(self._ctrl_c, history, self._commands.completions)
        complain = self._screen.line if editor.is_terminal else self._screen.notice
        presses = 0  # consecutive presses of Ctrl-C at the prompt
        while True:
            try:
                text = editor.message()
            except UnicodeDecodeError:
                complain("! the line is not UTF-8")
                continue
            except EOFError:
                if editor.is_terminal:
                    self._screen.line("")
                return
            if text is None:
                presses += 1
                self._screen.line("")
                if presses > 1:
                    self._screen.notice("[press Ctrl-D or type /bye to leave]")
                continue
            presses = 0
            if text in GOODBYES:
                return
            try:
                if text.startswith("/") and "\n" not in text:
                    self._commands.run(text, editor)
                elif text:
                    self.talk.say(text)
            except PensieveError as error:
                if isinstance(error, Unavailable) and self._ended():
                    raise
                complain(f"! {error}")
