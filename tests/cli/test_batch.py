"""`pensieve batch` and `pensieve admin jobs`, with a daemon whose jobs are scripted."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pensieve.cli.batch import CLEAR, ProgressLine, line_of, summary_of
from pensieve.cli.main import main
from pensieve.client import Client, Job
from pensieve.jobs.job_records import JobKey, JobState
from pensieve.jobs.plugin import JobsPlugin
from pensieve.launch import daemon as launch_daemon
from pensieve.launch import programs
from tests.cli.terminal import Terminal, text_of
from tests.conversations.rig_daemon import DaemonRig, wait_for
from tests.jobs.scripted_jobs import ScriptedJobs

LINES = [json.dumps({"custom_id": f"r{n}", "q": "w" * n}) for n in range(1, 8)]
FILE = "\n".join([*LINES[:3], "broken", "", *LINES[3:]]) + "\n"
GOOD = "\n".join(LINES) + "\n"


class JobsRig(DaemonRig):
    def __init__(self, folder: Path) -> None:
        self.jobs = ScriptedJobs(folder / "scripted")
        super().__init__(folder / "data", jobs=self.jobs)

    def work(self, num_lines: int = 1_000_000) -> None:
        """Answer up to `num_lines` lines of every running job."""

        async def act() -> None:
            for job in self.jobs.store.list_jobs():
                if job.state is JobState.RUNNING:
                    self.jobs.work(job.key, num_lines)

        self.call(act())

    def num_jobs(self) -> int:
        async def look() -> int:
            return len(self.jobs.store.list_jobs())

        return int(self.call(look()))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobsRig]:
    with JobsRig(tmp_path_factory.mktemp("jobs")) as rig:
        yield rig


@pytest.fixture
def working(rig: JobsRig) -> Iterator[None]:
    """Work on the jobs in the background, a few lines at a time."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.01):
            rig.work(3)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture(autouse=True)
def own_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSIEVE_DATA", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)


def batch(rig: JobsRig, *arguments: str) -> int:
    return main(["batch", *arguments, "--address", rig.server.address])


def job_id_of(text: str) -> str:
    return f"batch-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def wrote(path: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# -- a job --


