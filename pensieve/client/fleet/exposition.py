"""Metrics of several replicas as one text, in which each sample has the label `replica`.

    # HELP x …        once for each name, in the words of the first replica that has it
    # TYPE x …
    x{replica="a",…} 1
    x{replica="b",…} 2

Prometheus' text, version 0.0.4, is written.  That is read, and OpenMetrics, less what the other has not (EOF,
UNIT, exemplars, timestamps in seconds).  Of a line no more is understood than must be: which family it
belongs to, and where its labels begin.  Values and labels stay the bytes that they were, so no escape can be
lost in between.  A line ends at \\n and nowhere else: other letters that Python takes for ends may be in a
label.

A daemon that has `--replica` puts the label there itself.  Where it is the same, it stays; where this text
has another name for the replica, the daemon's own becomes `exported_replica`, as Prometheus does it; and
where the replica has no name here but its address, the daemon's own stays alone.

One replica whose text cannot be read costs its own samples, and nothing else: `read` raises, and the caller
lets it be down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pensieve.client.fleet.replicas import Replica

LABEL = "replica"
EXPORTED = "exported_replica"
UP = "pensieve_replica_up"
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_SPACE = r"[ \t]*"
BARE = re.compile(_NAME)
NAMED = re.compile(rf"{_SPACE}({_NAME}){_SPACE}")
PAIR = re.compile(
    rf"{_SPACE}(?:({_NAME}|{_TEXT}){_SPACE}={_SPACE}({_TEXT})|({_TEXT})){_SPACE}(,?){_SPACE}"
)
VALUE = re.compile(
    r"[ \t]*([+-]?[0-9a-zA-Z.][0-9a-zA-Z.+-]*)(?:[ \t]+(-?[0-9][0-9.e+]*))?[ \t]*(?:# \{.*)?"
)
COMMENT = re.compile(rf"# (HELP|TYPE) ({_NAME}|{_TEXT})(?:[ \t]+(.*))?")
END = "# EOF"
OF_A_FAMILY = ("_bucket", "_count", "_sum", "_total", "_created", "_info", "_gcount", "_gsum")
KINDS = {  # of OpenMetrics alone
    "unknown": "untyped",
    "gaugehistogram": "untyped",
    "info": "gauge",
    "stateset": "gauge",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class InvalidExposition(ValueError):
    """A text that is no exposition; the message names the line."""


Labels = tuple[tuple[str, str], ...]  # name, and value with its quotes and escapes


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Labels
    value: str  # and a timestamp behind it, where there is one


@dataclass
class Family:
    """Samples that share a name, and what is written above them."""

    help: str | None = None
    kind: str | None = None
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


def read(text: str) -> Families:
    """The families of a text, in its order."""
    families: Families = {}
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    is_open = END in lines
    for number, line in enumerate(lines, 1):
        if line == END:
            break
        if line.startswith("#"):
            if (found := COMMENT.fullmatch(line)) is not None:
                family = families.setdefault(_bare(found[2]), Family())
                if found[1] == "HELP" and family.help is None:
                    family.help = found[3] or ""
                elif found[1] == "TYPE" and family.kind is None:
                    family.kind = found[3] or "untyped"
        elif line.strip(" \t"):
            sample = _sample(line, keep_time=not is_open)
            if sample is None:
                raise InvalidExposition(f"line {number} is no sample")
            families.setdefault(_family_of(sample.name, families), Family()).samples.append(sample)
    return _as_0_0_4(families) if is_open else families


def _sample(line: str, keep_time: bool) -> Sample | None:
    position, name = 0, ""
    if (found := NAMED.match(line)) is not None:
        name, position = found[1], found.end()
    labels: list[tuple[str, str]] = []
    if line[position : position + 1] == "{":
        position, is_more = position + 1, True
        while is_more and (found := PAIR.match(line, position)) is not None:
            label, value, alone, comma = found.groups()
            if alone is None:
                labels.append((_bare(label), value))
            elif name:
                return None  # two names
            else:
                name = _bare(alone)
            position, is_more = found.end(), bool(comma)
        if line[position : position + 1] != "}":
            return None
        position += 1
    number = VALUE.fullmatch(line, position)
    if not name or number is None:
        return None
    time = f" {number[2]}" if number[2] and keep_time else ""
    return Sample(name, tuple(labels), number[1] + time)


def _bare(name: str) -> str:
    """Of a name in quotes, what is in them if that is a name without quotes as well; else as it is."""
    inside = name[1:-1] if name.startswith('"') else name
    return inside if BARE.fullmatch(inside) else name


def _family_of(name: str, families: Families) -> str:
    """A sample belongs to the family that was announced: x_bucket to x."""
    if name in families:
        return name
    for suffix in OF_A_FAMILY:
        base = name.removesuffix(suffix)
        if base != name and base in families:
            return base
    return name


def _as_0_0_4(families: Families) -> Families:
    """OpenMetrics announces a counter without the _total that its samples have."""
    found: Families = {}
    for name, family in families.items():
        family.kind = KINDS.get(family.kind or "", family.kind)
        total = f"{name}_total"
        is_total = family.kind == "counter" and any(each.name == total for each in family.samples)
        found[total if is_total else name] = family
    return found


def with_replica(labels: Labels, replica: Replica) -> Labels:
    """The labels of a sample, and whose it is in front of them."""
    ours = f'"{replica.name.translate(_ESCAPES)}"'
    kept = []
    for name, value in labels:
        if name != LABEL:
            kept.append((name, value))
        elif not replica.is_named:
            ours = value
        elif value != ours:
            kept.append((EXPORTED, value))
    return ((LABEL, ours), *kept)


def merged(found: Iterable[tuple[Replica, Families | None]]) -> str:
    """One text of all; None for a replica that is down."""
    found = list(found)
    return "\n".join([*_up(found), *_lines(found), ""])


def _up(found: Sequence[tuple[Replica, Families | None]]) -> Iterator[str]:
    yield f"# HELP {UP} Whether the replica answered with its metrics."
    yield f"# TYPE {UP} gauge"
    for replica, families in found:
        yield _written(Sample(UP, with_replica((), replica), str(int(families is not None))))


def _lines(found: Sequence[tuple[Replica, Families | None]]) -> Iterator[str]:
    names = dict.fromkeys(name for _, families in found for name in families or ())
    names.pop(UP, None)  # of a text that was merged before
    for name in names:
        of_name = [
            (replica, families[name])
            for replica, families in found
            if families is not None and name in families
        ]
        helps = [each.help for _, each in of_name if each.help is not None]
        kinds = [each.kind for _, each in of_name if each.kind is not None]
        yield from (f"# HELP {name} {text}".rstrip(" ") for text in helps[:1])
        yield from (f"# TYPE {name} {kind}" for kind in kinds[:1])
        for replica, family in of_name:
            for each in family.samples:
                yield _written(Sample(each.name, with_replica(each.labels, replica), each.value))


def _written(sample: Sample) -> str:
    labels = [f"{name}={value}" for name, value in sample.labels]
    if BARE.fullmatch(sample.name):
        return f"{sample.name}{{{','.join(labels)}}} {sample.value}"
    return f"{{{','.join([sample.name, *labels])}}} {sample.value}"
