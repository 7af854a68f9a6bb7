"""With `--check-kv`, a page of the host tier that has changed is recomputed, and never used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pensieve.conversations.live_turn import cache_key
from pensieve.engine.journal import replay
from pensieve.engine.messages import CheckIntegrity, EvictConversation
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory
from pensieve.sampling import Sampling
from tests.conversations.in_process import Runtime
from tests.conversations.rig import Reference, ask, figures, query, started, step, write_model
from tests.text.families import QWEN_2_5

LONG = Sampling(max_tokens=40, ignore_eos=True)


def memory_of(runtime: Runtime) -> KVMemory:
    memory = runtime._built.executor._forward._memory  # type: ignore[attr-defined]
    assert isinstance(memory, KVMemory)
    return memory


def swap_out(runtime: Runtime, conversation_id: str) -> int:
    """Move the whole conversation to the host. Return the number of host pages in use."""
    runtime.mailbox.put(EvictConversation(cache_key("", conversation_id), True, 1))
    while step(runtime):
        pass
    pages = figures(runtime)
    return int(pages["host_pages"] - pages["host_pages_free"])


@pytest.mark.parametrize("how_many", [1, 3])
def test_a_changed_page_of_the_host_tier_is_recomputed(
    tmp_path: Path, how_many: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model", QWEN_2_5)
    journal = tmp_path / "journal"
    with (
        caplog.at_level(logging.WARNING, "pensieve"),
        started(folder, tmp_path / "data", check_kv="true", journal=str(journal)) as runtime,
    ):
        runtime.conversations.create("c")
        ask(runtime, "c", "Oslo rain fine weather today", sampling=LONG)
        num_pages = swap_out(runtime, "c")
        assert num_pages > 5
        host = memory_of(runtime).host_arena
        used = [page for page in range(host.shape[1]) if bool(host[:, page].any())][:how_many]
        for page in used:
            host[1, page, 0, 0, 2, 3] += 1.0  # one number of a key, in one layer
        again = ask(runtime, "c", "and tomorrow", sampling=LONG)
        assert again.usage is not None
        assert again.usage.recomputed_tokens == 8 * how_many
        assert again.usage.host_tokens > 0, "the other pages are used as they are"
        assert figures(runtime)["chunks_damaged"] == how_many
        assert caplog.text.count("has changed since it was written") == how_many
        assert query(runtime, CheckIntegrity(2)).problems == ()
        swap_out(runtime, "c")
        last = ask(runtime, "c", "and then", sampling=LONG)
        assert last.usage is not None
        assert last.usage.recomputed_tokens == 0
        sampled, wrong, _ = Reference(folder).wrong_tokens(runtime, "c")
        assert (sampled, wrong) == (120, 0)
    with journal.open() as lines:
        assert replay(lines) > 100


def test_without_the_check_a_changed_page_gives_wrong_tokens(tmp_path: Path) -> None:
    """The same change alters replies if pages are not checked."""
    folder = write_model(tmp_path / "model", QWEN_2_5)
    with started(folder, tmp_path / "data") as runtime:
        runtime.conversations.create("c")
        ask(runtime, "c", "Oslo rain fine weather today", sampling=LONG)
        swap_out(runtime, "c")
        memory_of(runtime).host_arena.add_(1.0)
        ask(runtime, "c", "and tomorrow", sampling=LONG)
        assert Reference(folder).wrong_tokens(runtime, "c")[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_covers_only_the_copied_slots(dtype: torch.dtype) -> None:
    arena = torch.randn(3, 4, 2, 2, 8, 16).to(dtype)
    checksums = PageChecksums(arena)
    checksums.copied(page=1, num_slots=5)
    arena[:, 1, :, :, 5:] += 1
    assert checksums.is_intact(1)
    arena[2, 1, 1, 0, 4, 15] += 1
    assert not checksums.is_intact(1)
    assert not checksums.is_intact(2), "nothing was copied there"
