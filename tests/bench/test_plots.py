"""Plots are readable: titles, ticks, names and scales, whatever is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from pensieve.bench import attention as bench_attention
from pensieve.bench import chat as bench_chat
from pensieve.bench import plots, simulate_sheet
from pensieve.bench import step as bench_step
from pensieve.bench.plot_scale import plain, scale_of, spread
from pensieve.bench.plots import Sheet
from pensieve.bench.report import machine

FACTS = ["opt-13b on 1 x h200", "sharegpt conversations", "seeds 0, 1, 2"]


def texts_of(sheet: Sheet) -> list[tuple[str, Any]]:
    """Return every drawn text with its box in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    sheet.lay_out()
    canvas = FigureCanvasAgg(sheet.figure)
    canvas.draw()
    hidden = set()  # labels of ticks outside their axis, which are not drawn
    for panel in sheet.panels:
        for axis in (panel.axes.xaxis, panel.axes.yaxis):
            shown = {id(tick) for tick in axis._update_ticks()}
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {id(tick.label1) for tick in ticks if id(tick) not in shown}
    return [
        (text.get_text(), Text.get_window_extent(text, canvas.get_renderer()))
        for text in sheet.figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in hidden
    ]


def assert_readable(sheet: Sheet) -> None:
    """Check that no texts overlap, none leaves the sheet, and no number is written as a power of ten."""
    drawn = texts_of(sheet)
    assert_apart(sheet, drawn)


def assert_apart(sheet: Sheet, drawn: list[tuple[str, Any]]) -> None:
    assert drawn
    width, height = sheet.figure.bbox.width, sheet.figure.bbox.height
    for text, box in drawn:
        assert "10^" not in text, text
        assert "×10" not in text, text
        assert "e+" not in text, text
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    for (one, box), (other, beside) in combinations(drawn, 2):
        overlap = box.x0 < beside.x1 and beside.x0 < box.x1
        overlap = overlap and box.y0 < beside.y1 - 1 and beside.y0 < box.y1 - 1
        assert not overlap, f"{one!r} lies on {other!r}"


# -- numbers, positions, scales --


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (6.55, "6.55"),
        (0.05, "0.05"),
        (20, "20"),
        (999.7, "1k"),
        (1500, "1.5k"),
        (2048, "2,048"),
        (16384, "16,384"),
        (1e6, "1M"),
        (0.000123456, "0.000123"),
    ],
)
def test_numbers_are_formatted_for_people(value: float, text: str) -> None:
    assert plain(value) == text


def test_line_labels_are_spread_apart_in_order_within_the_axis() -> None:
    draw = random.Random(0)
    for _ in range(200):
        wanted = [draw.choice([0.0, 1.0, draw.random() * 2]) for _ in range(draw.randint(1, 7))]
        places = spread(wanted, 0.2, 2.0)
        assert all(-1e-9 <= place <= 2 + 1e-9 for place in places)
        ordered = sorted(places)
        assert all(b - a >= 0.2 - 1e-9 for a, b in pairwise(ordered))
        for i, j in combinations(range(len(wanted)), 2):
            if wanted[i] < wanted[j]:
                assert places[i] < places[j]
    assert spread([0.5, 1.5], 0.2, 2.0) == [0.5, 1.5], "labels that do not overlap stay"


def test_axes_begin_at_zero_unless_the_range_is_wide() -> None:
    scale = scale_of([100.0, 103.0])
    assert (scale.least, scale.logarithmic) == (0.0, False)
    assert scale.share(103.0) - scale.share(100.0) < 0.03
    wide = scale_of([5.0, 2000.0])
    assert wide.logarithmic
    assert wide.ticks is not None
    assert wide.ticks == [5, 10, 20, 50, 100, 200, 500, 1000, 2000][: len(wide.ticks)] or all(
        math.log10(tick).is_integer() for tick in wide.ticks
    )
    assert not scale_of([0.01, 80.0], most=100.0).logarithmic, "a percentage axis is linear"


# -- every plot of the project --


def a_row(policy: str, seed: int, rate: float, host: int, **changes: Any) -> dict[str, Any]:
    bins = [float(each) for each in range(0, 100, 10)]
    return {
        "policy": policy,
        "seed": seed,
        "rate": rate,
        "device_size": 20_000,
        "host_size": host,
        "stateless": False,
        "phases": "unified",
        "hit_rate": 1 - 0.1 * rate - 0.01 * seed,
        "saved": 0.01 * seed,
        "tokens_per_second": 700 * rate,
        "normalized_p90": 11.0 * (1 + rate**4),
        "series": {
            "seconds": bins,
            "device": [each / 130 for each in bins],
            "clean": [0.1 for _ in bins],
            "host": [None, *(each / 100 for each in bins[1:])],
            "running": [3.0 for _ in bins],
            "queued": [0.0 for _ in bins],
        },
        **changes,
    }


def study(policies: Sequence[str], rates: Sequence[float], hosts: Sequence[int]) -> Sheet:
    rows = [
        a_row(policy, seed, rate, host)
        for policy in policies
        for rate in rates
        for host in hosts
        for seed in range(3)
    ]
    return simulate_sheet.sheet(rows, FACTS)


