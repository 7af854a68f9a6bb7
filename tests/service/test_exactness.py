"""M1: whatever is swapped, dropped, recomputed, suspended, forked, cut, cancelled or restarted, every
token is the one that plain transformers would have said (fp32, greedy, on the same token ids)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pensieve.engine.messages import CheckIntegrity
from tests.service.rig import Crowd, Reference, figures, query, started, write_model
from tests.text.families import LLAMA_3, QWEN_2_5, Family

FIRED = (
    "chunks_swapped_out",
    "chunks_found_before_reclaim",
    "chunks_reclaimed",
    "chunks_swapped_in",
    "chunks_dropped",
    "chunks_copied_on_write",
    "suspensions",
    "resumptions",
    "preemptions",
    "tokens_computed_again",
    "recomputed_tokens",
)


@pytest.mark.parametrize(
    ("family", "kind", "policy", "chunk_tokens", "depth"),
    [
        (QWEN_2_5, "llama-gqa", "value", 8, 1),
        (LLAMA_3, "qwen3", "lru", 8, 1),
        (QWEN_2_5, "llama-gqa", "value", 32, 1),  # pages that the compiled kernels take
        (LLAMA_3, "llama-gqa", "value", 8, 2),  # the next iteration launched before it is known
    ],
)
def test_every_reply_is_what_plain_transformers_would_have_said(
    tmp_path: Path, family: Family, kind: str, policy: str, chunk_tokens: int, depth: int
) -> None:
    shape = {"policy": policy, "chunk_tokens": str(chunk_tokens)}
    if chunk_tokens == 32:
        shape |= {"device_cache": "800t", "host_cache": "800t"}
    folder = write_model(tmp_path / "model", family, kind)
    total: Counter[str] = Counter()
    crowd: Crowd | None = None
    ranges = idle = 0.0
    for life in range(3):  # the process ends between turns; the history stays
        runtime = started(folder, tmp_path / "data", **shape)
        executor: Any = runtime.engine.executor
        executor.depth = depth
        with runtime:
            if crowd is None:
                crowd = Crowd(runtime, seed=4, size=44)
            crowd.runtime = runtime
            crowd.run(170)
            crowd.rush()
            now = figures(runtime)
            assert query(runtime, CheckIntegrity(2)).problems == (), f"life {life}"
            assert runtime.store.verify() == []
        total.update({name: int(value) for name, value in now.items() if name in FIRED})
        ranges = max(ranges, now["ranges_repaired_at_once_max"])
        idle += now["tokens_idle"]
    assert (idle > 0) == (depth == 2), "computed for a turn that had ended"
    assert crowd is not None
    assert not [name for name in FIRED if not total[name]], f"never happened: {dict(total)}"
    assert ranges >= 2, "no turn repaired two disconnected ranges at once"
    assert min(crowd.num_forks, crowd.num_rewinds, crowd.num_cancels) > 5
    assert crowd.num_shared > 2, "prefixes were not shared"  # it depends on how quickly turns end

    reference = Reference(folder)
    with started(folder, tmp_path / "data", **shape) as runtime:
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"{sampled} sampled tokens of {len(crowd.names)} conversations: {wrong} wrong, {ties} ties"
    )
    assert sampled > 1500
    assert wrong == 0
