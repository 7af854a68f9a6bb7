"""Commands with several daemons that share a history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.client.addresses import ranked
from tests.client.several_rig import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def own_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSIEVE_DATA", str(tmp_path / "own"))


def test_chat_goes_to_the_home_of_its_conversation_and_fails_over(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    order = ranked("trip-42", fleet.addresses)
    talk = ["chat", "--address", ",".join(fleet.addresses), "--conversation", "trip-42", "-q"]
    assert main([*talk, "Hello there."]) == 0
    fleet.stop(order[0])
    assert main([*talk, "Still there?"]) == 0
    assert fleet.addresses_called("trip-42").count(order[0]) == 1
    assert fleet.addresses_called("trip-42").count(order[1]) == 1
    shown = capsys.readouterr().out
    assert shown.index("Hello there.") < shown.index("Still there?")


def test_conversations_of_several_daemons_are_listed_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSIEVE_DAEMON", ", ".join(fleet.addresses))
    for name in ("a", "b", "c"):
        assert main(["chat", "--conversation", name, "-q", "Hello."]) == 0
    fleet.stop(fleet.addresses[0])
    capsys.readouterr()
    assert main(["conversations", "ls"]) == 0
    assert sorted(line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]) == [*"abc"]


def test_drain_with_several_addresses_requires_a_replica(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", "drain", "--address", ",".join(fleet.addresses)]) == 2
    assert capsys.readouterr().err.strip() == (
        "pensieve: --replica: is missing: drain works on one of " + ", ".join(fleet.addresses)
    )


def test_if_no_daemon_is_reachable_the_error_names_all(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in fleet.addresses:
        fleet.stop(address)
    assert main(["chat", "--address", ",".join(fleet.addresses), "-q", "Hello."]) == 1
    told = capsys.readouterr().err
    assert "Start a daemon with `pensieve serve`" in told
    for address in fleet.addresses:
        assert f"{address}: nothing listens at {address}" in told
