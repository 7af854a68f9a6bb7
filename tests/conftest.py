"""What holds for every test, before anything imports torch."""

import signal
from collections.abc import Iterator

import hypothesis
import pytest

from pensieve.launch.cpu_threads import prepare_threads
from tests import fork_server

prepare_threads()
fork_server.install()
hypothesis.settings.register_profile("pensieve", deadline=None)  # no test is about seconds
hypothesis.settings.load_profile("pensieve")
# Whoever starts the tests in the background may have told them to ignore it, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _ctrl_c_as_before() -> Iterator[None]:
    """Commands that run in the tests' own process say what Ctrl-C does; not for the tests behind them."""
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


def pytest_unconfigure() -> None:
    fork_server.end()
