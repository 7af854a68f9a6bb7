"""Ctrl-C in `pensieve chat`, pressed at any moment, stops the reply and nothing else."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from pensieve.cli.ctrl_c import WAKE_SECONDS, CtrlC, _wake
from pensieve.cli.markdown import without_control
from pensieve.store import ConversationStore
from tests.cli.terminal import CTRL_C, ENTERED, PROMPT, Terminal, text_of
from tests.conversations.rig_daemon import ServeProcess
from tests.scale import SCALE, SEED

DOUBLE_PRESSES = 10
GAP_SECONDS_MAX = 0.3
TYPING_SECONDS = 0.03  # between two keys of a fast typist


def replies_in(data: Path, conversation_id: str = "c") -> dict[str, str]:
    """Return the replies in the history, keyed by the message that they answer."""
    with ConversationStore.open(data, "a test") as store:
        assert store.verify() == []
        texts = [each.content for each in store.messages(conversation_id)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def press_twice(terminal: Terminal, message: str, drawn: random.Random) -> None:
    """Send a message, and press Ctrl-C at two moments: before, during or after its reply."""
    terminal.type(f"{message}\n")
    terminal.read_until(ENTERED)
    time.sleep(TYPING_SECONDS)  # a press within microseconds after Enter may clear the line
    for _ in range(2):
        time.sleep(drawn.random() * GAP_SECONDS_MAX)
        terminal.type(CTRL_C)
    time.sleep(WAKE_SECONDS + TYPING_SECONDS)  # the press may clear text that is typed earlier


def test_two_quick_presses_at_any_moment_stop_the_reply_and_show_the_stored_text(
    tmp_path: Path,
) -> None:
    """A chat that hangs or has ended would not show the mark that is typed afterwards."""
    number = DOUBLE_PRESSES * SCALE
    print(f"{number} double presses, seed {SEED}")
    drawn = random.Random(SEED)
    shown: dict[str, str] = {}
    arguments = ("chat", "--plain", "--conversation=c")
    with Terminal(tmp_path, *arguments, echo_seconds=0.004) as terminal:
        terminal.read_until("/help for help")
        for index in range(number):
            terminal.read_until(PROMPT)
            press_twice(terminal, f"message {index}.", drawn)
            terminal.type(f"/mark{index}\n")
            screen = terminal.read_until(f"! unknown command: /mark{index} (try /help)")
            assert "Traceback" not in screen
            shown[f"message {index}."] = text_of(screen.partition(PROMPT)[0])
        terminal.read_until(PROMPT)
        terminal.type("/bye\n")
        ended = terminal.rest()
        assert terminal.wait() == 0, ended
    stored = replies_in(tmp_path)
    assert list(stored) == list(shown)
    wrong = [each for each in shown if shown[each] != text_of(without_control(stored[each]))]
    assert not wrong, [(each, shown[each], stored[each]) for each in wrong]
    assert len({*stored.values()}) > number // 4, "too many replies were stopped before they began"


def test_presses_while_the_daemon_starts_end_the_program_cleanly(tmp_path: Path) -> None:
    """Press at moments from the first import to the first prompt. No process may be left."""
    drawn = random.Random(SEED)
    for _ in range(2 * SCALE):
        with Terminal(tmp_path, "chat", echo_seconds=0.004) as terminal:
            terminal.read_until("opening the history")
            time.sleep(drawn.random() * 2)
            for _ in range(3):
                terminal.type(CTRL_C)
                time.sleep(drawn.random() * GAP_SECONDS_MAX)
            terminal.type("/bye\n")
            said = terminal.rest()
            assert terminal.wait() in (0, 130), said  # 0: it had reached the prompt
            assert "Traceback" not in said
            with pytest.raises(ProcessLookupError):
                os.killpg(terminal.process.pid, 0)


def test_presses_at_the_prompt_clear_the_line_and_say_how_to_leave(tmp_path: Path) -> None:
    with Terminal(tmp_path, "chat", "--conversation=c", echo_seconds=0.004) as terminal:
        terminal.read_until(PROMPT)
        for _ in range(3):
            terminal.type("half a line")
            terminal.read_until("half a line")
            terminal.type(CTRL_C)
            terminal.read_until(PROMPT)
        terminal.type("a whole line\n")
        assert "leaves" not in terminal.read_until(ENTERED)
        terminal.read_until(PROMPT)
        terminal.type(CTRL_C)
        terminal.read_until(PROMPT)
        terminal.type(CTRL_C)
        assert "[press Ctrl-D or type /bye to leave]" in terminal.read_until(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert list(replies_in(tmp_path)) == ["a whole line"]


def test_ctrl_c_discards_no_output_of_a_slow_terminal(tmp_path: Path) -> None:
    """By default, Ctrl-C makes the kernel drop output that still waits for the terminal.

    Output waits when it does not fit into the 4 KiB buffer of the terminal.
    """
    with Terminal(tmp_path, "chat", "--conversation=c", echo_seconds=0.002) as terminal:
        terminal.read_until(PROMPT)
        for _ in range(8):  # one KiB each, which is not read
            terminal.type("/help\n")
            time.sleep(0.3)
        terminal.type(CTRL_C)
        time.sleep(TYPING_SECONDS)
        terminal.type("/mark\n")
        shown = terminal.read_until("! unknown command: /mark (try /help)")
        assert shown.count("Tab                completes commands") == 8


def test_a_press_during_a_single_message_prints_the_partial_reply_and_exits(tmp_path: Path) -> None:
    """With `-q`, the second press comes while the program ends."""
    arguments = ("chat", "--plain", "--conversation=c", "-q", "message 0.")
    with Terminal(tmp_path / "whole", *arguments, echo_seconds=0.0) as terminal:
        assert terminal.wait() == 0
    (whole,) = replies_in(tmp_path / "whole").values()
    with Terminal(tmp_path / "part", *arguments, echo_seconds=0.2) as terminal:
        terminal.read_until(whole[:8])
        terminal.type(CTRL_C)
        time.sleep(0.2)
        terminal.type(CTRL_C)
        rest = terminal.rest()
        assert terminal.wait() == 0
        assert "Traceback" not in rest
    (part,) = replies_in(tmp_path / "part").values()
    assert len(part) < len(whole)
    assert text_of(whole[:8] + rest) == text_of(without_control(part))


def test_a_later_press_gives_up_on_a_daemon_that_does_not_stop(tmp_path: Path) -> None:
    daemon = ServeProcess(tmp_path / "data", engine="echo:0.02")
    daemon.start()
    arguments = ("chat", "--address", daemon.address, "--conversation=c", "--max-tokens=5000")
    try:
        with Terminal(tmp_path / "mine", *arguments) as terminal:
            terminal.read_until(PROMPT)
            os.kill(daemon.process.pid, signal.SIGSTOP)
            terminal.type("Hello there.\n")
            terminal.read_until(ENTERED)
            time.sleep(TYPING_SECONDS)
            for _ in range(30):  # until a press comes PATIENCE_SECONDS after the first
                terminal.type(CTRL_C)
                if terminal.shows("! ", 4.0):
                    break
            terminal.read_until("! ")
            os.kill(daemon.process.pid, signal.SIGCONT)
            terminal.read_until(PROMPT)
            terminal.type("/bye\n")
            assert terminal.wait() == 0
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
        daemon.stop()


# -- its parts --


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        yield ctrl_c
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


def test_a_press_before_the_request_stops_the_reply_at_its_beginning(ctrl_c: CtrlC) -> None:
    stopped = threading.Event()
    signal.raise_signal(signal.SIGINT)
    assert ctrl_c.pressed
    with ctrl_c.stopping(stopped.set, lambda: None):
        assert stopped.wait(10)


def test_several_presses_stop_a_reply_once_and_a_late_press_gives_up(
    ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: SimpleQueue[str] = SimpleQueue()
    with ctrl_c.stopping(lambda: calls.put("stop"), lambda: calls.put("give up")):
        signal.raise_signal(signal.SIGINT)
        assert calls.get(timeout=10) == "stop"
        try:
            for _ in range(100):
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pytest.fail("a press interrupted code outside the line editor")
        monkeypatch.setattr("pensieve.cli.ctrl_c.PATIENCE_SECONDS", 0.0)
        signal.raise_signal(signal.SIGINT)
        assert calls.get(timeout=10) == "give up"
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.check()


def test_a_press_ends_the_wait_between_retries(ctrl_c: CtrlC) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert not ctrl_c.sleep(250.0)


def at_a_prompt(tmp_path: Path, before: str) -> Terminal:
    """A program that repeatedly asks for a line and prints it."""
    program = (
        "import _thread, os, readline, signal, threading\n"
        "from pensieve.cli.ctrl_c import CtrlC\n"
        "readline.parse_and_bind('tab: complete')\n"
        f"{before}\n"
        "with CtrlC() as ctrl_c:\n"
        "    while True:\n"
        "        print('came:', ctrl_c.line('> '), ctrl_c.pressed, flush=True)\n"
    )
    return Terminal(tmp_path, program="\n" + program)


def test_a_press_just_before_readline_waits_is_not_lost(tmp_path: Path) -> None:
    """Such a signal interrupts no system call. It only sets Python's pending flag."""
    with at_a_prompt(tmp_path, "threading.Timer(0.5, _thread.interrupt_main).start()") as terminal:
        terminal.read_until("came: None False", 20)


