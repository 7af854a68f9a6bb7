"""A GGUF file's tokenizer splits text like the model's own tokenizer. An unknown rule is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from pensieve.errors import ModelError, UnsupportedModel
from pensieve.gguf.header import Header
from pensieve.gguf.tokenizer import RULES, tokenizer_of, write_tokenizer
from pensieve.text import ChatTemplate, Message, TemplateSetting, Tokenizer
from tests.gguf.tiny import write_gguf
from tests.text.families import QWEN_2_5
from tests.text.tiny_tokenizers import CORPUS, byte_level_library, sentencepiece_library
from tests.text.world import flat

TEXTS = [
    *CORPUS,
    "I'LL have 12345 of them…",
    "  two  spaces\t\n\n\nand a cafe\u0301",
    "",
    "<|im_end|>",
]


def words(made: Any, text: str) -> list[str]:
    """Return the words of a text before merging."""
    return [word.replace("Ġ", " ") for word, _ in made.pre_tokenizer.pre_tokenize_str(text)]


def test_a_byte_level_tokenizer_equals_the_original(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    made, original = tokenizer_of(Header(path)), byte_level_library(QWEN_2_5.special)
    for text in TEXTS:
        assert made.encode(text).ids == original.encode(text).ids
        assert made.decode(made.encode(text).ids) == original.decode(original.encode(text).ids)
    assert made.token_to_id("<|im_end|>") == original.token_to_id("<|im_end|>")


@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        ("gpt-2", ["It", "'s", " 1234", " +", " ABc", "'", "LL"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " +", " ABc", "'", "LL"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " +", " ABc", "'LL"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " +", " ABc", "'LL"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " +", " ABc", "'LL"]),
    ],
)
def test_each_rule_splits_text_differently(rule: str, cut: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", rule=rule)
    assert words(tokenizer_of(Header(tmp_path / "tiny.gguf")), "It's 1234 + ABc'LL") == cut


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_transformers_also_has_give_the_same_tokens(rule: str, tmp_path: Path) -> None:
    """transformers lacks separate digits (smollm, starcoder) and Unicode normalization (qwen2)."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, rule=rule)
    made, theirs = (
        tokenizer_of(Header(path)),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    )
    for text in TEXTS:
        if RULES[rule].digits_alone and any(each.isdigit() for each in text):
            continue
        if RULES[rule].composed and "\u0301" in text:
            continue
        assert made.encode(text).ids == theirs.encode(text), text


def test_the_qwen2_rule_composes_decomposed_letters(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, rule="qwen2")
    made = tokenizer_of(Header(path))
    assert made.encode("cafe\u0301").ids == made.encode("caf\u00e9").ids


def write_sentencepiece(path: Path, scheme: str) -> Any:
    """Write a file with a tokenizer like Llama 2's, or one that adds no space before a text."""
    original = sentencepiece_library(("<s>", "</s>"), prepend_scheme=scheme)
    definition = json.loads(original.to_str())
    merged = {"".join(pair): rank for rank, pair in enumerate(definition["model"]["merges"])}

    def change(writer: gguf.GGUFWriter) -> None:
        tokens = sorted(original.get_vocab(), key=lambda token: original.get_vocab()[token])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([float(-merged.get(token, 1000)) for token in tokens])
        kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
        writer.add_token_types(
            [6 if token.startswith("<0x") else kinds.get(token, 1) for token in tokens]
        )
        writer.add_unk_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(scheme != "never")

    write_gguf(path, family=None, change=change)
    return original


def test_a_sentencepiece_tokenizer_equals_the_original(tmp_path: Path) -> None:
    original = write_sentencepiece(tmp_path / "tiny.gguf", "never")
    made = tokenizer_of(Header(tmp_path / "tiny.gguf"))
    for text in [*TEXTS, " Hello the Hello", "日本 Hello</s> Hello"]:
        assert made.encode(text).ids == original.encode(text).ids, text
    assert made.decode(made.encode(" Hello, 日本").ids) == " Hello, 日本"


def test_a_file_that_does_not_define_the_leading_space_is_refused(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "tiny.gguf", "first")
    with pytest.raises(
        UnsupportedModel, match=r"does not say whether its SentencePiece tokenizer puts"
    ):
        tokenizer_of(Header(tmp_path / "tiny.gguf"))


def test_the_service_loads_the_written_tokenizer_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    for name, text in write_tokenizer(Header(tmp_path / "tiny.gguf")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    template = ChatTemplate(Tokenizer.load(tmp_path))
    opening = template.opening([Message("user", "Hello.")], TemplateSetting())
    assert "Hello." in template.tokenizer.decode(flat(opening))


@pytest.mark.parametrize(
    ("rule", "said"),
    [("poro-chat", "the rule 'poro-chat'"), (None, "a rule that it does not name")],
)
def test_an_unknown_rule_is_refused(rule: str | None, said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", rule=rule)
    with pytest.raises(UnsupportedModel, match=f"cuts text by {said}. Known rules: gpt-2, smollm"):
        tokenizer_of(Header(tmp_path / "tiny.gguf"))


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")

    write_gguf(tmp_path / "tiny.gguf", family=None, change=change)
    with pytest.raises(UnsupportedModel, match="has the kind 'rwkv'"):
        tokenizer_of(Header(tmp_path / "tiny.gguf"))


def test_a_tokenizer_without_its_arrays_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")

    write_gguf(tmp_path / "tiny.gguf", family=None, change=change)
    with pytest.raises(ModelError, match=r"lacks tokenizer.ggml.tokens"):
        tokenizer_of(Header(tmp_path / "tiny.gguf"))
