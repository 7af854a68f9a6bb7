"""Each example of docs/examples runs unchanged against `pensieve serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve import errors
from pensieve.client import Client
from tests.conversations.rig_daemon import ServeProcess

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CERTS = ROOT / "tests" / "guard" / "certs"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
# A template with tools; the built-in model's template has none.
TEMPLATE = """{%- if tools %}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("examples")
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE)
    process = ServeProcess(folder / "data", "--chat-template", str(template), engine="echo:0.002")
    process.start()
    yield process
    assert process.stop() == 0


def environment(**given: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSIEVE_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **given}


def run(name: str, *arguments: str, code: int = 0, **given: str) -> str:
    """Return an example's output. A successful example prints nothing to stderr."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(**given),
    )
    assert finished.returncode == code, finished.stderr
    assert code or not finished.stderr
    return finished.stdout or finished.stderr


def test_every_example_is_run_by_a_test_and_linked_in_the_docs() -> None:
    here, page = Path(__file__).read_text(), (ROOT / "docs" / "sdk.md").read_text()
    for name in NAMES:
        assert f'run("{name}"' in here or f'EXAMPLES / "{name}"' in here, f"nothing runs {name}"
        assert f"](examples/{name})" in page, f"docs/sdk.md does not show {name}"
    assert len(NAMES) >= 8


def test_the_examples_pass_strict_mypy(tmp_path: Path) -> None:
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"),
            *("--cache-dir", str(tmp_path), *map(str, sorted(EXAMPLES.glob("*.py")))),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_hello_example(daemon: ServeProcess) -> None:
    assert run("hello.py", daemon.address).strip()


def test_the_streaming_example_reports_cached_tokens(daemon: ServeProcess) -> None:
    said = run("streaming.py", daemon.address)
    first, second = re.findall(r"(\d+) new tokens, (\d+) cached", said)
    assert first[1] == "0"
    assert int(second[1]) > int(first[0])


def test_the_tools_example(daemon: ServeProcess) -> None:
    said = run("tools.py", daemon.address)
    assert "the model calls: nothing" in said  # the echo engine calls no tools
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert said.splitlines()[-1] == str(roles)


def test_the_tools_example_reports_a_model_without_tools(tmp_path: Path) -> None:
    plain = ServeProcess(tmp_path / "data")
    said = run("tools.py", plain.start(), code=1)
    assert said.startswith("this model cannot be offered tools: tools: ")
    assert plain.stop() == 0


def test_the_prefix_example_shares_a_prefix_that_may_be_deleted(daemon: ServeProcess) -> None:
    said = run("prefix.py", daemon.address).splitlines()
    assert said[0].startswith("3 messages, ")
    # The first conversation computes the prefix if its turn begins before the prefix is warm.
    shared, new = re.findall(r"\((\d+) tokens from \S+, (\d+) new\)", "\n".join(said))[-1]
    assert int(shared) > int(new) > 0
    assert said[-1] == "the last conversation has 5 messages"


def test_the_batch_example_shares_the_common_prefix(daemon: ServeProcess) -> None:
    said = run("batch.py", daemon.address).splitlines()
    assert [line.split(":")[0] for line in said if line.startswith("letter-")] == [
        *("letter-1", "letter-2", "letter-3")
    ]
    (saved, whole) = re.findall(r"(\d+) of (\d+) prompt tokens", said[-1])[0]
    assert int(whole) > int(saved) > int(whole) // 2


def test_the_example_of_branches_and_undo(daemon: ServeProcess) -> None:
    said = run("branches.py", daemon.address).splitlines()
    assert sum(line.endswith("new tokens)") for line in said) == 3
    assert said[-1] == "the tale has 2 messages, the fork 4"


def test_the_example_of_many_concurrent_conversations(daemon: ServeProcess) -> None:
    said = run("many.py", daemon.address)
    assert [line.split(":")[0] for line in said.splitlines() if ": " in line][:2] == [
        "Ada",
        "Grace",
    ]
    assert re.findall(r"^(\w+): ", said, re.MULTILINE)[-1] == "Ken"


def test_the_timeouts_example_keeps_the_documented_part_of_a_reply(daemon: ServeProcess) -> None:
    said = run("timeouts.py", daemon.address)
    assert "timeout: " in said
    assert "nothing of it is in the history" in said
    assert "\n['In one sentence?']\n" in said
    assert re.search(r"^kept: '.+', cancelled$", said, re.MULTILINE)
    assert "4 messages, as before" in said
    assert re.search(r"^unavailable: .", said, re.MULTILINE)


def test_the_example_of_tokens_and_tls(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "pensieve", "token", "--file", tmp_path / "tokens.toml"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    token = made.stdout.strip()
    process = ServeProcess(
        tmp_path / "data",
        *("--token-file", str(tmp_path / "tokens.toml")),
        *("--tls-cert", str(CERTS / "server.pem"), "--tls-key", str(CERTS / "server.key")),
    )
    address = process.start().replace("127.0.0.1", "localhost")
    ca = str(CERTS / "ca.pem")
    said = run("secure.py", address, PENSIEVE_TOKEN=token, PENSIEVE_TLS_CA=ca)
    assert len(said.splitlines()) >= 2
    assert token not in said
    wrong = run("secure.py", address, code=1, PENSIEVE_TOKEN="wrong", PENSIEVE_TLS_CA=ca)
    assert wrong.startswith(f"<Client of {address}>")
    assert process.stop() == 0


def test_the_crash_example_asks_only_once_after_a_kill(
    daemon: ServeProcess, tmp_path: Path
) -> None:
    note = tmp_path / "question.json"
    killed = subprocess.Popen(
        [sys.executable, EXAMPLES / "crash.py", daemon.address, note],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert killed.stdout is not None
    assert killed.stdout.read(1)  # wait for the first character of the reply
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    said = run("crash.py", daemon.address, str(note))
    again = run("crash.py", daemon.address, str(note))
    assert again.endswith("\nstored earlier\n")
    assert again.rsplit("\n", 2)[0] == said.rsplit("\n", 2)[0]
    with Client(daemon.address) as client:
        texts = [message.text for message in client.conversation("report").messages()]
    assert texts == [json.loads(note.read_text())["text"], again.rsplit("\n", 2)[0]]


def test_the_admin_example(daemon: ServeProcess) -> None:
    with Client(daemon.address) as client:
        client.conversation("looked-at").ask("Hello.", max_tokens=20)
    said = run("admin.py", f"unix:{daemon.data}/admin.sock")
    assert "serving for " in said
    assert "0 turns run, 0 wait" in said
    assert " tokens on the device" in said
    assert said.endswith("every invariant holds\n")


def test_errors_named_in_the_sdk_page_exist() -> None:
    page = (ROOT / "docs" / "sdk.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) >= 9
    for name in named:
        assert issubclass(getattr(errors, name), errors.PensieveError)
