"""Grammars over a tokenizer's vocabulary, by llguidance: which tokens may come next in a reply.

    kind, text ──grammar_of──> a grammar of llguidance ──compile──> Matcher: consume tokens, ask for masks

A matcher works on the bytes that our own tokenizer gives each token, so what it accepts is what the
detokenizer writes.  Control tokens have no bytes: only a grammar that names one lets it through.  (Where a
tokenizer drops a space in front of a reply's first token, that space is one to the grammar.)

White space between the parts of JSON is a line end and at most WHITE_SPACES_MAX spaces: enough to indent, and
an unsure model cannot write spaces until its reply is as long as it may be.

What can only go on in one way is still sampled token by token (`NO_FORCING`): the package would look for all
of it at once, in time and memory that no fuel bounds.

**Bounds.**  Fuel limits what is built from a grammar and what one step may cost, in units of work, so what
runs on one machine runs on every other one; core/constraint.py bounds the text first.  Whatever is wrong
is a `GrammarError` with a short text.  Compiled matchers are kept, COMPILED_MAX of them, and handed out as
copies, so that what a turn does with its matcher depends on its own tokens alone.

Any thread may compile; a matcher belongs to one turn.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from pensieve.errors import one_line
from pensieve.extras import need
from pensieve.text.call_grammars import calls_grammar

COMPILED_MAX = 32
WHITE_SPACES_MAX = 20
INITIAL_FUEL = 1_000_000  # 20 ms
STEP_FUEL = 100_000  # 7 ms
STEP_ITEMS_MAX = 50_000  # 3 ms
ROW_ITEMS_MAX = 5_000
GRAMMAR_SYMBOLS_MAX = 100_000
LEXER_STATES_MAX = 10_000  # of 1 to 2 kB, in each matcher
EXTRA = ("grammar", "llguidance", "A reply that follows a grammar")
OPTION = "%llguidance"
NO_FORCING = f'{OPTION} {{"no_forcing": true}}'
JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ ]?(\n[ ]{{0,{WHITE_SPACES_MAX}}})?",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
    "lenient": False,
}


class GrammarError(Exception):
    """A grammar that cannot be compiled, or a step that costs too much."""


class Vocabulary(Protocol):
    """What is needed of a `Tokenizer`."""

    vocab_size: int
    control_ids: frozenset[int]
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]

    def piece(self, token_id: int, *, first: bool) -> bytes: ...

    def token_id(self, text: str) -> int | None: ...


class Matcher:
    """Follows one reply through its grammar."""

    def __init__(self, native: Any, num_bytes: int) -> None:
        self._native = native
        self._num_bytes = num_bytes  # of a mask

    def copy(self) -> Matcher:
        return Matcher(self._native.deep_copy(), self._num_bytes)

    def consume(self, token_id: int) -> None:
        """Go on behind this token, which a mask allowed."""
        if not self._native.consume_token(token_id):
            self._raise()

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return bool(self._native.is_accepting())

    def mask(self) -> bytearray:
        """A bit for each token of the vocabulary, the lowest bit first: whether it may be next.

        Bits of tokens that end a reply mean nothing.  All are 0 where the grammar takes nothing more.
        """
        native = self._native
        if native.is_stopped():
            if native.is_error():
                self._raise()
            return bytearray(self._num_bytes)
        found = bytearray(native.compute_bitmask())
        if native.is_error():
            self._raise()
        return found[: self._num_bytes]

    def _raise(self) -> None:
        raise GrammarError(short(self._native.get_error() or "the token is not allowed"))


class _Key(NamedTuple):
    kind: str
    text: str


class Grammars:
    """Compiles for one vocabulary; the package is imported when the first grammar comes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[_Key, Matcher] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()  # of what is compiled: never held for long
        self._loading = threading.Lock()  # of all that is below
        self._package: ModuleType | None = None
        self._native_vocabulary: Any = None

    def prepare(self) -> None:
        """Import the package and read the vocabulary; ConfigError if it is missing."""
        with self._loading:
            if self._native_vocabulary is None:
                self._package = need(*EXTRA)
                self._native_vocabulary = _native(self._package, self._vocabulary)

    def matcher(self, kind: str, text: str) -> Matcher:
        """At the beginning of a reply; GrammarError if it cannot be."""
        if (known := self.known(kind, text)) is not None:
            return known
        compiled = self.compile(kind, text)
        with self._lock:
            self._compiled[_Key(kind, text)] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
            return compiled.copy()

    def known(self, kind: str, text: str) -> Matcher | None:
        """The same, if it is at hand."""
        key = _Key(kind, text)
        with self._lock:
            if (found := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
            return found.copy()

    def compile(self, kind: str, text: str) -> Matcher:
        """Without remembering it."""
        self.prepare()
        package = self._package
        assert package is not None
        try:
            grammar = grammar_of(package, kind, text, self._vocabulary.token_id)
        except (ValueError, RecursionError) as error:
            raise GrammarError(short(str(error))) from error
        native = package.LLMatcher(
            self._native_vocabulary, grammar, log_level=0, limits=_limits(package)
        )
        if native.is_error():
            raise GrammarError(short(native.get_error()))
        matcher = Matcher(native, -(-self._vocabulary.vocab_size // 8))
        first = matcher.copy()
        if not any(first.mask()) and not first.is_accepting:
            raise GrammarError("no reply could begin")
        return matcher


def grammar_of(
    package: ModuleType, kind: str, text: str, token_id: Callable[[str], int | None]
) -> str:
    """As llguidance reads it; ValueError if that cannot be."""
    rule_of = partial(_rule_of, package)
    if kind == "grammar":
        if OPTION in text:
            raise ValueError(f"{OPTION} is not for clients")
        lark = text
    elif kind == "tool_calls":
        lark = calls_grammar(text, token_id, rule_of, _schema_rule)
    else:
        lark = f"start: {rule_of(kind, text)}"
    found: str = package.LLMatcher.grammar_from_lark(f"{lark}\n{NO_FORCING}\n")
    return found


def _rule_of(package: ModuleType, kind: str, text: str) -> str:
    """The right side of a rule for text of this kind."""
    if kind == "json_object":
        return _schema_rule({"type": "object"})
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("no value is accepted by this schema")
        return _schema_rule(schema)
    if kind == "regex":
        return f"/{package.regex_to_lark(text, '')}/"
    if kind == "choice":
        return " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
    raise ValueError(f"there is no kind {kind!r}")


def _schema_rule(schema: Mapping[str, Any], is_lenient: bool = False) -> str:
    """With our options in the place of the client's; lenient: what is not known there is passed over."""
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def short(message: str) -> str:
    """The beginning of what the package says, on one line."""
    return one_line(ValueError(message))


def _limits(package: ModuleType) -> Any:
    return package.LLParserLimits(
        max_items_in_row=ROW_ITEMS_MAX,
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS_MAX,
        max_lexer_states=LEXER_STATES_MAX,
        max_grammar_size=GRAMMAR_SYMBOLS_MAX,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class _Tokens:
    """A vocabulary in the form that the package reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = range(vocabulary.vocab_size)
        self.tokens = [vocabulary.piece(each, first=False) for each in ids]
        self.special_token_ids = sorted(
            vocabulary.control_ids | vocabulary.special_ids | vocabulary.eos_token_ids
        )
        self.eos_token_id = min(_ends(vocabulary))
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Texts of a grammar are never turned into tokens, as nothing is forced."""
        return []


def _ends(vocabulary: Vocabulary) -> Iterable[int]:
    """The package wants a token that ends texts; which one does not matter, as its bit is not looked at."""
    return vocabulary.eos_token_ids or vocabulary.special_ids or vocabulary.control_ids or {0}


def _native(package: ModuleType, vocabulary: Vocabulary) -> Any:
    wrapper = package.TokenizerWrapper(_Tokens(vocabulary))
    return package.LLTokenizer(wrapper, n_vocab=vocabulary.vocab_size)
