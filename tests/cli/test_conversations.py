"""`pensieve conversations`: lists, exports that can be imported again, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import main
from pensieve.client import Client, Conversation, Message
from pensieve.errors import NotFound
from tests.cli.terminal import Terminal
from tests.conversations.rig_daemon import ServeProcess

CALL = {
    "id": "call1",
    "type": "function",
    "function": {"name": "rain", "arguments": '{"days": [1, 2.5], "where": "Oslo"}'},
}
Run = Callable[..., int]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("conversations") / "data"
    process = ServeProcess(folder)
    process.start()
    yield folder
    assert process.stop() == 0


@pytest.fixture(scope="module")
def client(data: Path) -> Iterator[Client]:
    with Client(f"unix:{data / 'admin.sock'}") as client:
        yield client


@pytest.fixture
def run(data: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PENSIEVE_DATA", str(data))
    for each in list(client.conversations()):
        client.conversation(each.conversation_id).delete()
    return lambda *arguments: main(["conversations", *arguments])


def talk(client: Client, name: str, *texts: str) -> None:
    for text in texts:
        client.conversation(name).ask(text, max_tokens=6)


def make_some(client: Client) -> None:
    """Create conversations of every kind."""
    talk(client, "plain", "Hello there.", "Grüße\u2028\n日本")
    client.conversation("empty").create(metadata={"a": [1, None, "ü"]})
    ruled = client.conversation("ruled")
    ruled.create(system_prompt="Be brief.", metadata={"title": "x"})
    talk(client, "ruled", "Hello there.")
    client.prefix("shots").create(system_prompt="Rules.", messages=[{"content": "So?"}])
    client.conversation("under").create(prefix_id="shots")
    client.prefix("shots").delete()
    client.conversation("given").create(
        messages=[
            {"role": "user", "content": "Rain?", "name": "Ada"},
            {
                "role": "assistant",
                "content": "I ask.",
                "tool_calls": [CALL],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "3 mm", "tool_call_id": "call1"},
            {"role": "assistant", "content": ""},
        ]
    )


def lines_of(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {each.pop("id"): each for each in found}


def test_an_export_can_be_imported_and_exported_unchanged(
    run: Run, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_some(client)
    first, second, third = (tmp_path / f"{n}.jsonl" for n in range(3))
    assert run("export", "--all", "-o", str(first)) == 0
    assert capsys.readouterr().out == "5 conversations exported\n"
    exported = lines_of(first)
    assert sorted(exported) == ["empty", "given", "plain", "ruled", "under"]
    assert exported["given"]["messages"][1] == {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
    }
    assert [each["role"] for each in exported["ruled"]["messages"]] == [
        *("system", "user", "assistant")
    ]
    assert run("rm", *exported, "--yes") == 0
    assert list(client.conversations()) == []
    capsys.readouterr()
    assert run("import", str(first)) == 0
    assert "5 conversations imported" in capsys.readouterr().err
    assert run("export", "--all", "-o", str(second)) == 0
    assert lines_of(second) == exported
    for name in ("plain", "ruled", "given", "empty"):  # the imported ones can be continued
        talk(client, name, "And now?")
    capsys.readouterr()
    assert run("import", "--new-ids", str(first)) == 0
    ids = capsys.readouterr().out.split()
    assert len(ids) == 5
    assert run("export", *ids, "-o", str(third)) == 0
    assert capsys.readouterr().out == "5 conversations exported\n"
    assert [lines_of(third)[name] for name in ids] == list(exported.values())
    assert list(tmp_path.glob("*.part")) == []


def test_a_long_conversation_and_its_fork_survive_export_and_import(
    run: Run, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3 mm", "tool_call_id": "call1"},
        {"role": "assistant", "content": "Yes."},
    ]
    long = client.conversation("long")
    long.create(system_prompt="Be brief.", metadata={"title": "x"}, messages=turns[2:] * 20)
    for _ in range(40):
        long.ask([*turns, {"role": "user", "content": "More?"}], max_tokens=1)
    fork = long.fork(39, conversation_id="fork", metadata={"title": "y"})
    fork.ask("Elsewhere?", max_tokens=2)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert run("export", "long", "fork", "-o", str(first)) == 0
    exported = lines_of(first)
    assert [len(exported[name]["messages"]) for name in ("long", "fork")] == [281, 277]
    assert run("rm", "long", "fork", "--yes") == 0
    assert run("import", str(first)) == 0
    assert "2 conversations imported" in capsys.readouterr().err
    assert run("export", "long", "fork", "-o", str(second)) == 0
    assert second.read_bytes() == first.read_bytes()
    talk(client, "long", "And now?")


def test_import_reports_bad_lines_and_imports_the_others(
    run: Run, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(client, "taken", "Hello.")
    hello = [{"role": "user", "content": "Hello."}]
    lines: list[Any] = [
        {"messages": hello},
        {"id": "taken", "messages": hello},
        {"id": "no id", "messages": hello},
        {"id": "bad", "messages": [{"role": "robot", "content": "x"}]},
        {"id": "bad", "messages": [{"role": "tool", "content": "x"}]},
        {"id": "bad", "colour": "red"},
        {"id": "good", "messages": [{"role": "developer", "content": "Be brief."}, *hello]},
    ]
    text = "\n\n".join(json.dumps(each) for each in lines) + "\n{\n"
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    assert run("import", str(path)) == 1
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("! ")]
    assert [line.split(":")[0] for line in errors] == [f"! line {n}" for n in (2, 3, 4, 5, 6, 8)]
    for wanted, line in zip(
        ("already", "1 to 128 characters of A-Z", "robot", "tool_call_id", "colour", "JSON"),
        errors,
        strict=True,
    ):
        assert wanted in line
    (drawn,) = said.out.split()
    assert sorted(each.conversation_id for each in client.conversations()) == sorted(
        [drawn, "taken", "good"]
    )
    assert [each.role for each in client.conversation("good").messages()] == ["system", "user"]


def test_conversations_are_listed_and_shown(
    run: Run, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(client, "first", "Hello there.")
    talk(client, "second", "Hello \x1b[31mred.")
    assert run("ls") == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[-1] for row in rows] == ["second", "first"]
    assert [row.split("  ")[0] for row in rows] == ["Hello [31mred.", "Hello there."]
    assert "% device" in rows[0]
    assert run("ls", "--json", "--limit", "1") == 0
    (row,) = capsys.readouterr().out.splitlines()
    values = json.loads(row)
    assert values["conversation_id"] == "second"
    assert values["title"] == "Hello [31mred."
    assert values["device_tokens"] > 0
    assert run("ls", "--limit", "1") == 0
    limited = capsys.readouterr()
    assert len(limited.out.splitlines()) == 2
    assert "--limit 10" in limited.err
    assert run("show", "second") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("user: Hello \x1b[31mred.\nassistant: ")  # output is not a terminal
    assert run("show", "second", "--json") == 0
    assert json.loads(capsys.readouterr().out)["messages"][0]["content"] == "Hello \x1b[31mred."
    assert run("show", "none") != 0
    assert "pensieve: " in capsys.readouterr().err


def test_a_conversation_deleted_during_its_export_leaves_no_partial_line(
    run: Run,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("first", "second"):
        talk(client, name, "Hello there.")
    read = Conversation.messages

    def messages(conversation: Conversation, **options: Any) -> Iterator[Message]:
        for each in read(conversation, **options):
            yield each
            if conversation.conversation_id == "second":
                raise NotFound("there is no conversation 'second'")

    monkeypatch.setattr(Conversation, "messages", messages)
    assert run("export", "--all", "-o", str(tmp_path / "some.jsonl")) == 0
    assert list(lines_of(tmp_path / "some.jsonl")) == ["first"]


def test_missing_conversations_and_files_are_errors(
    run: Run, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(client, "first", "Hello there.")
    assert run("export", "none", "first") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["id"] == "first"
    assert said.err.startswith("! none: ")
    assert run("export") == 2
    assert run("export", "first", "--all") == 2
    assert run("export", "first", "-o", str(tmp_path / "nowhere" / "x")) == 3
    assert run("import", str(tmp_path / "nowhere")) == 3
    capsys.readouterr()
    assert run("rm", "none", "first") == 1  # without a terminal, there is nobody to ask
    removed = capsys.readouterr()
    assert removed.out == "deleted first\n"
    assert removed.err.startswith("! none: ")
    assert list(client.conversations()) == []


def test_rm_asks_for_confirmation_on_a_terminal(run: Run, data: Path, client: Client) -> None:
    talk(client, "first", "Hello there.")
    with Terminal(data, "conversations", "rm", "first") as terminal:
        terminal.read_until("Delete this conversation for good? [y/N] ")
        terminal.type("\n")
        assert "nothing is deleted" in terminal.rest()
        assert terminal.wait() == 1
    assert len(list(client.conversations())) == 1
    with Terminal(data, "conversations", "rm", "fir") as terminal:  # short ids need a terminal
        assert "Hello there." in terminal.read_until("Delete this conversation for good? [y/N] ")
        terminal.type("y\n")
        assert terminal.wait() == 0
    assert list(client.conversations()) == []


def test_without_a_daemon_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSIEVE_DATA", str(tmp_path))
    assert main(["conversations", "ls"]) == 3
    assert "`pensieve serve` starts one" in capsys.readouterr().err