ALL = ("lru", "value", "return", "clairvoyant")


@pytest.mark.parametrize(
    ("policies", "rates", "hosts"),
    [
        (("lru", "value", "return"), (0.5, 1.0, 2.0), (0, 60_000)),
        (ALL, (1.0,), (0, 20_000, 60_000, 1_000_000)),
        (ALL, (1.0,), (0,)),
        (("value",), (1.0,), (0,)),
    ],
)
def test_a_simulation_study_is_one_readable_sheet(
    policies: Sequence[str], rates: Sequence[float], hosts: Sequence[int]
) -> None:
    pytest.importorskip("matplotlib")
    sheet = study(policies, rates, hosts)
    drawn = texts_of(sheet)
    assert_apart(sheet, drawn)
    written = " ".join(text for text, _ in drawn)
    for fact in (*FACTS, *policies):
        assert all(word in written for word in fact.split())
    for panel in sheet.panels:
        assert panel.axes.get_legend() is None, "names belong at the ends of their lines"
        if panel.axes.get_yscale() == "linear" and not panel.bar_values:
            assert panel.axes.get_ylim()[0] == 0


def test_coinciding_lines_differ_in_width_dashes_and_marker() -> None:
    pytest.importorskip("matplotlib")
    sheet = Sheet("title", FACTS)
    panel = sheet.panel("one", "x", "y")
    for name in ALL:
        panel.line(name, [1, 2, 3], [5.0, 5.0, 5.0])
    assert_readable(sheet)
    lines = panel.axes.lines
    assert len({line.get_marker() for line in lines}) == len(ALL)
    assert len({line.get_linewidth() for line in lines}) == len(ALL)
    assert len({str(line._dash_pattern) for line in lines}) == len(ALL)


def test_more_than_six_lines_have_a_legend_beside_the_axes() -> None:
    pytest.importorskip("matplotlib")
    sheet = Sheet("title", FACTS)
    panel = sheet.panel("one", "x", "y")
    for number in range(9):
        panel.line(f"line {number}", [1, 2, 3], [number, 2 * number, 3 * number])
    texts_of(sheet)
    legend = panel.axes.get_legend().get_window_extent()
    assert legend.x0 >= panel.axes.get_window_extent().x1
    assert legend.x1 <= sheet.figure.bbox.width


def test_repeats_are_drawn_as_a_band_from_least_to_most() -> None:
    pytest.importorskip("matplotlib")
    sheet = study(("lru", "return"), (0.5, 1.0), (0,))
    again = next(panel for panel in sheet.panels if "Recomputed history" in panel.title)
    band = again.axes.collections[0].get_paths()[0].get_extents()
    assert band.y0 == pytest.approx(100 * 0.05)
    assert band.y1 == pytest.approx(100 * 0.12)
    assert any("minimum to maximum" in fact for fact in sheet.facts)


def drawn_by(act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Sheet:
    """Return the sheet that `act` saves."""
    saved: list[Sheet] = []
    monkeypatch.setattr(plots.Sheet, "save", lambda sheet, path: saved.append(sheet))
    act()
    (sheet,) = saved
    return sheet


def test_every_bench_draws_one_sheet_that_names_model_and_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    facts = ["random weights 0.37B bfloat16", machine(), "seed 1"]
    turns = [bench_chat.MeasuredTurn(i % 3, 0.1 * i, 1.0, [0.001, 0.2 * i], 3) for i in range(1, 9)]
    steps = [
        bench_step.StepRow(kind, batch, 64, 0, 0.02, 0.03, 0.01, ratio, 50.0)
        for kind, ratio in (("decode", 1.3), ("mixed", 1.32))
        for batch in (1, 4, 16, 64)
    ]
    attended = [
        bench_attention.AttentionRow(
            8, 8, context, 16, kv, size, dtype, 1, 1, 1, 1, 0.5 + kv / 99, 0.5, 1
        )
        for context in (128, 512, 4096)
        for kv in (16, 4)
        for size in (64, 128)
        for dtype in ("bfloat16", "float32")
    ]
    path = tmp_path / "drawn.png"
    for act in (
        lambda: bench_chat.plot(turns, path, facts),
        lambda: bench_step.plot(steps, path, facts),
        lambda: bench_attention.plot(attended, path, facts),
    ):
        with monkeypatch.context() as patched:
            sheet = drawn_by(act, patched)
        assert sheet.title
        assert_readable(sheet)
        assert "random weights 0.37B" in " ".join(sheet.facts)
        assert machine() in sheet.facts
    bench_chat.plot(turns[:1], path, facts)
    assert path.stat().st_size > 1000


def test_a_plot_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pensieve.errors import ConfigError

    for name in ("drawn.nothing", "taken/drawn.png"):
        (tmp_path / "taken").write_text("a file")
        sheet = Sheet("title", FACTS)
        sheet.panel("one", "x", "y").line("a", [1, 2], [1, 2])
        with pytest.raises(ConfigError, match="cannot draw"):
            sheet.save(tmp_path / name)