@pytest.mark.usefixtures("working")
def test_a_file_is_answered_in_the_order_of_its_lines(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("good.jsonl").write_text(GOOD)
    assert batch(rig, "good.jsonl", "-o", "out.jsonl") == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "7 of 7 lines answered; 63 prompt tokens (56% saved), 14 output tokens; answers in out.jsonl\n"
    )
    assert shown.err.endswith("writing\n")
    assert [line["custom_id"] for line in wrote("out.jsonl")] == [f"r{n}" for n in range(1, 8)]
    assert sorted(os.listdir()) == ["good.jsonl", "out.jsonl"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(Path("out.jsonl").stat().st_mode) == 0o666 & ~umask


@pytest.mark.usefixtures("working")
def test_refused_lines_are_reported_and_written_to_the_errors_file(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.jsonl").write_text(FILE)
    assert batch(rig, "some.jsonl", "-o", "out.jsonl") == 1
    shown = capsys.readouterr()
    assert "7 of 8 lines answered, 1 refused;" in shown.out
    assert shown.out.endswith("answers in out.jsonl, errors in out.errors.jsonl\n")
    assert shown.err.splitlines()[-1] == "line 4: is no JSON"
    (error,) = wrote("out.errors.jsonl")
    assert error["response"] is None
    Path("good.jsonl").write_text(GOOD + "\n")
    assert batch(rig, "good.jsonl", "-o", "out.jsonl") == 0
    assert not Path("out.errors.jsonl").exists()  # it had the errors of another file
    assert batch(rig, "some.jsonl", "-o", "out.jsonl", "--errors", "wrong.jsonl", "--json") == 1
    shown = capsys.readouterr()
    figures = json.loads(shown.out.splitlines()[-1])
    assert (figures["num_refused"], figures["errors"]) == (1, "wrong.jsonl")
    assert len(wrote("wrong.jsonl")) == 1


@pytest.mark.usefixtures("working")
def test_only_the_first_errors_are_shown(rig: JobsRig, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.jsonl").write_text("broken\n" * 25)
    assert batch(rig, "bad.jsonl", "-o", "out.jsonl") == 1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("line ")] == [
        f"line {n}: is no JSON" for n in range(1, 11)
    ]
    assert said[-1] == "and 15 more, in out.errors.jsonl"
    assert len(wrote("out.errors.jsonl")) == 25
    assert wrote("out.jsonl") == []


@pytest.mark.usefixtures("working")
def test_a_repeated_command_reuses_its_job_unless_again_is_given(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD + "\n\n"
    Path("same.jsonl").write_text(text)
    num_before = len(rig.jobs.headers)
    for _ in range(2):
        assert batch(rig, "same.jsonl", "-o", "out.jsonl") == 0
    headers = [header for _, header in rig.jobs.headers[num_before:]]
    assert [header.job_id for header in headers] == [job_id_of(text)]
    assert headers[0].name == "same.jsonl"
    assert headers[0].sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert batch(rig, "same.jsonl", "-o", "out.jsonl", "--again") == 0
    assert batch(rig, "same.jsonl", "-o", "out.jsonl", "--name", "mine") == 0
    again, named = (header.job_id for _, header in rig.jobs.headers[num_before + 1 :])
    assert again.startswith(f"{job_id_of(text)}-")
    assert named == "mine"
    Path("same.jsonl").write_text(GOOD * 2)
    capsys.readouterr()
    assert batch(rig, "same.jsonl", "-o", "out.jsonl", "--name", "mine") == 1
    assert (
        "'mine' exists already, for a file with other content than same.jsonl"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("working")
def test_check_reports_problems_and_creates_no_job(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.jsonl").write_text(FILE)
    Path("good.jsonl").write_text(GOOD)
    num_jobs = rig.num_jobs()
    assert batch(rig, "some.jsonl", "--check") == 1
    assert capsys.readouterr().out == "line 4: is no JSON\n"
    assert batch(rig, "good.jsonl", "--check") == 0
    assert capsys.readouterr().out == "nothing is wrong with 7 lines\n"
    assert batch(rig, "some.jsonl", "--check", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {
        "lines": 8,
        "refused": 1,
        "problems": ["line 4: is no JSON"],
    }
    assert rig.jobs.headers[-1][1].check_only
    assert rig.num_jobs() == num_jobs
    assert sorted(os.listdir()) == ["good.jsonl", "some.jsonl"]


def test_a_cancelled_job_writes_its_finished_answers(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.jsonl").write_text(GOOD)
    key = JobKey("", "ended")
    ended = threading.Thread(target=lambda: cancel_when_there(rig, key))
    ended.start()
    assert batch(rig, "some.jsonl", "-o", "out.jsonl", "--name", "ended") == 1
    ended.join()
    assert capsys.readouterr().out.startswith("cancelled: 2 of 7 lines answered;")
    assert [line["custom_id"] for line in wrote("out.jsonl")] == ["r1", "r2"]


def cancel_when_there(rig: JobsRig, key: JobKey) -> None:
    with Client(rig.server.address) as client:
        wait_for(
            lambda: (key.job_id, "running") in [(j.job_id, j.state) for j in client.jobs.list()]
        )
        rig.call(work_on(rig, key, 2))
        client.jobs.cancel(key.job_id)


async def work_on(rig: JobsRig, key: JobKey, num_lines: int) -> None:
    rig.jobs.work(key, num_lines)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.jsonl", "-o", "out"], 2, "FILE: cannot read none.jsonl: No such file"),
        (["good.jsonl"], 2, "-o: is missing"),
        (["good.jsonl", "-o", "."], 2, "-o: . is a folder"),
        (["good.jsonl", "-o", "no/out"], 2, "-o: the folder no is missing or not writable"),
        (["good.jsonl", "-o", "good.jsonl"], 2, "-o: requests, answers and errors need"),
        (["good.jsonl", "-o", "o", "--errors", "./o"], 2, "-o: requests, answers and errors need"),
        (["good.jsonl", "some/model", "-o", "out"], 2, "MODEL: the daemon at"),
        (["good.jsonl", "-o", "out", "--name", "a/b"], 2, "job_id: must be 1 to 128"),
    ],
)
def test_invalid_batch_arguments_are_refused_before_any_work(
    rig: JobsRig,
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("good.jsonl").write_text(GOOD)
    num_before = len(rig.jobs.headers)
    assert batch(rig, *arguments) == code
    shown = capsys.readouterr()
    assert shown.err.startswith(f"pensieve: {words}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert len(rig.jobs.headers) == num_before


def test_an_unreachable_daemon_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.jsonl").write_text(GOOD)
    assert main(["batch", "good.jsonl", "-o", "out", "--address", "127.0.0.1:1"]) == 1
    assert "no daemon can be reached at 127.0.0.1:1" in capsys.readouterr().err


# -- unwanted ends --


def test_ctrl_c_leaves_the_job_and_prints_how_to_continue(rig: JobsRig, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(GOOD * 3)
    out = tmp_path / "out.jsonl"
    command = ["batch", str(tmp_path / "long.jsonl"), "-o", str(out), "--name", "long"]
    with Terminal(tmp_path / "own", *command, "--address", rig.server.address) as terminal:
        terminal.read_until("0 of 21 lines")
        rig.call(work_on(rig, JobKey("", "long"), 5))
        terminal.read_until("5 of 21 lines, 120 tokens/s, 56% of prompt tokens saved, 8.0 s left")
        terminal.type("\x03")
        assert (
            f"job long continues at {rig.server.address}. Repeat the command to wait for its results."
            in text_of(terminal.rest())
        )
        assert terminal.wait() == 130
    assert not out.exists()
    rig.call(work_on(rig, JobKey("", "long"), 100))
    done = subprocess.run(
        [sys.executable, "-m", "pensieve", *command, "--address", rig.server.address],
        capture_output=True,
        text=True,
        env={**os.environ, "PENSIEVE_DATA": str(tmp_path / "own")},
    )
    assert (done.returncode, len(wrote(out))) == (0, 21)


def test_a_killed_command_keeps_the_old_output_and_can_be_repeated(
    rig: JobsRig, tmp_path: Path
) -> None:
    (tmp_path / "killed.jsonl").write_text(GOOD)
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    command = [sys.executable, "-m", "pensieve", "batch", str(tmp_path / "killed.jsonl")]
    command += ["-o", str(out), "--name", "killed", "--address", rig.server.address]
    environment = {**os.environ, "PENSIEVE_DATA": str(tmp_path / "own")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        stderr = process.stderr
        assert stderr is not None
        wait_for(lambda: "of 7 lines" in stderr.readline())
        process.send_signal(signal.SIGKILL)
    assert out.read_text() == "old\n"
    num_before = len(rig.jobs.headers)
    rig.call(work_on(rig, JobKey("", "killed"), 100))
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
    assert len(rig.jobs.headers) == num_before
    assert len(wrote(out)) == 7


def test_without_a_daemon_batch_starts_one_in_the_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ScriptedJobs(tmp_path / "scripted")

    async def get(tenant: str, job_id: str) -> object:
        view = await ScriptedJobs.get(jobs, tenant, job_id)
        jobs.work(JobKey(tenant, job_id), 2)
        return view

    monkeypatch.setattr(jobs, "get", get)
    monkeypatch.setattr(
        launch_daemon, "JobsPlugin", lambda _, stall_seconds, homes: JobsPlugin(jobs, stall_seconds)
    )
    monkeypatch.setattr("pensieve.launch.programs.ENGINE", programs.ECHO_ENGINE)
    Path("good.jsonl").write_text(GOOD)
    assert main(["batch", "good.jsonl", "-o", "out.jsonl"]) == 0
    shown = capsys.readouterr()
    assert "opening the history" in shown.err
    assert len(wrote("out.jsonl")) == 7
    assert (tmp_path / "own" / "conversations.db").exists()


# -- progress --


def job(**fields: object) -> Job:
    made = Job(
        *("j", "", "", "", 0, "", False, "running", "", ""),
        *(50_000, 1_234, 3, 20, 1000, 610, 500, 1950.4, 130.0),
        *(datetime.now(UTC), None, None),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {},
            "1,237 of 50,000 lines, 3 refused, 1,950 tokens/s, 61% of prompt tokens saved, 2.2 min left",
        ),
        (
            {"state": "checking", "num_answered": 0, "num_refused": 0, "tokens_per_second": 0.0}
            | {"saved_tokens": 0, "seconds_left": None},
            "0 of 50,000 lines, checking the lines",
        ),
        (
            {"state": "paused", "tokens_per_second": 0.0, "seconds_left": None, "num_refused": 0},
            "1,234 of 50,000 lines, paused (`pensieve admin jobs resume` continues it), "
            "61% of prompt tokens saved",
        ),
    ],
)
def test_the_progress_line_of_a_job(fields: dict[str, object], line: str) -> None:
    assert line_of(job(**fields)) == line


def test_the_summary_of_a_failed_job_says_why() -> None:
    failed = job(state="ended", outcome="failed", problem="line 7 fails its checksum")
    assert summary_of(failed) == (
        "failed (line 7 fails its checksum): 1,234 of 50,000 lines answered, 3 refused; "
        "1,000 prompt tokens (61% saved), 500 output tokens"
    )


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_updates_one_line_on_a_terminal_and_appends_lines_to_a_file() -> None:
    screen, file, seconds = Screen(), io.StringIO(), [0.0]
    with ProgressLine(screen) as progress:
        progress.show(job())
        progress.show(job())
        progress.note("away")
    assert screen.getvalue() == f"{CLEAR}{line_of(job())}{CLEAR}away{CLEAR}"
    with ProgressLine(file, lambda: seconds[0]) as progress:
        for number in range(30):
            seconds[0] = float(number)
            progress.show(job(num_answered=number))
        progress.show(job(state="paused"))
        progress.note("away")
        progress.note("away")
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["3", "13", "23", "1,237", "away"]


# -- the operator --


def test_the_operator_lists_pauses_resumes_cancels_and_deletes_jobs(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--data", str(rig.daemon.store.folder.path))
    with Client(rig.server.address) as client:
        for number in (1, 2):
            client.jobs.create(FILE.encode(), job_id=f"op-{number}", name="by night")
    assert main(["admin", "jobs", *where]) == 0
    shown = capsys.readouterr().out
    assert "op-1" in shown
    assert "by night" in shown
    assert main(["admin", "jobs", "pause", "op-1", "op-2", *where]) == 0
    assert capsys.readouterr().out == "op-1: paused\nop-2: paused\n"
    assert main(["admin", "jobs", "resume", "op-1", "--json", *where]) == 0
    (resumed,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (resumed["job_id"], resumed["state"], resumed["num_refused"]) == ("op-1", "running", 1)
    assert resumed["created_at"] > 1e9
    assert main(["admin", "jobs", "cancel", "op-1", *where]) == 0
    assert capsys.readouterr().out == "op-1: ended\n"
    assert main(["admin", "jobs", "list", "op-1", "--json", *where]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["jobs"]
    assert listed["outcome"] == "cancelled"
    assert main(["admin", "jobs", "delete", "op-1", "op-2", *where]) == 0
    assert capsys.readouterr().out == "op-1: deleted\nop-2: deleted\n"
    assert main(["admin", "jobs", "list", "op-1", *where]) == 0
    assert capsys.readouterr().out == "no jobs\n"


def test_a_job_id_used_by_several_tenants_requires_the_tenant_flag(
    rig: JobsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--data", str(rig.daemon.store.folder.path))

    async def create(tenant: str) -> None:
        async def chunks() -> Iterator[bytes]:  # type: ignore[misc]
            yield FILE.encode()

        header = rig.jobs.headers[-1][1]
        await rig.jobs.create(tenant, replace(header, job_id="same", sha256=""), chunks())  # type: ignore[arg-type]

    with Client(rig.server.address) as client:
        client.jobs.create(FILE.encode(), job_id="first")
    for tenant in ("acme", "beta"):
        rig.call(create(tenant))
    assert main(["admin", "jobs", "pause", "same", "first", *where]) == 2
    assert "several tenants have a job 'same': acme, beta" in capsys.readouterr().err
    assert rig.call(rig.jobs.get("", "first")).state is JobState.RUNNING  # no job was changed
    assert main(["admin", "jobs", "pause", "same", "--tenant", "beta", *where]) == 0
    assert rig.call(rig.jobs.get("beta", "same")).state is JobState.PAUSED
    assert rig.call(rig.jobs.get("acme", "same")).state is JobState.RUNNING
    for arguments, code, words in (
        (["pause"], 2, "ID: name the jobs to pause"),
        (["cancel", "none"], 1, "there is no job 'none'"),
    ):
        capsys.readouterr()
        assert main(["admin", "jobs", *arguments, *where]) == code
        assert words in capsys.readouterr().err
