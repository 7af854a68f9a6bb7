"""Merge the metrics of several replicas into one text, in which each sample has the label `replica`.

    # HELP x …        once for each name, from the first replica that has it
    # TYPE x …
    x{replica="a",…} 1
    x{replica="b",…} 2

The output is Prometheus' text format 0.0.4. The input may be the same format or OpenMetrics. Parts that only
OpenMetrics has are dropped: EOF, UNIT, exemplars, timestamps in seconds. Values and labels are copied byte
for byte, so escapes stay intact. Only \\n ends a line, because a label may contain other characters that
Python treats as line ends.

A daemon started with `--replica` sets the label itself. If this label equals the replica's name in the list
of replicas, it is not repeated. A different label becomes `exported_replica`, as in Prometheus. If the
replica has only an address in the list, its samples keep the daemon's label.

A replica whose text cannot be parsed loses only its own samples: `read` raises, and the caller counts the
replica as down.
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
FAMILY_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created", "_info", "_gcount", "_gsum")
KINDS = {  # from a kind that only OpenMetrics has, to a kind of the format 0.0.4
    "unknown": "untyped",
    "gaugehistogram": "untyped",
    "info": "gauge",
    "stateset": "gauge",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class InvalidExposition(ValueError):
    """The text cannot be parsed. The message names the line."""


Labels = tuple[tuple[str, str], ...]  # name, and value with quotes and escapes


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Labels
    value: str  # followed by the timestamp, if there is one


@dataclass
class Family:
    """Samples that share a name, with their HELP and TYPE."""

    help: str | None = None
    kind: str | None = None
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


def read(text: str) -> Families:
    """Parse a text into its families, in order."""
    families: Families = {}
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    is_openmetrics = END in lines
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
            sample = _sample(line, keep_time=not is_openmetrics)
            if sample is None:
                raise InvalidExposition(f"line {number} is not a sample")
            families.setdefault(_family_of(sample.name, families), Family()).samples.append(sample)
    return _as_0_0_4(families) if is_openmetrics else families


def _sample(line: str, keep_time: bool) -> Sample | None:
    position, name = 0, ""
    if (found := NAMED.match(line)) is not None:
        name, position = found[1], found.end()
    labels: list[tuple[str, str]] = []
    if line[position : position + 1] == "{":
        position, is_more = position + 1, True
        while is_more and (found := PAIR.match(line, position)) is not None:
            label, value, quoted_name, comma = found.groups()
            if quoted_name is None:
                labels.append((_bare(label), value))
            elif name:
                return None  # the sample has two names
            else:
                name = _bare(quoted_name)
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
    """Remove the quotes of a name, if the name is valid without quotes."""
    inside = name[1:-1] if name.startswith('"') else name
    return inside if BARE.fullmatch(inside) else name


def _family_of(name: str, families: Families) -> str:
    """Return the name of a sample's family, such as x for x_bucket."""
    if name in families:
        return name
    for suffix in FAMILY_SUFFIXES:
        base = name.removesuffix(suffix)
        if base != name and base in families:
            return base
    return name


def _as_0_0_4(families: Families) -> Families:
    """Convert OpenMetrics families. In OpenMetrics, the name of a counter's family lacks `_total`."""
    found: Families = {}
    for name, family in families.items():
        family.kind = KINDS.get(family.kind or "", family.kind)
        total = f"{name}_total"
        is_total = family.kind == "counter" and any(each.name == total for each in family.samples)
        found[total if is_total else name] = family
    return found


def with_replica(labels: Labels, replica: Replica) -> Labels:
    """Return a sample's labels with the replica's name in front."""
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
    """Merge the families of all replicas into one text. None: the replica is down."""
    found = list(found)
    return "\n".join([*_up_lines(found), *_lines(found), ""])


def _up_lines(found: Sequence[tuple[Replica, Families | None]]) -> Iterator[str]:
    yield f"# HELP {UP} Whether the replica answered with its metrics."
    yield f"# TYPE {UP} gauge"
    for replica, families in found:
        yield _sample_line(Sample(UP, with_replica((), replica), str(int(families is not None))))


def _lines(found: Sequence[tuple[Replica, Families | None]]) -> Iterator[str]:
    names = dict.fromkeys(name for _, families in found for name in families or ())
    names.pop(UP, None)  # from a text that was already merged
    for name in names:
        with_name = [
            (replica, families[name])
            for replica, families in found
            if families is not None and name in families
        ]
        helps = [each.help for _, each in with_name if each.help is not None]
        kinds = [each.kind for _, each in with_name if each.kind is not None]
        yield from (f"# HELP {name} {text}".rstrip(" ") for text in helps[:1])
        yield from (f"# TYPE {name} {kind}" for kind in kinds[:1])
        for replica, family in with_name:
            for each in family.samples:
                yield _sample_line(
                    Sample(each.name, with_replica(each.labels, replica), each.value)
                )


def _sample_line(sample: Sample) -> str:
    labels = [f"{name}={value}" for name, value in sample.labels]
    if BARE.fullmatch(sample.name):
        return f"{sample.name}{{{','.join(labels)}}} {sample.value}"
    return f"{{{','.join([sample.name, *labels])}}} {sample.value}"
