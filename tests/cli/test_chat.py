"""`pensieve chat` as a program: replies, resumed conversations, and one-line errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.store import ConversationStore
from tests.conversations.rig import write_model
from tests.conversations.rig_daemon import ServeProcess
from tests.text.families import QWEN_2_5

ROOT = Path(__file__).parent.parent.parent
Chat = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), QWEN_2_5)


@pytest.fixture
def chat(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chat]:
    monkeypatch.setenv("PENSIEVE_DATA", str(tmp_path / "data"))

    def run(*arguments: str, folder: Path | str = model) -> int:
        flags = ["--device-cache", "2000t", "--host-cache", "2000t", "--max-tokens", "8"]
        return main(["chat", str(folder), *flags, *arguments])

    before = signal.getsignal(signal.SIGINT)  # a chat ignores SIGINT after its end
    yield run
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an engine that starts at once, for tests of the service with other model files."""
    monkeypatch.setenv("PENSIEVE_ENGINE", "echo")


def test_a_later_command_continues_the_conversation(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("--conversation", "trip-42", "-q", "Hello there.") == 0
    first = capsys.readouterr().out
    assert chat("--conversation", "trip-42", "-q", "And now?", "--stats") == 0
    second = capsys.readouterr()
    assert "new, 0 device, 0 host," in second.err  # the new process had to recompute the history
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        messages = store.messages("trip-42")
        assert [each.role for each in messages] == ["user", "assistant"] * 2
        assert [messages[1].content + "\n", messages[3].content + "\n"] == [first, second.out]
        assert store.verify() == []


def test_new_conversations_can_start_from_a_prefix(
    echo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = ServeProcess(tmp_path / "data")
    where = ("--address", process.start())
    with Client(where[1]) as client:
        client.prefix("rules").create(system_prompt="Be brief.", messages=[{"content": "So?"}])
        talk = ("--conversation", "c", "-q", "Hello there.", "--prefix")
        assert main(["chat", *talk, "rules", *where]) == 0
        assert [each.text for each in client.conversation("c").messages()][:3] == [
            *("Be brief.", "So?", "Hello there.")
        ]
        assert client.conversation("c").get().prefix_id == "rules"
        capsys.readouterr()
        assert main(["chat", "-q", "Hello.", "--prefix", "none", *where]) == 1
        assert "there is no prefix 'none'" in capsys.readouterr().err
        assert main(["chat", "-q", "Hello.", "--prefix", "rules", "--system", "x", *where]) == 2
        assert "a system prompt of its own" in capsys.readouterr().err
    assert process.stop() == 0


def test_a_session_with_piped_messages_and_commands(model: Path, tmp_path: Path) -> None:
    lines = ("/new a", "Hello there.", "/stats", "/fork b", "/undo", "/list", "/nonsense", "/bye")
    process = subprocess.run(
        [sys.executable, "-m", "pensieve", "chat", str(model), "--stats", "--max-tokens", "6"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_DATA": str(tmp_path), "PENSIEVE_DEVICE_CACHE": "2000t"},
    )
    assert process.returncode == 0, process.stderr
    assert "KV pools: device" in process.stderr
    assert "0 recomputed" in process.stderr
    assert "conversation b" in process.stdout
    assert "the last turn is removed" in process.stdout
    assert "\nlast reply " in process.stdout
    assert "! unknown command: /nonsense (try /help)" in process.stderr
    listed = [line for line in process.stdout.splitlines() if "just now" in line]
    marks = [(line.removeprefix("> ")[0], line.split()[-1]) for line in listed]
    assert marks == [("*", "b"), (" ", "a")]  # newest first; * marks the current conversation


def test_a_reply_that_repeats_itself_is_stopped_and_chat_reports_it(
    chat: Chat, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this model each token determines the next token, so a greedy reply ends in a loop."""
    circular = tmp_path / "circular"
    shutil.copytree(model, circular)
    weights = load_file(circular / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    save_file(weights, circular / "model.safetensors", metadata={"format": "pt"})
    short = ("--max-tokens", "150", "--stop-repetition", "64")
    assert chat("-q", "Hello there.", *short, folder=circular) == 0
    captured = capsys.readouterr()
    notice = "[stopped: the reply repeated itself. /set temperature 0.7 makes this rarer]"
    assert captured.err.count(notice) == 1
    assert notice not in captured.out


def test_ctrl_c_stops_the_reply_and_not_the_program(model: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pensieve", "chat", str(model), "--conversation=c"),
            *("--max-tokens=200", "--temperature=1", "--seed=3", "--token-budget=1"),
        ],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_DATA": str(tmp_path), "PENSIEVE_DEVICE_CACHE": "2000t"},
        start_new_session=True,
    )
    os.close(terminal)

    unread = b""

    def read_until(wanted: bytes, seconds: float = 60.0) -> None:
        """Read up to `wanted`. The rest stays unread: the terminal may deliver several lines at once."""
        nonlocal unread
        end = time.monotonic() + seconds
        while wanted not in unread and time.monotonic() < end:
            if select.select([master], [], [], 0.2)[0]:
                unread += os.read(master, 65536)
        assert wanted in unread, unread
        unread = unread.partition(wanted)[2]

    try:
        read_until(b"/help for help")
        read_until(b"> ")
        os.write(master, b"Hello there.\n")
        read_until(b"there.\r\n")
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(master, b"/bye\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    with ConversationStore.open(tmp_path, "a test") as store:
        messages = store.messages("c")
        assert messages[-1].finish_reason in ("cancelled", "length", "stop")
        assert store.verify() == []


ENGINE = b"pensieve.launch.engine_process"


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the program has ended
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
    return found


@pytest.mark.executed  # looks for the engine among the real children of the program
def test_ctrl_c_while_the_model_loads_ends_the_program(tmp_path: Path) -> None:
    """A terminal sends SIGINT to all foreground processes. Only the chat may react."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pensieve", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_DATA": str(tmp_path)},
        start_new_session=True,
    )
    # Do not stop a child that has been forked but not executed: its parent would wait for it.
    while not (engines := _children_of(process.pid)) or ENGINE not in _command(engines[0]):
        assert process.poll() is None
    os.kill(engines[0], signal.SIGSTOP)  # so that it loads as long as the test needs
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):  # no process of its group is left
        os.killpg(process.pid, 0)
    ConversationStore.open(tmp_path, "a test").close()


def test_a_second_process_is_told_which_process_holds_the_data_folder(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ConversationStore.open(tmp_path / "data", "pensieve chat"):
        assert chat("-q", "Hello.") == 3
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("pensieve: ")
    assert "pensieve chat" in error
    assert str(os.getpid()) in error


@pytest.mark.usefixtures("echo")
def test_bad_messages_are_refused_and_change_nothing(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_CONTEXT_MAX", "256")
    assert chat("--conversation", "c", "-q", "Hello there.") == 0
    capsys.readouterr()
    for text, problem in (
        ("", "content: a message must not be empty"),
        ("rain " * 300, "the limit is 256; the conversation is unchanged"),
        ("x" * 1_000_000, "cannot fit a context of 256 tokens"),
        ("half \ud83d", "surrogate"),
    ):
        assert chat("--conversation", "c", "-q", text) != 0
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert problem in error
        assert error.startswith("pensieve: ")
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        assert store.get_conversation("c").num_messages == 2
        assert store.verify() == []


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--device-cache", "lots"], 3, "--device-cache must be a size such as 6GiB"),
        (["--device-cache", "3t"], 3, "--device-cache 3t holds 1 chunks"),
        (["--host-cache", "90TiB"], 3, "Lower --device-cache or --host-cache"),
        (["--token-budget", "0"], 3, "--token-budget must be a whole number"),
        (["--top-p", "7"], 3, "--top-p must be a number in 0..1"),
        (["--config", "/nowhere/at/all"], 3, "cannot read /nowhere/at/all"),
        (["--conversation", "../etc"], 2, "conversation_id: must be 1 to 128"),
    ],
)
def test_invalid_settings_give_a_one_line_error_and_an_exit_code(
    chat: Chat, arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(*arguments, "-q", "Hello.") == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert problem in error


def test_unusable_models_give_a_one_line_error(
    chat: Chat, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(folder: Path | str) -> str:
        assert chat("-q", "Hello.", folder=folder) == 4
        captured = capsys.readouterr().err.strip().splitlines()
        return captured[-1]

    assert "there is no model folder /no/such/model" in error_of("/no/such/model")
    (tmp_path / "empty").mkdir()
    assert "empty" in error_of(tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "broken" in error_of(broken)
    weights.write_bytes((model / "model.safetensors").read_bytes())
    (broken / "tokenizer.json").write_text("{")
    assert "holds no usable tokenizer" in error_of(broken)


@pytest.mark.usefixtures("echo")
def test_a_chat_template_file_can_supply_or_replace_the_models_template(
    chat: Chat, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, config = tmp_path / "bare", "tokenizer_config.json"
    bare.mkdir()
    for file in model.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    given = json.loads((bare / config).read_text())
    template = tmp_path / "template.jinja"
    template.write_text(given.pop("chat_template").replace("You are", "You were"))
    (bare / config).write_text(json.dumps(given))
    assert chat("-q", "Hello.", folder=bare) == 4
    assert (
        "has no chat template (chat_template.jinja). Give one with --chat-template"
        in capsys.readouterr().err
    )
    assert chat("-q", "Hello.", "--chat-template", str(tmp_path / "nowhere"), folder=bare) == 4
    assert "has no nowhere" in capsys.readouterr().err
    for folder in (bare, model):  # the file also replaces an existing template
        name = f"of-{folder.name}"
        talk = ("--conversation", name, "-q", "Hello there.", "--chat-template", str(template))
        assert chat(*talk, folder=folder) == 0
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        logs = [list(store.log(f"of-{folder.name}")) for folder in (bare, model)]
        assert logs[0] == logs[1]
        prints = [store.get_conversation(f"of-{each.name}").fingerprint for each in (bare, model)]
        assert prints[0] == prints[1]


@pytest.mark.usefixtures("echo")
def test_a_history_of_a_newer_version_is_refused(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    assert chat("--conversation", "c", "-q", "Hello.") == 0
    (database,) = (tmp_path / "data").glob("*.db")
    connection = sqlite3.connect(database)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {version + 1}")
    connection.close()
    assert chat("--conversation", "c", "-q", "Hello.") == 3
    assert "newer" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.usefixtures("echo")
def test_another_tokenizer_retokenises_the_text_and_logs_it(
    chat: Chat, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("--conversation", "c", "-q", "Hello there.") == 0
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        before = store.get_conversation("c").fingerprint
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(config.replace("You are", "You were"))
    if config.count("You are") == 0:  # the template is in a separate file
        template = other / "chat_template.jinja"
        template.write_text(template.read_text() + "{# changed #}")
    capsys.readouterr()
    assert chat("--conversation", "c", "-q", "And now?", folder=other) == 0
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        assert store.get_conversation("c").fingerprint != before
        messages = store.messages("c", include_token_ids=True)
        assert [each.role for each in messages] == ["user", "assistant"] * 2
        assert all(each.token_ids for each in messages)
        assert store.verify() == []


def test_print_config_shows_the_source_of_every_setting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pensieve.toml"
    file.write_text('policy = "lru"\ntoken_budget = 64\n')
    monkeypatch.setenv("PENSIEVE_TOKEN_BUDGET", "128")
    monkeypatch.setenv("PENSIEVE_TURNS_MAX", "16")
    arguments = ["chat", str(model), "--turns-max", "8", "--config", str(file), "--print-config"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert 'policy = "lru"  # ' + str(file) in said
    assert "token_budget = 128  # PENSIEVE_TOKEN_BUDGET" in said
    assert "turns_max = 8  # flag" in said
    assert 'host_cache = "auto"  # default' in said
    file.write_text("colour = 1\n")
    assert main(arguments) == 3
    assert "unknown setting 'colour'" in capsys.readouterr().err
