"""A simulated batch: the drawn requests, the saved tokens and the time, compared with known numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.bench import random_model
from pensieve.bench.random_model import RandomShape
from pensieve.config import resolve
from pensieve.core.cache import CacheConfig
from pensieve.core.prefix_groups import prefix_groups, saving, saving_of_tree
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.batch_run import PrefixSharing
from pensieve.errors import PensieveError
from pensieve.sim.cost import instant
from scripts.measurements import batch as measured_batch
from scripts.measurements.batch_simulation import (
    SHAPES,
    SHARINGS,
    BatchFigures,
    BatchSetting,
    BatchShape,
    BatchSimulator,
    drawn_batch,
    shape_named,
)
from tests.sim.world import SLOW

FEW = BatchShape(24, 128, 32, 4, output_tokens=8, output_tokens_max=20, varies=False)
PASS = SLOW.dense_seconds_min  # reading the weights takes 10 ms per iteration; a token takes 1 ms


def simulated(
    shape: BatchShape, sharing: PrefixSharing, device_tokens: int = 9600, turns_max: int = 64
) -> BatchFigures:
    setting = BatchSetting(
        SLOW,
        instant(32)[1],
        CacheConfig(device_tokens // 32, 0),
        SchedulerConfig(256, turns_max, cost=SLOW.computing),
    )
    simulator = BatchSimulator(setting, drawn_batch(shape, 0), shape.output_tokens_max, sharing)
    figures = simulator.finish()
    simulator.engine.scheduler.check(simulator.clock.now())
    assert not simulator.engine.scheduler.cache.conversations
    assert figures.requests == shape.requests
    return figures


def test_a_drawn_batch_consists_of_groups_that_share_a_prefix() -> None:
    batch = drawn_batch(FEW, 1)
    assert [len(each.prompt) for each in batch] == [160] * 24
    prefixes = [each.prompt[:128].tobytes() for each in batch]
    assert sorted(map(prefixes.count, set(prefixes))) == [4] * 6
    assert prefixes != sorted(prefixes, key=prefixes.index)  # requests of a prefix are scattered
    near = drawn_batch(replace(FEW, apart=0.0), 1)
    found = [each.prompt[:128].tobytes() for each in near]
    assert [found.index(each) for each in found] == [n - n % 4 for n in range(24)]


def test_a_batch_of_snippets_has_the_published_shape() -> None:
    """Prompts have 1,100 + 400 tokens. A tree could save 56 % of them; one prefix per request, 55 %."""
    batch = drawn_batch(SHAPES["snippets"], 1)
    assert len(batch) == 3000
    assert sum(len(each.prompt) for each in batch) / 3000 == pytest.approx(1500, rel=0.03)
    prompts = [each.prompt for each in batch]
    assert saving(prefix_groups(prompts), prompts) == pytest.approx(0.55, abs=0.01)
    assert saving_of_tree(prompts) == pytest.approx(0.56, abs=0.01)
    assert 99 < sum(each.output_tokens for each in batch) / 3000 < 101


def test_the_mean_number_of_requests_per_prefix_is_the_share_degree() -> None:
    batch = drawn_batch(replace(SHAPES["ranking"], requests=4000, own_tokens=4, prefix_tokens=8), 0)
    prefixes = [each.prompt[:4].tobytes() for each in batch]
    sizes = {each: prefixes.count(each) for each in set(prefixes)}
    assert sum(sizes[each] for each in prefixes) / 4000 == pytest.approx(11.36, rel=0.1)


def test_groups_compute_each_prefix_once() -> None:
    for sharing in SHARINGS:
        figures = simulated(FEW, sharing)
        assert figures.prompt_tokens == 24 * 160
        assert figures.output_tokens == 24 * 8
        assert figures.suspensions == 0
    assert simulated(FEW, "groups").computed_tokens == 6 * 128 + 24 * 32
    assert simulated(FEW, "off").computed_tokens == 24 * 160


def test_saved_tokens_save_time() -> None:
    """If all tokens take equally long, only the computed tokens and reading the weights take time."""
    groups, off = simulated(FEW, "groups"), simulated(FEW, "off")
    for figures in (groups, off):
        tokens = figures.computed_tokens + figures.output_tokens - figures.requests
        assert figures.iteration_tokens == tokens
        least = tokens * SLOW.dense_seconds_per_token
        assert least <= figures.seconds <= least + figures.iterations * PASS
    assert off.seconds > 1.5 * groups.seconds


def test_with_a_small_cache_lru_saves_less_than_groups() -> None:
    shape = replace(FEW, requests=60)
    groups, lru = (simulated(shape, sharing, 1600, 8) for sharing in SHARINGS[:2])
    assert groups.computed_tokens == 15 * 128 + 60 * 32
    assert groups.computed_tokens < lru.computed_tokens < 60 * 160
    assert groups.seconds < lru.seconds


def test_reading_a_shared_page_once_takes_less_time() -> None:
    """Each of 4 requests has 128 shared and 32 own tokens. Only reading keys takes time."""
    cost = replace(instant(32)[0], attention_seconds_per_key=1.0)
    cache, scheduler = CacheConfig(300, 0), SchedulerConfig(256, 64, cost=cost.computing)
    shape = replace(FEW, requests=4, output_tokens=2)
    batch, seconds = drawn_batch(shape, 0), []
    for reads_once in (False, True):
        setting = BatchSetting(cost, instant(32)[1], cache, scheduler, reads_once=reads_once)
        seconds.append(BatchSimulator(setting, batch, 20, "groups").finish().seconds)
    # The opener's prompt; its decode beside three prompts; the three decodes.
    assert seconds == [160 + (161 + 3 * 160) + 3 * 161, 160 + (192 + 3 * 32) + (128 + 3 * 64)]


def test_shapes_have_a_name_or_are_given_as_numbers() -> None:
    assert shape_named("snippets") is SHAPES["snippets"]
    assert shape_named("2000/200x16") == BatchShape(1000, 2000, 200, 16, varies=False)
    assert shape_named("2000/200x16").apart == math.inf
    for wrong in ("", "2000", "2000/200", "0/200x4", "200/0x4", "200/20x0", "a/bxc"):
        with pytest.raises(ValueError, match=r"."):
            shape_named(wrong)


# -- with an engine --


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-model")
    random_model.make(folder, RandomShape(2, 64, 2, 1, 128, 8000), context=1024)
    return folder


def measured(model: Path, folder: Path) -> list[measured_batch.Row]:
    flags = {"device_cache": "2000t", "host_cache": "0t", "policy": "lru", "data": str(folder)}
    shape = BatchShape(10, 160, 40, 7.0, apart=1.3)
    return measured_batch.compared(model, shape, 4, resolve(flags, {}).settings)


def test_all_three_sharing_modes_are_measured(model: Path, tmp_path: Path) -> None:
    groups, lru, off = measured(model, tmp_path)
    assert [each.sharing for each in (groups, lru, off)] == list(SHARINGS)
    assert groups.saving >= lru.saving >= off.saving == 0.0
    assert groups.saving > 0.0


def test_a_measurement_with_differing_replies_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measured_batch._run_once

    def wrong(*arguments: Any) -> Any:
        row, replies = right(*arguments)
        return row, replies if arguments[-1] == "groups" else [(1,)] * len(replies)

    monkeypatch.setattr(measured_batch, "_run_once", wrong)
    with pytest.raises(PensieveError, match="the replies with lru differ"):
        measured(model, tmp_path)
