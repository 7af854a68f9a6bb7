"""The text released token by token equals the text decoded at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from pensieve.text import Detokenizer, Tokenizer
from tests.text.families import QWEN_3, tokenizer_of
from tests.text.tiny_tokenizers import byte_level_library, sentencepiece_library

BYTE_LEVEL = byte_level_library(("<|end|>",), ("<think>", "<｜User｜>"))
SENTENCEPIECE = sentencepiece_library(("<s>", "</s>"))
METASPACE = sentencepiece_library(("<s>", "</s>"), prepend_scheme="first")
WORDS = Library(
    models.WordLevel({"<unk>": 0, "hello": 1, "world": 2, "</s>": 3}, unk_token="<unk>")
)
WORDS.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
WORDS.add_special_tokens(["</s>"])
PIECES = Library(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, ",": 3}, unk_token="[UNK]"))
PIECES.decoder = decoders.WordPiece()

LIBRARIES = {
    "byte level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "metaspace": METASPACE,
    "words": WORDS,
    "word pieces": PIECES,
}
TOKENIZERS = {name: Tokenizer(library.to_str()) for name, library in LIBRARIES.items()}


def released(tokenizer: Tokenizer, ids: Sequence[int | None]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    known = [token_id for token_id in ids if token_id is not None]
    assert len(known) == len(ids)
    return [*(detokenizer.push(token_id) for token_id in known), detokenizer.flush()]


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
any_ids = st.lists(st.integers(-3, 400), max_size=40)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "metaspace"])
@settings(derandomize=True, max_examples=200)
@given(text=any_text)
def test_any_text_is_restored_and_equals_the_librarys_decoding(name: str, text: str) -> None:
    if name != "byte level":
        text = text.replace("▁", "")  # these vocabularies use it for a space
    tokenizer, library = TOKENIZERS[name], LIBRARIES[name]
    ids = tokenizer.encode_text(text)
    assert "".join(released(tokenizer, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
    if name == "metaspace":  # its library adds no space to a text that already begins with one
        text = text.removeprefix(" ")
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", LIBRARIES)
@settings(derandomize=True, max_examples=200)
@given(ids=any_ids)
def test_any_ids_give_the_same_text_incrementally_and_at_once(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert "".join(released(tokenizer, ids)) == tokenizer.decode(ids)


@settings(derandomize=True, max_examples=200)
@given(ids=any_ids)
def test_any_ids_of_a_byte_level_vocabulary_decode_as_in_the_library(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    known = [token_id for token_id in ids if 0 <= token_id < tokenizer.vocab_size]
    assert tokenizer.decode(ids) == BYTE_LEVEL.decode(known, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["words", "word pieces"])
@settings(derandomize=True, max_examples=200)
@given(ids=st.lists(st.integers(0, 3), max_size=8))
def test_word_vocabularies_decode_as_in_the_library(name: str, ids: list[int]) -> None:
    library = LIBRARIES[name]
    assert TOKENIZERS[name].decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_only_complete_characters_are_released() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert released(tokenizer, ids) == ["", "", "", "😀", ""]
    assert released(tokenizer, ids[:3]) == ["", "", "", "\ufffd"]


def test_the_first_word_of_a_reply_has_no_leading_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello = SENTENCEPIECE.token_to_id("▁Hello")
    end = tokenizer.token_id("</s>")
    assert released(tokenizer, [hello, hello]) == ["Hello", " Hello", ""]
    assert released(tokenizer, [end, hello, end, hello]) == ["", "Hello", "", " Hello", ""]


def test_special_tokens_have_no_text_and_think_tags_are_text() -> None:
    tokenizer = tokenizer_of(QWEN_3)
    ids = tokenizer.encode_literal("<think>yes</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>yes</think>"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte level"])
    assert detokenizer.push(10**9) == ""
    assert detokenizer.push(-1) == ""


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "metaspace"])
def test_a_continued_text_keeps_the_space_of_its_first_token(name: str) -> None:
    """In a prefill, the reply follows a text, so its leading space belongs to the reply."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode_text("hello world again")
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(tokenizer, is_first=False)
        rest = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush()
        assert tokenizer.decode(ids[:cut]) + rest == "hello world again"
        assert tokenizer.decode(ids[cut:], is_first=False) == rest
