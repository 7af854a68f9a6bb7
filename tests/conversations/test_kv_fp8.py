"""KV in fp8 under memory pressure: replies are the same as with room for all conversations."""

from __future__ import annotations

from pathlib import Path

from pensieve.sampling import Sampling
from tests.conversations.in_process import Runtime
from tests.conversations.rig import figures, finish, started, write_model
from tests.text.families import QWEN_2_5

TALKS, TURNS = 10, 3


def replies(runtime: Runtime, at_once: int) -> list[list[int]]:
    """Return the token logs of several conversations; `at_once` conversations run at once."""
    names = [f"c{index}" for index in range(TALKS)]
    for name in names:
        runtime.conversations.create(name)
    for turn in range(TURNS):
        for first in range(0, TALKS, at_once):
            begun = [
                runtime.conversations.send(
                    name,
                    f"{'rain in Oslo ' * (turn + 1)}{name}",
                    sampling=Sampling(max_tokens=20, ignore_eos=True),
                )
                for name in names[first : first + at_once]
            ]
            finish(runtime, begun)
    return [list(runtime.store.log(name)) for name in names]


def test_fp8_replies_under_pressure_equal_replies_without_pressure(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", QWEN_2_5)
    shape = {"chunk_tokens": "32", "kv_dtype": "fp8"}
    with started(folder, tmp_path / "room", device_cache="4000t", **shape) as runtime:
        expected = replies(runtime, 1)
        assert not figures(runtime)["chunks_reclaimed"]
    tiny = {"device_cache": "640t", "host_cache": "320t"}
    with started(folder, tmp_path / "pressure", **tiny, **shape) as runtime:
        found = replies(runtime, TALKS)
        now = figures(runtime)
    for name in ("chunks_swapped_out", "chunks_swapped_in", "chunks_dropped", "recomputed_tokens"):
        assert now[name] > 0, f"{name} never happened"
    assert found == expected
