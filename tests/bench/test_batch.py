"""The batch bench compares ways of sharing whose replies are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.bench import batch as bench_batch
from pensieve.bench.batch import Options
from pensieve.bench.report import Report
from pensieve.cli.main import main
from pensieve.config import resolve
from pensieve.errors import PensieveError

SMALL = ["--requests", "10", "--prefix", "160", "--own", "40", "--output", "4"]


def test_each_way_of_sharing_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batch", "--shape", "0.03B", *SMALL, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["sharing"], row["requests"]) for row in rows] == [
        *(("groups", 10), ("lru", 10), ("off", 10))
    ]
    assert rows[0]["saving"] > rows[1]["saving"] >= rows[2]["saving"] == 0.0


def test_replies_that_differ_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = bench_batch._one

    def wrong(*arguments: object) -> object:
        row, replies = right(*arguments)  # type: ignore[arg-type]
        return row, replies if arguments[-1] == "groups" else [(1,)] * len(replies)

    monkeypatch.setattr(bench_batch, "_one", wrong)
    options = Options("", "0.03B", 3, 160, 40, 3.0, 2, 2000, 1, 1)
    flags = {"device_cache": "2000t", "host_cache": "0t", "data": str(tmp_path)}
    with pytest.raises(PensieveError, match="the replies of lru are others"):
        bench_batch.run(options, resolve(flags, {}).settings, Report(True))


def test_a_cache_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batch", *SMALL, "--cache", "100"]) == 2
    assert "at least 404" in capsys.readouterr().err
