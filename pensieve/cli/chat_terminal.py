"""A person at a terminal: lines in, which are messages or /commands, and what comes of them out.

Ctrl-C ends the turn and keeps the text of its reply so far, which is what the screen shows.  At the prompt
it clears the line.  ctrl_c.py explains why it does nothing else.  Ctrl-D ends the program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pensieve.cli.chat_commands import GOODBYES, Commands
from pensieve.cli.chat_screen import Screen
from pensieve.cli.chat_talk import Manner, Talk
from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.line_editor import LineEditor
from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.errors import PensieveError, Unavailable


class Waiting:
    """How the client waits between two tries: a line says so, and Ctrl-C gives up."""

    def __init__(self, ctrl_c: CtrlC, screen: Screen, name: str) -> None:
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._name = name

    def __call__(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)  # of a call that stops a reply
            return
        if not self._ctrl_c.at_prompt:  # there, it is for completion, which cannot wait
            self._screen.passing(f"[{self._name} cannot answer yet; trying again, Ctrl-C gives up]")
            if self._ctrl_c.sleep(seconds):
                return
        raise Unavailable(f"{self._name} cannot answer yet")


class Chat:
    """One terminal, one conversation at a time."""

    def __init__(
        self,
        client: Client,
        admin: Callable[[str], Admin],  # of a conversation's daemon
        manner: Manner,
        ended: Callable[[], bool],  # whether nothing will ever be answered again
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self.talk = Talk(client, manner, ctrl_c, screen)
        self._commands = Commands(self.talk, client, admin, ctrl_c, screen)
        self._ended = ended
        self._ctrl_c = ctrl_c
        self._screen = screen

    def loop(self, history: Path) -> None:
        editor = LineEditor(self._ctrl_c, history, self._commands.completions)
        complain = self._screen.line if editor.is_terminal else self._screen.notice
        presses = 0  # of Ctrl-C at the prompt, with nothing between them
        while True:
            try:
                text = editor.message()
            except UnicodeDecodeError:
                complain("! what was typed is no UTF-8")
                continue
            except EOFError:
                if editor.is_terminal:
                    self._screen.line("")
                return
            if text is None:
                presses += 1
                self._screen.line("")
                if presses > 1:
                    self._screen.notice("[Ctrl-D or /bye leaves]")
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
