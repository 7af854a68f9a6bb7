"""Where the sampling values of a chat come from: `/set`, flags, or the daemon's defaults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pensieve.cli.chat_sampling import ChatSampling
from pensieve.config import ENGINE, TALK, resolve, settings_for
from pensieve.store import ConversationStore
from tests.conversations.rig import write_model
from tests.text.families import QWEN_2_5

DAEMON = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 1024}


def sampling(
    defaults: Mapping[str, float] | None, *, from_model: bool = False, **flags: str
) -> ChatSampling:
    return ChatSampling(resolve(flags, {}, None, settings_for(ENGINE, TALK)), defaults, from_model)


def test_defaults_are_shown_but_not_sent() -> None:
    talk = sampling(DAEMON)
    assert talk.options == {}
    assert talk.line("temperature") == "temperature        0.7          (default)"
    assert talk.line("max_tokens") == "max_tokens         1024         (default)"
    talk.set("temperature", "0")
    assert talk.options == {"temperature": 0.0}
    assert talk.line("temperature") == "temperature        0.0          (/set)"
    talk.set("temperature", "default")
    assert talk.options == {}


def test_a_flag_outranks_the_default() -> None:
    assert sampling(DAEMON, temperature="0.2").options == {"temperature": 0.2}


def test_values_from_the_model_are_labelled() -> None:
    talk = sampling(DAEMON, from_model=True)
    assert talk.line("temperature") == "temperature        0.7          (the model's own)"
    assert talk.line("max_tokens") == "max_tokens         1024         (default)"


def test_without_known_defaults_nothing_is_sent() -> None:
    assert sampling(None).options == {}
    assert sampling(None).line("temperature").endswith("default")


@pytest.mark.parametrize(
    ("defaults", "advice"),
    [({"temperature": 0.0}, "0.7"), (DAEMON, "1"), ({"temperature": 0.9}, "1.2"), (None, "0.7")],
)
def test_advice_against_repetition_is_above_the_current_temperature(
    defaults: Mapping[str, float] | None, advice: str
) -> None:
    assert sampling(defaults).advice == f"/set temperature {advice}"


@pytest.mark.parametrize(
    ("arguments", "typed"), [((), "Hello.\n"), (("-q", "Hello."), "")], ids=["a talk", "-q"]
)
def test_chat_sends_only_what_was_set(
    arguments: tuple[str, ...], typed: str, tmp_path: Path
) -> None:
    """The store has the sampling that the client sent with each turn."""
    model, data = write_model(tmp_path / "model", QWEN_2_5), tmp_path / "data"
    small = ("--device-cache", "2000t", "--host-cache", "2000t", "--max-tokens", "2")
    finished = subprocess.run(
        [sys.executable, "-m", "pensieve", "chat", str(model), *small, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PENSIEVE_DATA": str(data), "PENSIEVE_ENGINE": "echo"},
    )
    assert finished.returncode == 0, finished.stderr
    with ConversationStore.open(data, "a test") as store:
        assert store.get_turn(1).sampling == {"max_tokens": 2}
