"""Write figures as a Markdown table for people, and as JSON with the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.paper_figures.study import ASSUMED, Line, Study

HEADINGS = ("figure", "what", "paper", "ours", "aim")


def markdown(lines: Sequence[Line], study: Study, quick: bool) -> Iterator[str]:
    if quick:
        yield "**Quick: too short to mean anything.**"
        yield ""
    yield "Simulated; the papers measured on GPUs. Assumed:"
    yield ""
    for assumption in ASSUMED:
        yield f"* {assumption}"
    yield f"* {study.extent.seeds} seed{'s' * (study.extent.seeds > 1)}"
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|" + "---|" * len(HEADINGS)
    for line in lines:
        ours = f"{line.shown}; {line.note}" if line.note else line.shown
        yield f"| {line.figure} | {line.what} | {line.paper or '-'} | {ours} | {line.aim or '-'} |"
    if study.notes:
        yield ""
        yield "Notes on the same runs:"
        yield ""
    for figure, text in study.notes:
        yield f"* {figure}: {text}"


def values(lines: Sequence[Line], study: Study, quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "seeds": study.extent.seeds,
        "assumed": list(ASSUMED),
        "rows": [
            {
                "figure": line.figure,
                "what": line.what,
                "paper": line.paper or None,
                "ours": line.ours.median,
                "by_seed": list(line.ours.values),
                "shown": line.shown,
                "aim": line.aim or None,
                "note": line.note or None,
            }
            for line in lines
        ],
        "notes": [{"figure": figure, "text": text} for figure, text in study.notes],
        "curves": [
            {"name": each.name, "x": each.x, "y": each.y, "lines": each.lines}
            for each in study.panels
        ],
    }
