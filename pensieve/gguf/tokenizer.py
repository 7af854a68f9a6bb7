"""Make a tokenizer.json from the vocabulary, merges and rules in a GGUF file.

Before merges apply, a rule cuts the text into words. The file has only the name of this rule
(`tokenizer.ggml.pre`). `RULES` lists the names whose meaning is certain, with the rules from the models' own
tokenizer.json. Files with other names are refused, because a wrong rule would silently give wrong tokens for
some texts.

    gpt2     byte-level BPE: vocabulary and merges are in the file
    llama    SentencePiece's BPE: the file has a score for each token. Two parts are merged if the result is a
             token. The merge that makes the token with the best score comes first. Most models add a space
             before a text: Llama 2 after each control token, newer Mistral models only at the very start. The
             file does not say where. So only files that add no space are supported.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import ModelError, UnsupportedModel, one_line
from pensieve.gguf.header import Header, brief

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # llama.cpp's kinds of added tokens
# regular expressions (Oniguruma) from the models' tokenizer.json
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")  # each digit is a word
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Rule(NamedTuple):
    """How to cut text into words. Without an expression, GPT-2's rule is used."""

    expression: str = ""
    digits_alone: bool = False  # each digit is a word
    whole_words: bool = False  # if a word is a token, no merges are applied
    composed: bool = False  # the text is first converted to Unicode NFC


RULES = {
    "gpt-2": Rule(),
    "smollm": Rule(digits_alone=True),
    "starcoder": Rule(digits_alone=True),
    "llama-bpe": Rule(_LLAMA3, whole_words=True),
    "qwen2": Rule(_QWEN2, composed=True),
    "tekken": Rule(_TEKKEN, whole_words=True),
}
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
END_OF_TURN = ("eos_token_id", "eot_token_id", "eom_token_id")


def write_tokenizer(header: Header) -> dict[str, str]:
    """Return the content of each tokenizer file, including chat_template.jinja if there is a template."""
    texts = {
        "tokenizer.json": tokenizer_of(header).to_str(),
        "tokenizer_config.json": _json(
            {"tokenizer_class": "PreTrainedTokenizerFast", **special_strings(header)}
        ),
    }
    template = header.get("tokenizer.chat_template")
    if template:
        texts["chat_template.jinja"] = template
    return texts


def end_of_turn_ids(header: Header) -> list[int]:
    """Return the ids of all end tokens. A turn and a document may end with different tokens."""
    named = (header.get(f"tokenizer.ggml.{key}") for key in END_OF_TURN)
    return list(dict.fromkeys(int(each) for each in named if each is not None))


def special_strings(header: Header) -> dict[str, str]:
    tokens = _array(header, "tokens")
    found = {}
    for name, key in SPECIAL.items():
        number = header.get(f"tokenizer.ggml.{key}")
        if number is not None and not 0 <= number < len(tokens):
            raise ModelError(
                f"{header.path.name}: tokenizer.ggml.{key} is {number}, which is not a token"
            )
        if number is not None:
            found[name] = tokens[number]
    return found


def tokenizer_of(header: Header) -> Tokenizer:
    kind = header.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: its tokenizer has the kind {brief(kind)}. "
            "Known kinds: gpt2, llama"
        )
    from tokenizers import AddedToken

    tokens = _array(header, "tokens")
    try:
        made = _byte_level(header, tokens) if kind == "gpt2" else _sentence_piece(header, tokens)
    except Exception as error:  # the library has no narrower exception class
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{header.path.name}: its tokenizer is unusable: {one_line(error)}"
        ) from error
    kinds = _array(header, "token_type")
    for added, number in (("special", CONTROL), ("others", USER_DEFINED)):
        found = [
            AddedToken(token, normalized=False, special=added == "special")
            for token, token_kind in zip(tokens, kinds, strict=False)
            if token_kind == number
        ]
        made.add_tokens(found) if added == "others" else made.add_special_tokens(found)
    return made


def _byte_level(header: Header, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = header.get("tokenizer.ggml.pre")
    rule = RULES.get(name)
    if rule is None:
        named = f"the rule {brief(name)}" if name else "a rule that it does not name"
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: its tokenizer cuts text by {named}. Known "
            f"rules: {', '.join(RULES)}"
        )
    merges = [tuple(each.split(" ", 1)) for each in _array(header, "merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.whole_words))
    steps: list[Any] = []
    if rule.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.expression:
        steps.append(pre_tokenizers.Split(Regex(rule.expression), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.expression))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    if rule.composed:
        made.normalizer = normalizers.NFC()
    return made


def _sentence_piece(header: Header, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if header.get("tokenizer.ggml.add_space_prefix", True):
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: a GGUF file does not say whether its "
            "SentencePiece tokenizer puts a space after every control token, or only before the first text. "
            "Use a folder of the model with tokenizer.json"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = _array(header, "scores")
    unknown = header.get("tokenizer.ggml.unknown_token_id")
    made = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="never", split=False
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that can be merged into a token, by descending score of that token."""
    found = []
    for token, number in vocabulary.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ways = [
            (left, right) for left, right in halves if left in vocabulary and right in vocabulary
        ]
        ways.sort(key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
        found += [(scores[number], left, right) for left, right in ways]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _array(header: Header, name: str) -> list[Any]:
    found = header.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list):
        raise ModelError(f"{header.path.name} lacks tokenizer.ggml.{name}")
    return found


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
