"""Forms that arrive in arbitrary pieces: parts are exact, and malformed forms are refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.api.http.uploads import HEADER_BYTES_MAX, MultipartForm, PartBegan, PartData
from pensieve.errors import InvalidArgument
from tests.scale import SEED

TYPE = 'multipart/form-data; boundary="b-0"'
FORM = (
    b"--b-0\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\n'
    b"batch\r\n"
    b"--b-0\r\n"
    b"Content-Type: application/octet-stream\r\n"
    b'content-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n\r\n'
    b"one\r\n--b-\r\n--b-1\r\n\r\n"
    b"\r\n--b-0--\r\nwhatever"
)
Parts = list[tuple[str, str, bytes]]


def read(form: bytes, *cuts: int, kind: str = TYPE) -> Parts:
    parser, found = MultipartForm(kind), []
    edges = [0, *sorted(cuts), len(form)]
    for start, stop in pairwise(edges):
        parser.push(form[start:stop])
        while (piece := parser.pop()) is not None:
            if isinstance(piece, PartBegan):
                found.append((piece.name, piece.filename, b""))
            else:
                name, filename, data = found[-1]
                found[-1] = (name, filename, data + piece.data)
    parser.end()
    return found


def written(parts: Parts, boundary: str = "b-0") -> bytes:
    form = b""
    for name, filename, data in parts:
        named = f'form-data; name="{name}"'
        if filename:
            named += f'; filename="{filename}"'
        form += f"--{boundary}\r\nContent-Disposition: {named}\r\n\r\n".encode() + data + b"\r\n"
    return form + f"--{boundary}--\r\n".encode()


def part(disposition: str, data: str = "data") -> bytes:
    return f"--b-0\r\nContent-Disposition: {disposition}\r\n\r\n{data}\r\n--b-0--\r\n".encode()


def test_a_form_is_parsed_the_same_wherever_it_is_split() -> None:
    wanted = [
        ("purpose", "", b"batch"),
        ("file", 'a "b".jsonl', b"one\r\n--b-\r\n--b-1\r\n\r\n"),
    ]
    assert read(FORM) == wanted
    assert read(FORM, *range(len(FORM))) == wanted
    for cut in range(len(FORM)):
        assert read(FORM, cut) == wanted


def test_a_malformed_form_raises_an_error_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidArgument, match="not valid multipart/form-data"):
        read(b"--another\r\n")
    assert caplog.records == []


DATA = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"b-0", b"\r\n--b-", b"x", b"\0"]))


@given(st.lists(st.tuples(st.sampled_from(["file", "f"]), DATA), max_size=4), st.data())
def test_any_file_content_is_returned_unchanged(
    parts: list[tuple[str, list[bytes]]], data: st.DataObject
) -> None:
    file_parts = [(name, "n", b"".join(each)) for name, each in parts]
    file_parts = [each for each in file_parts if b"\r\n--b-0" not in b"\r\n" + each[2]]
    form = written(file_parts)
    cuts = data.draw(st.lists(st.integers(0, len(form)), max_size=6))
    assert read(form, *cuts) == file_parts


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("", "multipart/form-data"),
        ("application/json", "multipart/form-data"),
        ("multipart/form-data", "boundary"),
        ('multipart/form-data; boundary=""', "boundary"),
        ("multipart/form-data; boundary=b\xe9", "boundary"),
        ("multipart/form-data; boundary=" + "b" * 71, "boundary of more than 70"),
        ("multipart/form-data; boundary*=idna''x", "boundary"),
        ("multipart/form-data; boundary=b; a=" + "x" * 1024, "longer than 1,024"),
    ],
)
def test_a_content_type_that_is_not_a_form_is_refused(kind: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        MultipartForm(kind)
    assert caught.value.field == "content-type"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (b"", "closing boundary"),
        (FORM[:-14], "closing boundary"),
        (b"x" * 20_000, "not valid multipart/form-data: Expected boundary"),
        (b"--b-0xy", "not valid multipart/form-data: Did not find CR"),
        (b"--b-0\r\n\r\n\r\n", "without a name"),
        (part("attachment; name=a"), "without a name"),
        (part('form-data; name=""'), "without a name"),
        (part("form-data; name*=utf-8''file"), "without a name"),
        (b"--b-0\r\n" + b"x" * (HEADER_BYTES_MAX + 10), "Maximum header size"),
        (b"--b-0\r\n" + b"a: b\r\n" * 9, "Maximum header count"),
        (written([("a", "", b"")] * 17), "more than 16 parts"),
    ],
)
def test_broken_forms_are_refused(form: bytes, says: str) -> None:
    for cuts in ((), range(0, len(form), 7)):
        with pytest.raises(InvalidArgument, match=says) as caught:
            read(form, *cuts)
        assert caught.value.field == "form"


@pytest.mark.parametrize("header", ["content-type", "content-disposition"])
@pytest.mark.parametrize("parameter", ['a="' + ";" * 31_000, ";" * 31_000, 'a="";' * 6_200])
def test_a_hostile_header_is_parsed_in_linear_time(header: str, parameter: str) -> None:
    """Twenty such headers take a few ms in all. A quadratic parser would take more than 30 s."""

    def content_type() -> None:
        MultipartForm(f"{TYPE}; {parameter}")

    def content_disposition() -> None:
        read(part(f"form-data; name=file; {parameter}"))

    parse: Callable[[], None] = locals()[header.replace("-", "_")]
    began = time.thread_time()
    for _ in range(20):
        with pytest.raises(InvalidArgument):
            parse()
    assert time.thread_time() - began < 2.0


def test_invalid_utf_8_in_a_filename_is_replaced() -> None:
    form = part("form-data; name=file; filename=x").replace(b"=x", b"=x\xff")
    assert read(form) == [("file", "x\ufffd", b"data")]


def test_the_parser_withholds_less_than_one_delimiter_of_a_file() -> None:
    random_ = random.Random(SEED)
    parser = MultipartForm(TYPE)
    parser.push(b'--b-0\r\nContent-Disposition: form-data; name="file"\r\n\r\n')
    assert isinstance(parser.pop(), PartBegan)
    num_in = num_out = 0
    for _ in range(300):
        chunk = random_.choice([b"\r\n--b-", b"\r", b"x" * 999, b"\r\n" * 50])
        num_in += len(chunk)
        parser.push(chunk)
        while (piece := parser.pop()) is not None:
            assert isinstance(piece, PartData)
            num_out += len(piece.data)
        assert num_in - num_out < len(b"\r\n--b-0")
