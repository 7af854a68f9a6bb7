"""Matchers for the built-in model's vocabulary: their masks, and grammars that cost too much."""

from __future__ import annotations

import importlib
import json
import random
from functools import cache

import pytest

from pensieve import extras
from pensieve.builtin import MODEL_PATH
from pensieve.errors import ConfigError
from pensieve.text import Tokenizer
from pensieve.text import grammars as grammars_module
from pensieve.text.grammars import COMPILED_MAX, GrammarError, Grammars, Matcher

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CASES = {
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "object": ("json_object", ""),
    "regex": ("regex", "[0-9]{2,4}(-[a-f]+)?"),
    "choice": ("choice", json.dumps(["yes", 'no "at" all', "日本", "\n"])),
    "grammar": ("grammar", 'start: "<" WORD ">"\nWORD: /[A-Z]{2,5}/'),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_PATH)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer())


def allowed(mask: bytearray) -> list[int]:
    return [each for each in range(tokenizer().vocab_size) if mask[each >> 3] >> (each & 7) & 1]


def may_follow(matcher: Matcher, token_id: int) -> bool:
    try:
        matcher.copy().consume(token_id)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_mask_allows_exactly_the_tokens_that_the_matcher_accepts(case: str) -> None:
    chance = random.Random(case)
    ends = tokenizer().eos_token_ids
    for _ in range(3):
        matcher = grammars().matcher(*CASES[case])
        for _ in range(12):
            may = [each for each in allowed(matcher.mask()) if each not in ends]
            others = sorted(set(range(tokenizer().vocab_size)) - set(may) - ends)
            assert all(may_follow(matcher, each) for each in chance.sample(may, min(len(may), 30)))
            assert not any(may_follow(matcher, each) for each in chance.sample(others, 30))
            if not may:
                break
            matcher.consume(chance.choice(may))


@pytest.mark.parametrize("case", CASES)
def test_masks_allow_no_control_token(case: str) -> None:
    matcher = grammars().matcher(*CASES[case])
    control = tokenizer().control_ids - tokenizer().eos_token_ids
    for _ in range(12):
        may = set(allowed(matcher.mask()))
        assert not may & control
        if not (left := sorted(may - tokenizer().eos_token_ids)):
            return
        matcher.consume(left[0])


@pytest.mark.parametrize(
    ("case", "text", "more"),
    [
        ("schema", '{"name": "Ada", "age": 36}', False),
        ("schema", '{\n  "name": "Adä",\n  "age": -7\n}', False),
        ("object", '{"a": [1, {"b": null}]}', False),
        ("regex", "12", True),
        ("regex", "1234-ab", True),
        ("choice", 'no "at" all', False),
        ("choice", "日本", False),
        ("grammar", "<ABC>", False),
    ],
)
def test_a_complete_text_is_accepted_but_no_prefix_of_it(case: str, text: str, more: bool) -> None:
    matcher = grammars().matcher(*CASES[case])
    ids = tokenizer().encode_text(text)
    for token_id in ids:
        assert not matcher.is_accepting or more
        assert token_id in allowed(matcher.mask())
        matcher.consume(token_id)
    assert matcher.is_accepting
    left = set(allowed(matcher.mask())) - tokenizer().eos_token_ids
    assert bool(left) == more


def test_a_matcher_depends_only_on_its_own_tokens() -> None:
    """A new reply must not get a copy of a matcher that was already used."""
    first = grammars().matcher(*CASES["grammar"])
    before = first.mask()
    first.consume(tokenizer().encode_text("<")[0])
    assert grammars().matcher(*CASES["grammar"]).mask() == before
    assert first.mask() != before


def test_the_number_of_kept_compiled_grammars_is_limited() -> None:
    own = Grammars(tokenizer())
    for number in range(COMPILED_MAX + 3):
        own.matcher("regex", f"a{number}")
    assert len(own._compiled) == COMPILED_MAX
    assert ("regex", "a2") not in own._compiled


HOPELESS = {
    "deep": ("json_schema", '{"properties":{"a":' * 500 + "true" + "}}" * 500),
    "to nowhere": ("json_schema", '{"$ref": "#/$defs/none"}'),
    "to a host": ("json_schema", '{"$ref": "http://example.com/a.json"}'),
    "to a file": ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "no schema": ("json_schema", '{"type": "strange"}'),
    "nothing fits": ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
    "no value": ("json_schema", "false"),
    "unfinished": ("regex", "(a"),
    "looks ahead": ("regex", "(?=a)b"),
    "looks back": ("regex", r"(a)\1"),
    "unknown rule": ("grammar", "start: none"),
    "no start": ("grammar", 'other: "a"'),
    "options": ("grammar", 'start: "a"\n%llguidance {"no_forcing": false}'),
    "unknown kind": ("poem", "roses"),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "a circle": (
        "json_schema",
        json.dumps(
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        ),
    ),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_an_unusable_grammar_is_an_error_of_one_short_line(case: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars().compile(*HOPELESS[case])
    assert 0 < len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
COSTLY = {
    "nested repetition": ("regex", "(a+)+b"),
    "repetition of repetition": ("regex", "(.{1,500}x){1,500}"),
    "counts": ("regex", "(a{1000}){1000}"),
    "a long way in one direction": ("json_schema", json.dumps({"const": "x" * 50_000})),
    "counts of rules": ("grammar", 'start: a~1000\na: b~1000\nb: "x"'),
    "many states": ("regex", ".*a.{20}"),
    "200 patterns": (
        "json_schema",
        json.dumps(
            {"anyOf": [{"type": "string", "pattern": f"^[ab]*{n}[a-z]+$"} for n in range(200)]}
        ),
    ),
    "200 objects": (
        "json_schema",
        json.dumps({"anyOf": [{"type": "object", "required": [f"k{n}"]} for n in range(200)]}),
    ),
    "recursive": ("json_schema", json.dumps({"$ref": "#/$defs/node", "$defs": {"node": NODE}})),
    "left recursive": ("grammar", 'start: start start | "a"'),
    "ambiguous": ("grammar", 'start: x*\nx: "a" | x x | "a" x'),
    "a million items": ("json_schema", '{"type": "array", "minItems": 1000000}'),
}


@pytest.mark.parametrize("case", COSTLY)
def test_a_costly_grammar_is_an_error_or_steps_within_its_fuel(case: str) -> None:
    """Compiling and stepping end, either with a matcher or with an error."""
    chance = random.Random(case)
    try:
        matcher = grammars().compile(*COSTLY[case])
    except GrammarError:
        return
    for _ in range(40):
        try:
            left = sorted(set(allowed(matcher.mask())) - tokenizer().eos_token_ids)
        except GrammarError:
            with pytest.raises(GrammarError):  # the error is permanent
                matcher.mask()
            return
        if not left:
            assert matcher.is_accepting
            return
        matcher.consume(chance.choice(left))


def test_a_compilation_fails_when_its_fuel_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "INITIAL_FUEL", 100)
    with pytest.raises(GrammarError):
        grammars().compile("json_schema", json.dumps(SCHEMA))


def test_a_step_fails_when_its_fuel_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "STEP_FUEL", 40)
    matcher = grammars().compile("grammar", 'start: "(" /([a-z]*(ab|cd|ef)+[0-9]{3}){9}/')
    matcher.consume(tokenizer().encode_text("(")[0])
    with pytest.raises(GrammarError):
        matcher.mask()


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delenv(extras.ADD, raising=False)
    with pytest.raises(ConfigError, match="llguidance"):
        Grammars(tokenizer()).matcher("regex", "a")