def test_a_press_while_input_returns_counts_as_a_press(
    ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python then reports that input() returned a result with an exception set."""

    def input_that_returned(cause: BaseException) -> Callable[[str], str]:
        def input_(prompt: str) -> str:
            raise SystemError("returned a result with an exception set") from cause

        return input_

    monkeypatch.setattr("builtins.input", input_that_returned(KeyboardInterrupt()))
    assert ctrl_c.line("> ") is None
    monkeypatch.setattr("builtins.input", input_that_returned(ValueError()))
    with pytest.raises(SystemError):
        ctrl_c.line("> ")


def test_a_press_inside_the_timer_handler_counts_for_the_interrupted_code(
    ctrl_c: CtrlC,
) -> None:
    def within(code: CodeType) -> Any:
        return SimpleNamespace(f_code=_wake.__code__, f_back=SimpleNamespace(f_code=code))

    ctrl_c.at_prompt = True
    ctrl_c._on_signal(signal.SIGINT, within(within.__code__))
    assert ctrl_c.at_prompt
    with pytest.raises(KeyboardInterrupt):
        ctrl_c._on_signal(signal.SIGINT, within(CtrlC.line.__code__))
    assert not ctrl_c.at_prompt


def test_a_press_during_completion_is_ignored_and_the_next_is_not(
    tmp_path: Path,
) -> None:
    presses = "readline.set_completer(lambda word, index: os.kill(os.getpid(), signal.SIGINT))"
    with at_a_prompt(tmp_path, presses) as terminal:
        terminal.read_until("> ")
        terminal.type("a\tb\n")
        terminal.read_until("came: ab False")
        terminal.type("a\t")
        terminal.read_until("a\x07")
        terminal.type(CTRL_C)
        terminal.read_until("came: None False")
