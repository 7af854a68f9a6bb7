"""A tokenizer from a Hugging Face folder, in which client text never becomes a control token.

**Encoding.** *Control tokens* are the added tokens of `tokenizer.json`, special or not ("<|im_end|>",
"<think>", "<tool_call>"). Tokens of white space and the token for unknown text are not control tokens. The
tokenizers library is configured to treat all control tokens as special, and to recognise none in a text.
Then:

* `encode` finds control tokens itself, and only if the template wrote all their characters.
* The text between two control tokens is tokenised as one section, including both the template's text and the
  client's. So ordinary text gets the same ids as in a tokenisation of the whole rendering.
* The ids of each section are checked, because some vocabularies (word level, unigram) also have the control
  tokens as ordinary words. If a text became a control token, the section is cut after the first character of
  that text, and both parts are tokenised separately.

Most tokenizers treat the start of a text specially, for example by adding a space. A section in the middle of
a log must not be treated in this way. So it is encoded after an *anchor*: a token that this class adds before
the section, and whose id it removes again. The anchor's name is random, so no client can write it.

**Decoding.** Each token has a fixed string of bytes, except that a reply's first token may lose a leading
space. `piece` finds and caches these bytes. Joining the bytes decodes a reply, as a whole (`decode`) or token
by token (`Detokenizer`), with the same result.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from pensieve.errors import ContextFull, InvalidArgument, ModelError, one_line
from pensieve.text.template_text import written, written_mask


class Encoded(NamedTuple):
    """The tokens of a text, and where each starts."""

    ids: list[int]
    starts: list[int]  # the index of each token's first character


class ControlToken(NamedTuple):
    """A control token, as `tokenizer.json` defines it."""

    id: int
    lstrip: bool  # the token includes the white space to its left
    rstrip: bool


LONG_CHARACTERS = 8_192  # for longer texts, the GIL is released during tokenisation


class Tokenizer:
    """A model's tokenizer. Immutable except `tokens_max`; several threads may use it."""

    def __init__(
        self,
        definition_json: str,
        *,
        special_strings: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        templates: dict[str, str] | None = None,
    ) -> None:
        definition = json.loads(definition_json)
        added = definition.get("added_tokens", [])
        self.special_strings = special_strings or {}
        self.templates = templates or {}
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self._control = {
            token["content"]: ControlToken(token["id"], token["lstrip"], token["rstrip"])
            for token in added
            if _has_text(token)
        }
        self.control_ids = frozenset(
            token.id
            for content, token in self._control.items()
            if content != _unknown_token(definition["model"])
        )
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tokenizer = _library_tokenizer(definition, definition_json)
        self.vocab_size = _vocab_size(definition)
        if eos_token_ids is None:
            eos_token = self._control.get(self.special_strings.get("eos_token", ""))
            eos_token_ids = (eos_token.id,) if eos_token else ()
        self.eos_token_ids = frozenset(eos_token_ids)
        if any(not 0 <= token_id < self.vocab_size for token_id in self.eos_token_ids):
            raise ModelError(f"end-of-turn ids {sorted(self.eos_token_ids)} exceed the vocabulary")
        self.tokens_max = sys.maxsize  # a text with more tokens raises ContextFull
        self._anchor = f"\ufdd0{secrets.token_hex(16)}\ufdd0"  # between noncharacters
        self._tokenizer.add_tokens([tokenizers.AddedToken(self._anchor, normalized=False)])
        self._forbidden = self.control_ids | {self._tokenizer.token_to_id(self._anchor)}
        self._bytes_of = _byte_reader(definition.get("decoder"))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._reference_ids = self.encode_text("a")
        self._start_ids = self._find_start_ids()
        self._reference = self._tokenizer.decode(self._reference_ids, skip_special_tokens=False)
        self._keeps_nul = self.decode(self.encode_text("a\0b")) == "a\0b"
        self._fingerprint = _fingerprint(
            definition_json,
            json.dumps([self.special_strings, sorted(self.eos_token_ids)], sort_keys=True),
            json.dumps(self.templates, sort_keys=True),
        )

    @classmethod
    def load(cls, folder: Path, chat_template: Path | None = None) -> Tokenizer:
        """Load tokenizer.json and the other tokenizer files of the folder.

        `chat_template` replaces all templates of the folder. Raises ModelError if a file is missing or wrong.
        """
        definition_json = _read_text(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        special_strings = _special_strings(
            _read_json(folder / "special_tokens_map.json")
        ) | _special_strings(config)
        try:
            return cls(
                definition_json,
                special_strings=special_strings,
                eos_token_ids=_eos_token_ids(folder),
                templates=_templates(folder, config)
                if chat_template is None
                else {"default": _read_text(chat_template)},
            )
        except ModelError:
            raise
        except BaseException as error:
            # Some definitions make the library panic, and its panic is not an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{folder} holds no usable tokenizer: {one_line(error)}") from error

    def _find_start_ids(self) -> list[int]:
        """Return the ids that the library's post-processor puts before a text."""
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        count = len(self._reference_ids)
        starts = range(len(ids) - count + 1)
        num_start_ids = next(
            (start for start in starts if ids[start : start + count] == self._reference_ids), 0
        )
        return ids[:num_start_ids]

    # -- text to tokens --

    def encode(self, text: str, *, at_start: bool = False) -> Encoded:
        """Tokenise a rendering. Only control tokens that the template wrote become control tokens.

        `at_start`: the text is the start of a log. Otherwise it follows other tokens.
        """
        encoded = Encoded([], [])
        position = 0
        for start, stop, token_id in self._written_controls(text):
            self._encode_section(text[position:start], position, at_start and not position, encoded)
            encoded.ids.append(token_id)
            encoded.starts.append(start)
            position = stop
        self._encode_section(text[position:], position, at_start and not position, encoded)
        return encoded

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a client's text, without control tokens."""
        return self.encode(str.__str__(text), at_start=True).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the model's start tokens and the ids of a client's text, for the start of a log."""
        return [*self._start_ids, *self.encode_text(text)]

    def encode_literal(self, text: str) -> list[int]:
        """Return the ids of a template's text, with its control tokens."""
        return self.encode(written(text), at_start=True).ids

    def check_text(self, text: str, field: str) -> None:
        """Raise InvalidArgument, which names `field`, if this tokenizer cannot represent the text."""
        if "\0" in text and not self._keeps_nul:
            raise InvalidArgument(field, "this model's tokenizer does not keep NUL characters")

    def _written_controls(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, id) of each control token from left to right.

        If several control tokens begin at one position, the longest counts.
        """
        position = 0  # the end of the previous control token, with its white space
        for run in re.finditer(b"\x01+", written_mask(text)):
            for match in self._control_pattern.finditer(text, run.start(), run.end()):
                token = self._control[match.group()]
                start, stop = match.span()
                if token.lstrip:
                    start = position + len(text[position:start].rstrip())
                if token.rstrip:
                    stop = len(text) - len(text[stop:].lstrip())
                yield start, stop, token.id
                position = stop

    def _encode_section(self, text: str, offset: int, at_start: bool, encoded: Encoded) -> None:
        if not text:
            return
        anchor = "" if at_start else self._anchor
        if len(text) < LONG_CHARACTERS:
            result = self._tokenizer.encode(anchor + text, add_special_tokens=False)
        else:  # only encode_batch releases the GIL
            (result,) = self._tokenizer.encode_batch([anchor + text], add_special_tokens=False)
        if len(encoded.ids) + len(result) > self.tokens_max:
            raise ContextFull(len(encoded.ids) + len(result), self.tokens_max)
        skipped = 0 if at_start else 1
        ids = result.ids[skipped:]
        starts = [start - len(anchor) for start, _ in result.offsets[skipped:]]
        cuts = [
            start
            for token_id, start in zip(ids, starts, strict=True)
            if token_id in self._forbidden
        ]
        if not cuts:
            encoded.ids.extend(ids)
            encoded.starts.extend(offset + max(start, 0) for start in starts)
            return
        edges = [0, *(cut + 1 for cut in cuts if cut + 1 < len(text)), len(text)]
        if len(edges) == 2:
            raise InvalidArgument("content", f"{text!r} means a control token to this tokenizer")
        for start, stop in pairwise(edges):
            self._encode_section(text[start:stop], offset + start, at_start and not start, encoded)

    # -- tokens to text --

    def decode(
        self, ids: Iterable[int], *, is_first: bool = True, with_special: bool = False
    ) -> str:
        """Return the text of a reply, without special tokens. Incomplete UTF-8 becomes U+FFFD.

        `is_first`: no text precedes the ids; some tokenizers then drop the first token's space.
        """
        pieces: list[bytes] = []
        for token_id in ids:
            is_silent = self.is_silent(token_id)
            if not is_silent or (with_special and token_id in self.special_ids):
                pieces.append(self.piece(token_id, first=is_first and not pieces))
        return b"".join(pieces).decode("utf-8", "replace")

    def is_silent(self, token_id: int) -> bool:
        """Return whether a token has no text: a special token, or an id beyond the tokenizer's vocabulary."""
        return token_id in self.special_ids or not 0 <= token_id < self.vocab_size

    def piece(self, token_id: int, *, first: bool) -> bytes:
        """Return the bytes that a token adds to a reply. `first`: it is the reply's first token."""
        key = token_id, first
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._find_piece(token_id, first)
        return piece

    def _find_piece(self, token_id: int, first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        raw = self._bytes_of(token)
        if raw is not None:
            return raw
        before = [] if first else self._reference_ids
        text: str = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)
        return text[0 if first else len(self._reference) :].encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not, in the middle of a text. For logprobs."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self.piece(token_id, first=False).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Return the id of the control token with this text; None if there is none."""
        token = self._control.get(text)
        return token.id if token else None

    def fingerprint(self) -> str:
        """Return a SHA-256 of everything that decides how messages become tokens."""
        return self._fingerprint


def _has_text(added_token: dict[str, Any]) -> bool:
    """Return whether an added token has text other than white space. Some vocabularies add runs of spaces."""
    return bool(added_token["content"].replace("▁", " ").strip())


def _unknown_token(model: dict[str, Any]) -> str | None:
    """Return the token for text that the vocabulary lacks. A client's text may become this token."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    unknown: str | None = model.get("unk_token")
    return unknown


def _vocab_size(definition: dict[str, Any]) -> int:
    """Return the largest id plus one. Some smaller ids may be unused."""
    vocab = definition["model"]["vocab"]  # a list in unigram models
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    return 1 + max(ids.union(token["id"] for token in definition.get("added_tokens", [])))


def _library_tokenizer(definition: dict[str, Any], definition_json: str) -> tokenizers.Tokenizer:
    added = [token | {"special": _has_text(token)} for token in definition.get("added_tokens", [])]
    changed = definition | {"added_tokens": added, "truncation": None, "padding": None}
    if changed != definition:
        definition_json = json.dumps(changed)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition_json)
    except Exception as error:  # the library has no narrower exception class
        raise ModelError(f"tokenizer.json cannot be used: {one_line(error)}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def _byte_reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes | None]:
    """Return a function that maps a token's name to its raw bytes, or to None if the name is text."""
    kinds = {part["type"] for part in _decoder_parts(decoder)}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()

        def byte_level(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()

        return byte_level
    if "ByteFallback" in kinds:
        name = re.compile(r"<0x([0-9A-Fa-f]{2})>")
        return lambda token: bytes.fromhex(match[1]) if (match := name.fullmatch(token)) else None
    return lambda token: None


def _decoder_parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _decoder_parts(part)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable Latin-1, then U+0100 on."""
    alphabet: dict[str, int] = {}
    for byte in range(256):
        if not (0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE):
            alphabet[chr(0x100 + len(alphabet))] = byte
    shifted = set(alphabet.values())
    return alphabet | {chr(byte): byte for byte in range(256) if byte not in shifted}


def _special_strings(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and so on. In the file, each is a string or {"content": string}."""
    found: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _eos_token_ids(folder: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            return found if isinstance(found, list) else [found]
    return None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Most models have one, `default`."""
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found = {"default": entry}
    else:
        found = {each["name"]: each["template"] for each in entry or ()}
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = _read_text(path)
    return found


def _fingerprint(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {one_line(error)}") from error
