"""Merging the metrics of several replicas into one text, also with hostile labels."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from pensieve.client.fleet.exposition import InvalidExposition, merged, read
from pensieve.client.fleet.replicas import Replica, replicas_of
from pensieve.errors import InvalidArgument

A, B, UNNAMED = Replica("a", "h:1"), Replica("b", "h:2"), Replica("h:3", "h:3")
HOSTILE = [
    "plain",
    'a "quoted" word',
    "a \\ backslash",
    "ends with a backslash\\",
    "two\nlines",
    'looks like the end"} 1',
    '",replica="z',
    "} 5 # {",
    "\u2028 \u0085 \x0b \x0c \x1c lines to Python",
    "\r",
    "a,b=c{d}",
    "# HELP x y",
    "",
    "ünïcode 語",
]


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@pytest.mark.parametrize("value", HOSTILE)
def test_labels_with_special_characters_are_unchanged(value: str) -> None:
    text = f'# TYPE x gauge\nx{{t="{escaped(value)}",u="1"}} 2.5 1395066363000\n'
    (family,) = [
        each
        for each in text_string_to_metric_families(merged([(A, read(text))]))
        if each.name == "x"
    ]
    (sample,) = family.samples
    assert sample.labels == {"replica": "a", "t": value, "u": "1"}
    assert sample.value == 2.5
    assert sample.timestamp is not None


@pytest.mark.parametrize("value", [each for each in HOSTILE if each])
def test_a_replica_may_have_any_name(value: str) -> None:
    text = merged([(Replica(value, "h:1"), read("x 1\n"))])
    samples = {
        each.name: each.labels
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert samples == {"pensieve_replica_up": {"replica": value}, "x": {"replica": value}}


def test_merged_metrics_have_one_help_and_type_line_before_all_samples() -> None:
    first = "# HELP x Of a.\n# TYPE x counter\nx 1\n# TYPE y gauge\ny 2\n"
    second = '# HELP y Why.\n# TYPE y gauge\ny{z="1"} 3\n# HELP x Of b.\n# TYPE x counter\nx{} 4\n'
    assert merged([(A, read(first)), (B, read(second))]) == (
        "# HELP pensieve_replica_up Whether the replica answered with its metrics.\n"
        "# TYPE pensieve_replica_up gauge\n"
        'pensieve_replica_up{replica="a"} 1\n'
        'pensieve_replica_up{replica="b"} 1\n'
        "# HELP x Of a.\n"
        "# TYPE x counter\n"
        'x{replica="a"} 1\n'
        'x{replica="b"} 4\n'
        "# HELP y Why.\n"
        "# TYPE y gauge\n"
        'y{replica="a"} 2\n'
        'y{replica="b",z="1"} 3\n'
    )


def test_an_unreachable_replica_has_only_the_sample_up_0() -> None:
    assert merged([(A, None)]).split("\n")[2:] == ['pensieve_replica_up{replica="a"} 0', ""]


def test_buckets_count_and_sum_stay_with_their_histogram() -> None:
    text = (
        "# TYPE h histogram\n"
        'h_bucket{le="1.0"} 1\nh_bucket{le="+Inf"} 2\nh_count 2\nh_sum 3.5\n'
        "# TYPE h_total counter\nh_total 9\n"
    )
    found = merged([(A, read(text)), (B, read(text))])
    (histogram,) = (
        each for each in text_string_to_metric_families(found) if each.type == "histogram"
    )
    assert [each.name for each in histogram.samples].count("h_bucket") == 4
    lines = [line for line in found.split("\n") if line.startswith("h_total")]
    assert lines == ['h_total{replica="a"} 9', 'h_total{replica="b"} 9']


def test_a_different_replica_label_of_a_daemon_becomes_exported_replica() -> None:
    text = 'x{replica="a",y="1"} 1\n'
    assert 'x{replica="a",y="1"} 1\n' in merged([(A, read(text))])
    assert 'x{replica="b",exported_replica="a",y="1"} 1\n' in merged([(B, read(text))])
    assert 'x{replica="a",y="1"} 1\n' in merged([(UNNAMED, read(text))])
    assert 'x{replica="h:3"} 1\n' in merged([(UNNAMED, read("x 1\n"))])


def test_openmetrics_is_converted_and_its_additional_features_are_omitted() -> None:
    text = (
        "# TYPE x_tokens counter\n# UNIT x_tokens tokens\n# HELP x_tokens Tokens.\n"
        'x_tokens_total{a="#"} 17.0 1520879607.789 # {trace_id="KOO5S4vxi0o"} 0.67 1520879607.7\n'
        "x_tokens_created 1520430000.123\n"
        "# TYPE s stateset\n# HELP s A state.\n"
        's{s="on"} 1.0\n'
        "# TYPE u unknown\n# HELP u Who knows.\nu 1e-3\n# EOF\n"
    )
    assert list(openmetrics.text_string_to_metric_families(text))  # valid OpenMetrics
    found = merged([(A, read(text))])
    assert 'x_tokens_total{replica="a",a="#"} 17.0\n' in found
    assert "# TYPE x_tokens_total counter\n" in found
    assert "# TYPE s gauge\n" in found
    assert "# TYPE u untyped\n" in found
    for absent in ("EOF", "UNIT", "trace_id", "1520879607"):
        assert absent not in found
    samples = [
        each.name for family in text_string_to_metric_families(found) for each in family.samples
    ]
    assert samples == ["pensieve_replica_up", "x_tokens_total", "x_tokens_created", "s", "u"]


def test_quoted_metric_and_label_names_are_read() -> None:
    found = merged([(A, read('{"http.requests","a.b"="c"} 1\n{"x",y="z"} 2\n'))])
    assert '{"http.requests",replica="a","a.b"="c"} 1\n' in found
    assert 'x{replica="a",y="z"} 2\n' in found


def test_merged_metrics_can_be_merged_again() -> None:
    once = merged([(A, read("# TYPE x gauge\nx 1\n")), (B, None)])
    again = merged([(UNNAMED, read(once))])
    assert again.count("# TYPE pensieve_replica_up") == 1
    assert 'x{replica="a"} 1\n' in again


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x{",
        'x{a="1" 2',
        'x{a="1"b="2"} 3',
        'x{a="1} 2',
        "x{a=1} 2",
        'x{a="\\"} 2',
        '{a="1"} 2',
        '{"x","y"} 1',
        "1x 2",
        "x 1 2 3",
        'x{a="1"} ',
        "<html>",
    ],
)
def test_an_invalid_sample_is_refused_with_its_line_number(line: str) -> None:
    with pytest.raises(InvalidExposition, match="line 2 is not a sample"):
        read(f"y 1\n{line}\n")


def test_blank_lines_comments_and_carriage_returns_are_ignored() -> None:
    assert list(read("\n# a comment\n#\n# HELP\nx 1\r\n  \n")) == ["x"]
    assert read("x NaN\n")["x"].samples[0].value == "NaN"
    assert read('x{a="1",} +Inf\n')["x"].samples[0].labels == (("a", '"1"'),)


def test_replicas_are_parsed_from_a_list() -> None:
    assert replicas_of(" a=10.0.0.1:5 ,, b=unix:/x/y=z.sock,[::1]:7,unix:/p=q ") == (
        Replica("a", "10.0.0.1:5"),
        Replica("b", "unix:/x/y=z.sock"),
        Replica("[::1]:7", "[::1]:7"),
        Replica("unix:/p=q", "unix:/p=q"),
    )
    for text, problem in (
        ("", "names no replica"),
        ("a=", "a has no address"),
        ("a b=h:1", "invalid name 'a b'"),
        ("=h:1", "invalid name ''"),
        ("a=h:1,a=h:2", "names a twice"),
        ("h:1,h:1", "names h:1 twice"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            replicas_of(text)


def test_hostile_lines_are_parsed_in_linear_time() -> None:
    """Each text is parsed in linear time. A pattern with backtracking would not finish."""
    for line in (
        "x{" + 'a="' * 20_000,
        "x{" + 'a="\\' * 20_000 + "}",
        "x" + " " * 100_000,
        'x{a="1"' + ", " * 50_000,
    ):
        with pytest.raises(InvalidExposition):
            read(line)
