"""Settings for all tests. They must be in effect before anything imports torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.assertion import rewrite

import pensieve
from pensieve.launch.cpu_threads import prepare_threads
from tests import fork_server

MANY = 1000
prepare_threads()
fork_server.install()
hypothesis.settings.register_profile("pensieve", deadline=None)  # no test depends on speed
hypothesis.settings.load_profile("pensieve")
# A background process may ignore SIGINT, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
pytest_plugins = ["tests.selection"]


def pytest_configure(config: pytest.Config) -> None:
    """Rewrite the asserts of some of the test files, so that xdist's processes divide the work.

    For all files together this takes 23 seconds of CPU time. The results are cached.
    """
    if not (worker := getattr(config, "workerinput", None)) or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    for path in files[number :: worker["workercount"]]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(kept.parent):
            found, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, found, kept)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Exit unless `pensieve` is imported from this tree, both here and in programs that tests start."""
    here = Path(__file__).resolve().parents[1] / "pensieve"
    found = [Path(pensieve.__file__).parent]
    if not hasattr(session.config, "workerinput"):  # once for all xdist workers
        command = [sys.executable, "-c", "import pensieve; print(pensieve.__file__)"]
        ran = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        found.append(Path(ran.stdout.strip() or "nowhere").parent)
    for each in found:
        if each.resolve() != here:
            pytest.exit(f"these tests are for {here}, but `import pensieve` finds {each}", 4)


@pytest.fixture(autouse=True)
def _ctrl_c_as_before() -> Iterator[None]:
    """Restore the SIGINT handler after commands that set it in the tests' own process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _executed(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("executed") is None:
        yield
        return
    with fork_server.executed():
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server early if there are many tests, since some of them need it."""
    if len(session.items) > MANY and not session.config.option.collectonly:
        fork_server.preload(os.environ)


def pytest_unconfigure() -> None:
    fork_server.end()
