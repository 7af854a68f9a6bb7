"""Loading a tokenizer from a folder. Client text never becomes a control token."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from pensieve.builtin import MODEL_PATH
from pensieve.errors import ContextFull, InvalidArgument, ModelError
from pensieve.text import Tokenizer
from pensieve.text.tokenizer import LONG_CHARACTERS
from tests.text.families import (
    FAMILIES,
    GEMMA,
    LLAMA_3,
    PHI_3,
    QWEN_3,
    Family,
    tokenizer_of,
    write_folder,
)
from tests.text.tiny_tokenizers import byte_level_library, sentencepiece_library

# -- loading --


def test_load_reads_tokens_special_strings_templates_and_end_of_turn_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, LLAMA_3))
    assert tokenizer.special_strings == {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
    }
    assert tokenizer.eos_token_ids == {tokenizer.token_id("<|eot_id|>")}
    assert tokenizer.templates == {"default": LLAMA_3.template}
    assert tokenizer.vocab_size == 360 + 7
    assert tokenizer.decode(tokenizer.encode_text("Hello there")) == "Hello there"


@pytest.mark.parametrize(
    ("file", "content", "ids"),
    [
        ("generation_config.json", {"eos_token_id": [3, 5]}, {3, 5}),
        ("generation_config.json", {"eos_token_id": 3}, {3}),
        ("config.json", {"eos_token_id": 7}, {7}),
        ("generation_config.json", {"eos_token_id": None}, {364}),
    ],
)
def test_end_of_turn_ids_are_read_from_each_possible_file(
    tmp_path: Path, file: str, content: Any, ids: set[int]
) -> None:
    write_folder(tmp_path, LLAMA_3)
    (tmp_path / file).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_token_ids == ids


def test_named_templates_are_read_and_the_jinja_file_takes_precedence(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA_3)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config = {"chat_template": named, "eos_token": {"content": "<|eot_id|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert Tokenizer.load(tmp_path).templates == {"default": "c", "tool_use": "b"}
    assert Tokenizer.load(tmp_path).special_strings["eos_token"] == "<|eot_id|>"


def test_a_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    byte_level_library(("<s>", "</s>")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == {tokenizer.token_id("</s>")}


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{", "no usable tokenizer"),
        ("tokenizer.json", b"{}", "cannot be used"),
        ("tokenizer.json", b"[]", "no usable tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "None"}}', "cannot be used"),
        ("tokenizer.json", b"\xff\xfe", "is not UTF-8"),
        ("tokenizer.json", b'{"added_tokens":' + b"[" * 100_000, "no usable tokenizer"),
        ("tokenizer_config.json", b"[1]", "is not a JSON object"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "no usable tokenizer"),
        ("generation_config.json", b'{"eos_token_id": 99999}', "exceed the vocabulary"),
        ("generation_config.json", b'{"eos_token_id": "</s>"}', "no usable tokenizer"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(
    tmp_path: Path, file: str, content: Any, problem: str
) -> None:
    write_folder(tmp_path, LLAMA_3)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")


def test_the_fingerprint_changes_with_everything_that_affects_the_tokens(tmp_path: Path) -> None:
    def fingerprint(**changed: Any) -> str:
        write_folder(tmp_path, LLAMA_3)
        for name, content in changed.items():
            (tmp_path / name.replace("__", ".")).write_text(content)
        return Tokenizer.load(tmp_path).fingerprint()

    first = fingerprint()
    assert first == fingerprint()
    assert len(first) == 64
    definition = (tmp_path / "tokenizer.json").read_text()
    others = {
        fingerprint(chat_template__jinja="{{ messages }}"),
        fingerprint(generation_config__json='{"eos_token_id": 1}'),
        fingerprint(tokenizer__json=definition.replace("<|python_tag|>", "<|snake_tag|>")),
    }
    assert len(others | {first}) == 4


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    library = byte_level_library()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    assert len(Tokenizer(library.to_str()).encode_text("x" * 10)) == 10


# -- control tokens --


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_user_text_never_becomes_a_control_token(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    for text in (*family.special, *family.plain_added):
        hostile = f"say {text}{text}now"
        ids = tokenizer.encode_text(hostile)
        assert not tokenizer.control_ids & set(ids)
        assert tokenizer.decode(ids) == hostile
        assert tokenizer.encode_literal(text) == [tokenizer.token_id(text)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_literals_are_tokenized_as_the_library_tokenizes_them(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    library = byte_level_library(family.special, family.plain_added, family.rstrip)
    controls = (*family.special, *family.plain_added)
    text = " \n Hello  ".join(controls) + " there" + "".join(controls)
    assert tokenizer.encode_literal(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("prepend_scheme", [None, "always", "first", "never"])
@pytest.mark.parametrize(
    "text", ["Hello the", "<s>Hello<s> the</s>", "<s><s> Hello", " Hello</s>the"]
)
def test_the_space_before_a_section_is_as_in_the_library(
    prepend_scheme: str | None, text: str
) -> None:
    library = sentencepiece_library(("<s>", "</s>"), prepend_scheme=prepend_scheme)
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode_literal(text) == library.encode(text, add_special_tokens=False).ids


def test_text_in_the_middle_of_a_log_gets_no_leading_space() -> None:
    library = sentencepiece_library(("<s>",), prepend_scheme="first")
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.decode(tokenizer.encode("the").ids) == "the"
    assert library.id_to_token(tokenizer.encode("the").ids[0]) == "t"
    assert library.id_to_token(tokenizer.encode("the", at_start=True).ids[0]) == "▁t"


def test_encode_returns_the_start_character_of_each_token() -> None:
    tokenizer = tokenizer_of(PHI_3)
    text = tokenizer.encode("ab<|end|>é")
    assert text.starts[:2] == [0, 1]
    assert text.starts == sorted(text.starts)
    assert text.starts[-2:] == [9, 9]


def test_a_control_token_may_include_surrounding_white_space() -> None:
    library = byte_level_library()
    library.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer = Tokenizer(library.to_str())
    text = "a  <m> \n <m>  b"
    assert tokenizer.encode_literal(text) == library.encode(text).ids
    assert len(tokenizer.encode_literal(text)) == 4


def test_the_longest_of_several_control_tokens_counts() -> None:
    library = byte_level_library(("<a>", "<a><b>"))
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode_literal("<a><b>") == [tokenizer.token_id("<a><b>")]


def test_control_strings_in_text_do_not_split_the_text() -> None:
    """A split would begin a new section, and this vocabulary begins each section with a space."""
    library = sentencepiece_library(("<s>", "</s>"))
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = Tokenizer(library.to_str())
    for text in ("a<s>b</s>c", "<think>the</think><think>"):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert not tokenizer.control_ids & set(ids)


def test_runs_of_sentencepiece_spaces_are_ordinary_text() -> None:
    library = sentencepiece_library(("<s>",))
    library.add_tokens([AddedToken("▁▁", normalized=False)])
    assert Tokenizer(library.to_str()).token_id("▁▁") is None


def test_runs_of_white_space_are_ordinary_text() -> None:
    library = byte_level_library(("<s>",), ("        ",))
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.control_ids == {tokenizer.token_id("<s>")}
    assert tokenizer.encode_text("        ") == library.encode("        ").ids
    assert len(tokenizer.encode_text("        ")) == 1


def word_level(*words: str) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    library = Library(models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<end>"])
    return Tokenizer(library.to_str())


def test_control_strings_stay_text_if_they_are_words_of_the_vocabulary() -> None:
    tokenizer = word_level("hello", "<end>", "<", "end>")
    assert tokenizer.encode_text("hello <end> hello") == [1, 3, 4, 1]
    assert tokenizer.encode_literal("hello<end>") == [1, 2]


def test_unknown_words_are_allowed_and_are_not_control_tokens() -> None:
    tokenizer = word_level("hello", "<end>")
    assert tokenizer.encode_text("hello <unk> other") == [1, 0, 0]
    assert tokenizer.control_ids == {2}


def test_a_control_token_of_a_single_character_cannot_be_written() -> None:
    library = Library(models.WordLevel({"<unk>": 0, "§": 1}, unk_token="<unk>"))
    library.add_special_tokens(["§"])
    with pytest.raises(InvalidArgument, match="means a control token"):
        Tokenizer(library.to_str()).encode_text("§")


def test_a_normalizer_creates_no_control_token_from_text() -> None:
    library = byte_level_library(("<end>",))
    library.normalizer = normalizers.Lowercase()
    library.add_tokens([AddedToken("<stop>", normalized=True)])
    tokenizer = Tokenizer(library.to_str())
    assert not tokenizer.control_ids & set(tokenizer.encode_text("<END> <STOP> <stop>"))


def test_the_tokenizers_internal_anchor_is_text_if_a_client_sends_it() -> None:
    tokenizer = tokenizer_of(GEMMA)
    for text in (tokenizer._anchor, f"a{tokenizer._anchor}{tokenizer._anchor}b"):
        for at_start in (True, False):
            ids = tokenizer.encode(text, at_start=at_start).ids
            assert max(ids) < tokenizer.vocab_size
            assert tokenizer.decode(ids) == text


def test_nul_is_kept_by_byte_level_vocabularies_and_refused_by_vocabularies_that_lose_it() -> None:
    tokenizer = tokenizer_of(QWEN_3)
    tokenizer.check_text("a\0b", "content")
    assert tokenizer.decode(tokenizer.encode_text("a\0b")) == "a\0b"
    with pytest.raises(InvalidArgument, match="NUL"):
        word_level("a").check_text("a\0b", "content")


def test_token_text_of_any_id() -> None:
    tokenizer = tokenizer_of(QWEN_3)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_text(10**9) == tokenizer.token_text(-1) == ""


def test_a_long_text_is_encoded_in_parts_and_refused_if_it_is_too_long() -> None:
    tokenizer = Tokenizer.load(MODEL_PATH)
    line = "The rain is over in Oslo.\n"
    short, long = line * 200, line * 400
    assert len(short) < LONG_CHARACTERS < len(long)
    assert tokenizer.encode_text(long) == tokenizer.encode_text(short) * 2
    tokenizer.tokens_max = 50
    with pytest.raises(ContextFull):
        tokenizer.encode_text(long)
    assert len(tokenizer.encode_text(line)) < 50
