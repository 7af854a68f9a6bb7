"""Where the sampling of a talk comes from: flags, the model's files, or chat's values; -q stays greedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pensieve.cli.chat_sampling import FOR_A_TALK, ChatSampling
from pensieve.config import ENGINE, TALK, resolve, settings_for
from pensieve.store import ConversationStore
from tests.conversations.rig import write_model
from tests.text.families import QWEN_2_5


def sampling(
    of_the_model: Mapping[str, float] | None, *, is_talk: bool = True, **flags: str
) -> ChatSampling:
    return ChatSampling(resolve(flags, {}, None, settings_for(ENGINE, TALK)), of_the_model, is_talk)


def test_a_talk_with_a_model_that_names_nothing_has_values_of_its_own_and_says_so() -> None:
    talk = sampling({})
    assert talk.options == FOR_A_TALK
    assert FOR_A_TALK == {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "top_k": 40}
    assert (
        talk.line("temperature")
        == "temperature        0.8          (chat's, as the model names none)"
    )
    talk.set("temperature", "0")
    assert talk.options == {**FOR_A_TALK, "temperature": 0.0}
    assert talk.line("temperature") == "temperature        0.0          (/set)"
    talk.set("temperature", "default")
    assert talk.options == FOR_A_TALK


def test_a_flag_outranks_chats_values() -> None:
    assert sampling({}, temperature="0.2").options == {**FOR_A_TALK, "temperature": 0.2}


@pytest.mark.parametrize("named", [{"temperature": 0.6, "top_k": 20}, {"temperature": 0.0}])
def test_what_the_model_names_is_left_to_it(named: Mapping[str, float]) -> None:
    """Greedy too, if its files say so."""
    talk = sampling(named)
    assert talk.options == {}
    assert talk.line("temperature").endswith("(the model's own)")
    assert talk.line("min_p") == "min_p              the model's own"


def test_a_daemon_that_does_not_tell_is_left_alone() -> None:
    assert sampling(None).options == {}


def test_one_message_has_the_same_reply_each_time() -> None:
    assert sampling({}, is_talk=False).options == {}
    assert sampling({}, is_talk=False, temperature="0.8").options == {"temperature": 0.8}


@pytest.mark.parametrize(
    ("of_the_model", "advice"),
    [({}, "1.1"), ({"temperature": 0.6}, "0.7"), ({"temperature": 0.9}, "1.2"), (None, "0.7")],
)
def test_advice_against_a_loop_is_hotter_than_what_is_in_force(
    of_the_model: Mapping[str, float] | None, advice: str
) -> None:
    assert sampling(of_the_model).advice == f"/set temperature {advice}"


@pytest.mark.parametrize(
    ("arguments", "typed", "sent"),
    [((), "Hello.\n", FOR_A_TALK), (("-q", "Hello."), "", {})],
    ids=["a talk", "-q"],
)
def test_a_model_without_sampling_settings_is_asked_with_chats_values(
    arguments: tuple[str, ...], typed: str, sent: Mapping[str, float], tmp_path: Path
) -> None:
    """With a daemon: what was stored with the turn, which is what the client sent."""
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
        assert store.get_turn(1).sampling == {**sent, "max_tokens": 2}
