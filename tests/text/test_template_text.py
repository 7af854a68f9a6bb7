"""Marks survive the operations by which templates join text. They survive no other operations."""

from pensieve.text.template_text import TemplateText, concat, written, written_mask


def test_joining_keeps_the_marks_of_template_text() -> None:
    text = written("<|") + "user" + written("|>")
    assert text == "<|user|>"
    assert text.written == b"\x01\x01\x00\x00\x00\x00\x01\x01"


def test_plain_text_on_the_left_counts_as_client_text() -> None:
    assert ("ab" + written("c")).written == b"\x00\x00\x01"


def test_stripping_and_slicing_cut_the_marks_with_the_text() -> None:
    text = "  a" + written("b \n")
    assert text.strip() == "ab"
    assert text.strip().written == b"\x00\x01"
    assert text.lstrip().written == b"\x00\x01\x01\x01"
    assert text[-1].written == b"\x01"
    assert text[3:5].written == b"\x01\x01"
    assert (written("[x]") + "y").strip("[").written == b"\x01\x01\x00"


def test_joining_with_a_template_separator_marks_the_separator() -> None:
    joined = written(", ").join(["a", written("b")])
    assert (joined, joined.written) == ("a, b", b"\x00\x01\x01\x01")


def test_any_other_operation_yields_text_without_marks() -> None:
    text = written("<|im_end|>")
    for changed in (
        text.replace("x", "y"),
        text.upper().lower(),
        f"{text} "[:-1],
        f"{text} ",
    ):
        assert changed.strip() == "<|im_end|>"
        assert not any(written_mask(changed))
    assert written_mask(TemplateText("<|im_end|>")) == bytes(10)


def test_template_text_compares_and_hashes_like_its_string() -> None:
    assert written("user") == "user"
    assert {"user": 1}[written("user")] == 1
    assert isinstance(str(written("user")), TemplateText)


def test_concat_of_nothing_is_empty() -> None:
    assert concat([]) == ""
