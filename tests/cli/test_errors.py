"""An error is one clear line, and is reported before anything is computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cli.main import main

CERTS = Path(__file__).parent.parent / "guard" / "certs"


def pensieve(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, including everything that libraries write to standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    return subprocess.run(
        [sys.executable, "-m", "pensieve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | variables,
    )


def usage_error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_an_unknown_flag_is_named_in_the_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["serve"], ["admin", "stats"], ["bench", "chat"]):
        name = f"pensieve {' '.join(command)}"
        first, second = usage_error_of([*command, "--prot", "50051"], capsys)
        assert first.startswith(f"{name}: unknown flag --prot")
        assert second.startswith(f"`{name} --help`")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["serve", "--devise", "cpu"], "Did you mean --device?"),
        (["serve", "--adress=0.0.0.0:1"], "Did you mean --address?"),
        (["srve"], "Did you mean serve?"),
        (["bench", "chat", "--shape", "shrt"], "Did you mean short?"),
    ],
)
def test_misspelled_words_get_a_suggestion(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error_of(words, capsys)[0].endswith(meant)


def test_a_flag_unlike_all_others_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean" not in "".join(usage_error_of(["serve", "--xyzzy"], capsys))


def test_a_misspelled_model_name_gets_a_suggestion(tmp_path: Path) -> None:
    ended = pensieve("serve", "smolm2", "--data", str(tmp_path))
    assert ended.returncode == 4
    assert 'unknown model "smolm2". Did you mean "smollm2"?' in ended.stderr


def test_a_trace_without_readable_lines_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    for text, problem in (
        ("garbage\n[1]\n", f"nothing in {trace} can be read: line 1 ("),
        ("\n", f"{trace} is empty: not a trace"),
    ):
        trace.write_text(text)
        for flags in ([], ["--json"]):
            assert main(["simulate", str(trace), *flags]) == 3
            told = capsys.readouterr()
            assert problem in told.err.splitlines()[-1]
            assert told.out == ""
    good = {"conversation": "a", "at": 0, "input_tokens": 9, "output_tokens": 3}
    trace.write_text("garbage\n" + json.dumps(good) + "\n")
    assert main(["simulate", str(trace), "--policy", "lru"]) == 0
    assert "1 lines were not understood" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["chat", "attention", "step"])
def test_a_bench_without_matplotlib_fails_before_measuring(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    model = [] if kind == "attention" else ["/there/is/no/such/model"]  # must not be the error
    assert main(["bench", kind, *model, "--plot", "drawn.png"]) == 3
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_table_is_not_truncated_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pensieve.bench.report import Report

    columns = ("policy", "conversations", "chunks", "running", "p50", "p99", "max", "moved")
    row = ("return", "100,000", "1,200,000", "256", "1.532", "1.801", "12.345", "12.3 + 14.5")
    for width in ("80", "40"):
        monkeypatch.setenv("COLUMNS", width)
        Report(False).table("milliseconds", columns, [row])
        told = capsys.readouterr().out
        assert "…" not in told
        lines = told.splitlines()
        assert any(all(name in line for name in columns) for line in lines)
        assert any(all(cell in line for cell in row) for line in lines)
        assert max(map(len, lines)) <= 80


@pytest.mark.executed
def test_grpc_log_lines_are_suppressed_by_default(tmp_path: Path) -> None:
    from tests.conversations.rig_daemon import ServeProcess

    process = ServeProcess(tmp_path / "data")
    port = process.start().rsplit(":", 1)[1]
    asked = ("chat", "--address", f"localhost:{port}", "--tls-ca", str(CERTS / "ca.pem"), "-q", "a")
    told = pensieve(*asked).stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["pensieve"]
    told = pensieve(*asked, GRPC_VERBOSITY="INFO").stderr.splitlines()
    assert len(told) > 1  # with GRPC_VERBOSITY set, gRPC's lines are shown
    assert process.stop() == 0


def test_too_large_a_device_cache_gives_a_one_line_error(
    tmp_path: Path,
) -> None:
    told = pensieve("chat", "-q", "a", "--data", str(tmp_path), "--device-cache", "500TiB")
    assert told.returncode == 3
    assert told.stderr.count("\n") == 1
    assert "Lower --device-cache" in told.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--address"], "pensieve serve: --address needs a value"),
        (["batch"], "pensieve batch: missing arguments: FILE"),
        (["chat", "a", "b"], "pensieve chat: unexpected argument b"),
        (
            ["admin", "jobs", "frob"],
            "pensieve admin jobs: unknown action 'frob'; choose one of list",
        ),
        (
            ["token", "--turns-max", "many"],
            "pensieve token: --turns-max must be a whole number in 1..2147483648, not 'many'",
        ),
        (
            ["admin", "watch", "--interval", "x"],
            "pensieve admin watch: --interval must be a number, not 'x'",
        ),
        (
            ["bench", "step", "--batch", "1,x"],
            "pensieve bench step: --batch must be whole numbers with commas between them, not '1,x'",
        ),
    ],
)
def test_errors_name_the_argument_and_its_valid_values(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error_of(words, capsys)[0].startswith(told)


def test_an_error_ends_with_its_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, remedy in (
        (["admin", "stats", "--address", "127.0.0.1:1"], "Start a daemon with `pensieve serve`"),
        (["admin", "stats", "--data", str(tmp_path)], "`pensieve serve` starts one"),
        (["serve", "--token-file", str(tmp_path / "x")], "`pensieve token --file "),
    ):
        assert main(words) != 0
        assert remedy in capfd.readouterr().err
