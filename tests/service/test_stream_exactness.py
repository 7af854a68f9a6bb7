"""M1 for streamed turns: with contexts that stay on the host while their turns run, beside resident ones, in
tiny tiers, with forks, rewinds, cancels and restarts, every token is the one of plain transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pensieve.engine.messages import CheckIntegrity
from tests.service.rig import Crowd, Reference, figures, query, started, write_model
from tests.text.families import LLAMA_3, QWEN_2_5, Family

FIRED = (
    "streamed",
    "returned_to_device",
    "chunks_swapped_out",
    "chunks_swapped_in",
    "chunks_dropped",
    "chunks_copied_on_write",
    "tokens_computed_again",
    "recomputed_tokens",
)


@pytest.mark.parametrize(
    ("family", "kind", "depth", "settings"),
    [
        (QWEN_2_5, "llama-gqa", 1, {"staging_tokens": "640"}),
        (LLAMA_3, "qwen3", 1, {"staging_tokens": "400", "policy": "lru"}),
        (
            QWEN_2_5,
            "llama-gqa",
            1,  # pages that the compiled kernels take, and conversations that share some
            {
                "chunk_tokens": "32",
                "device_cache": "640t",
                "host_cache": "1600t",
                "staging_tokens": "1600",
            },
        ),
        (LLAMA_3, "llama-gqa", 2, {"staging_tokens": "800", "host_cache": "640t"}),
        (QWEN_2_5, "qwen3", 1, {}),  # in place: nothing is staged
        (
            LLAMA_3,
            "llama-gqa",
            1,
            {"chunk_tokens": "32", "device_cache": "640t", "host_cache": "1600t"},
        ),
    ],
)
def test_every_reply_of_streamed_turns_is_what_plain_transformers_would_have_said(
    tmp_path: Path, family: Family, kind: str, depth: int, settings: dict[str, str]
) -> None:
    shape = {"device_cache": "400t", "host_cache": "800t", "stream": "on", **settings}
    folder = write_model(tmp_path / "model", family, kind)
    total: Counter[str] = Counter()
    crowd: Crowd | None = None
    for life in range(2):  # the process ends between turns; the history stays
        runtime = started(folder, tmp_path / "data", **shape)
        runtime.engine.executor.depth = depth  # type: ignore[misc]
        with runtime:
            crowd = crowd or Crowd(runtime, seed=7, size=30)
            crowd.runtime = runtime
            crowd.run(70)
            crowd.rush()
            now = figures(runtime)
            assert query(runtime, CheckIntegrity(2)).problems == (), f"life {life}"
            assert runtime.store.verify() == []
        total.update({name: int(now[name]) for name in FIRED})
    assert crowd is not None
    print(dict(total))
    assert not [name for name in FIRED if not total[name]], f"never happened: {dict(total)}"
    assert total["streamed"] > 20
    assert min(crowd.num_forks, crowd.num_rewinds, crowd.num_cancels) > 2

    reference = Reference(folder)
    with started(folder, tmp_path / "data", **shape) as runtime:
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"{sampled} sampled tokens of {len(crowd.names)} conversations: {wrong} wrong, {ties} ties"
    )
    assert sampled > 700
    assert wrong == 0
