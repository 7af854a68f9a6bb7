"""Ray's flag that tells a replica to end."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

worker = pytest.importorskip("ray._private.worker")

from pensieve.cluster.replica import FLAG, is_wanted_to_end  # noqa: E402


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the import of Ray Serve
def test_ray_sets_the_flag_before_it_waits_for_calls() -> None:
    from ray.serve._private.replica import Replica

    source = inspect.getsource(Replica._perform_graceful_shutdown)
    assert 0 < source.index(f"self.{FLAG} = True") < source.index("_drain_ongoing_requests")


@pytest.mark.parametrize(
    ("actor", "is_wanted"),
    [
        (SimpleNamespace(_replica_impl=SimpleNamespace(_shutting_down=True)), True),
        (SimpleNamespace(_replica_impl=SimpleNamespace(_shutting_down=False)), False),
        (SimpleNamespace(_replica_impl=SimpleNamespace()), False),
        (SimpleNamespace(), False),
    ],
)
def test_a_replica_is_to_end_only_if_rays_flag_is_true(
    monkeypatch: pytest.MonkeyPatch, actor: Any, is_wanted: bool
) -> None:
    monkeypatch.setitem(worker.global_worker.actors, "ada", actor)
    assert is_wanted_to_end() is is_wanted
