"""Compile grammars over a tokenizer's vocabulary with llguidance, to say which tokens may come next.

    kind, text ──grammar_of──> a grammar of llguidance ──compile──> Matcher: consume tokens, ask for masks

A matcher uses the bytes that our tokenizer assigns to each token, so it accepts exactly the text that the
detokenizer produces. Control tokens have no bytes, and are allowed only where the grammar names them. (If a
tokenizer drops a space before a reply's first token, the grammar still sees that space.)

White space between the parts of JSON is at most one line break and WHITE_SPACES_MAX spaces. That is enough
for indentation. Without this limit, an uncertain model could write spaces up to the length limit.

If only one continuation is possible, its tokens are still sampled one by one (`NO_FORCING`). llguidance could
return the whole continuation, but fuel would not limit the time and memory for that.

**Limits.** llguidance counts its work in units called fuel. Fuel limits the work of building a grammar and of
one step. So a grammar that works on one machine works on every machine. Before that, core/constraint.py
limits the length of the text. Every error is a `GrammarError` with a short text. Up to COMPILED_MAX compiled
matchers are cached. Each turn gets a copy, so turns do not affect each other.

Any thread may compile. A matcher belongs to one turn.
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
INITIAL_FUEL = 1_000_000  # takes about 20 ms
STEP_FUEL = 100_000  # takes about 7 ms
STEP_ITEMS_MAX = 50_000  # takes about 3 ms
ROW_ITEMS_MAX = 5_000
GRAMMAR_SYMBOLS_MAX = 100_000
LEXER_STATES_MAX = 10_000  # limit for each matcher; a state takes 1 to 2 kB
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
    """The part of `Tokenizer` that grammars need."""

    vocab_size: int
    control_ids: frozenset[int]
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]

    def piece(self, token_id: int, *, first: bool) -> bytes: ...

    def token_id(self, text: str) -> int | None: ...


class Matcher:
    """Follows one reply through its grammar. Belongs to one turn."""

    def __init__(self, native: Any, num_bytes: int) -> None:
        self._native = native
        self._num_bytes = num_bytes  # length of a mask

    def copy(self) -> Matcher:
        return Matcher(self._native.deep_copy(), self._num_bytes)

    def consume(self, token_id: int) -> None:
        """Advance by this token, which the last mask must have allowed."""
        if not self._native.consume_token(token_id):
            self._raise()

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return bool(self._native.is_accepting())

    def mask(self) -> bytearray:
        """Return a bit for each token of the vocabulary: whether the token may be next. Lowest bit first.

        Bits of tokens that end a reply have no meaning. All bits are 0 if the grammar allows no more tokens.
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
    """Compiles grammars for one vocabulary. Imports llguidance for the first grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[_Key, Matcher] = OrderedDict()  # most recently used last
        self._lock = threading.Lock()  # guards _compiled; never held for long
        self._loading = threading.Lock()  # guards the fields below
        self._package: ModuleType | None = None
        self._native_vocabulary: Any = None

    def prepare(self) -> None:
        """Import llguidance and read the vocabulary. Raises ConfigError if the package is missing."""
        with self._loading:
            if self._native_vocabulary is None:
                self._package = need(*EXTRA)
                self._native_vocabulary = _native(self._package, self._vocabulary)

    def matcher(self, kind: str, text: str) -> Matcher:
        """Return a matcher for a new reply. Raises GrammarError."""
        if (known := self.known(kind, text)) is not None:
            return known
        compiled = self.compile(kind, text)
        with self._lock:
            self._compiled[_Key(kind, text)] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
            return compiled.copy()

    def known(self, kind: str, text: str) -> Matcher | None:
        """Return a matcher if the grammar is already compiled, otherwise None."""
        key = _Key(kind, text)
        with self._lock:
            if (found := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
            return found.copy()

    def compile(self, kind: str, text: str) -> Matcher:
        """Compile a matcher without caching it. Raises GrammarError."""
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
            raise GrammarError("it allows no reply")
        return matcher


def grammar_of(
    package: ModuleType, kind: str, text: str, token_id: Callable[[str], int | None]
) -> str:
    """Return the grammar in the syntax of llguidance. Raises ValueError."""
    rule_of = partial(_rule_of, package)
    if kind == "grammar":
        if OPTION in text:
            raise ValueError(f"clients may not set {OPTION}")
        lark = text
    elif kind == "tool_calls":
        lark = calls_grammar(text, token_id, rule_of, _schema_rule)
    else:
        lark = f"start: {rule_of(kind, text)}"
    found: str = package.LLMatcher.grammar_from_lark(f"{lark}\n{NO_FORCING}\n")
    return found


def _rule_of(package: ModuleType, kind: str, text: str) -> str:
    """Return the right side of a rule for text of this kind."""
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
    raise ValueError(f"unknown kind {kind!r}")


def _schema_rule(schema: Mapping[str, Any], is_lenient: bool = False) -> str:
    """Return a rule for a JSON schema, with Pensieve's options for llguidance instead of the client's.

    `is_lenient`: unknown keywords are ignored.
    """
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def short(message: str) -> str:
    """Return the start of an llguidance error message, on one line."""
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
    """The vocabulary in the form that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = range(vocabulary.vocab_size)
        self.tokens = [vocabulary.piece(each, first=False) for each in ids]
        self.special_token_ids = sorted(
            vocabulary.control_ids | vocabulary.special_ids | vocabulary.eos_token_ids
        )
        self.eos_token_id = min(_ends(vocabulary))
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens. llguidance calls this only to force text, which NO_FORCING turns off."""
        return []


def _ends(vocabulary: Vocabulary) -> Iterable[int]:
    """Return candidates for the end token that llguidance requires. The bit of that token is never read."""
    return vocabulary.eos_token_ids or vocabulary.special_ids or vocabulary.control_ids or {0}


def _native(package: ModuleType, vocabulary: Vocabulary) -> Any:
    wrapper = package.TokenizerWrapper(_Tokens(vocabulary))
    return package.LLTokenizer(wrapper, n_vocab=vocabulary.vocab_size)
