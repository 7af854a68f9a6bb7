"""Forms, cut anywhere: the parts are theirs, byte for byte, and what is no form is refused."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.errors import InvalidArgument
from pensieve.service.http.multipart import HEAD_BYTES_MAX, Multipart, PartBegan, PartData
from tests.scale import SEED

TYPE = 'multipart/form-data; boundary="b-0"'
FORM = (
    b"--b-0\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\n'
    b"batch\r\n"
    b"--b-0\r\n"
    b'content-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
    b"one\r\n--b-\r\n--b-1\r\n\r\n"
    b"\r\n--b-0--\r\nwhatever"
)
Parts = list[tuple[str, str | None, bytes]]


def read(form: bytes, *cuts: int, kind: str = TYPE) -> Parts:
    parser, found = Multipart(kind), []
    edges = [0, *sorted(cuts), len(form)]
    for start, stop in pairwise(edges):
        for piece in parser.push(form[start:stop]):
            if isinstance(piece, PartBegan):
                found.append((piece.name, piece.filename, b""))
            else:
                assert isinstance(piece, PartData)
                name, filename, data = found[-1]
                found[-1] = (name, filename, data + piece.data)
    parser.end()
    return found


def written(parts: Parts, boundary: str = "b-0") -> bytes:
    form = b""
    for name, filename, data in parts:
        named = f'form-data; name="{name}"'
        if filename is not None:
            named += f'; filename="{filename}"'
        form += f"--{boundary}\r\nContent-Disposition: {named}\r\n\r\n".encode() + data + b"\r\n"
    return form + f"--{boundary}--\r\n".encode()


def test_a_form_is_its_parts_wherever_it_is_cut():
    wanted = [
        ("purpose", None, b"batch"),
        ("file", 'a "b".jsonl', b"one\r\n--b-\r\n--b-1\r\n\r\n"),
    ]
    assert read(FORM) == wanted
    assert read(FORM, *range(len(FORM))) == wanted
    for cut in range(len(FORM)):
        assert read(FORM, cut) == wanted


DATA = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"b-0", b"\r\n--b-", b"x", b"\0"]))


@given(st.lists(st.tuples(st.sampled_from(["file", "f"]), DATA), max_size=4), st.data())
def test_any_data_comes_back(parts, data):
    given_ = [(name, "n", b"".join(each)) for name, each in parts]
    given_ = [each for each in given_ if b"\r\n--b-0" not in b"\r\n" + each[2]]
    form = written(given_)
    if not given_:
        form = b"--b-0--"
    cuts = data.draw(st.lists(st.integers(0, len(form)), max_size=6))
    assert read(form, *cuts) == given_


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=" + "b" * 71,
        "multipart/form-data; boundary*=idna''x",
        "multipart/form-data; boundary*=idna''xn--a%2E",
        "multipart/form-data; boundary*=utf-7''x%2B2AA-",
    ],
)
def test_what_is_no_form_by_its_type_is_refused(kind):
    with pytest.raises(InvalidArgument) as caught:
        Multipart(kind)
    assert caught.value.field == "content-type"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (b"", "closing boundary"),
        (FORM[:-14], "closing boundary"),
        (b"x" * 20_000, "no boundary"),
        (b"--b-0xy", "line end"),
        (b"--b-0\r\n\r\n\r\n", "without a name"),
        (b"--b-0\r\nContent-Disposition: attachment; name=a\r\n\r\n", "without a name"),
        (b"--b-0\r\n" + b"x" * (HEAD_BYTES_MAX + 10), "head"),
        (written([("a", None, b"")] * 17), "parts"),
    ],
)
def test_broken_forms_are_refused(form, says):
    for cuts in ((), range(0, len(form), 7)):
        with pytest.raises(InvalidArgument, match=says):
            read(form, *cuts)


@pytest.mark.parametrize("field", ["name", "filename"])
@pytest.mark.parametrize("charset", ["idna", "punycode", "nothing", "hex", "utf-7", "utf-16", ""])
@pytest.mark.parametrize("value", ["x", "x%2B2AA-", "xn--%C3%A9.", "%00", "%FF%D8"])
def test_a_name_in_any_charset_is_text_or_refused(field, charset, value):
    other = "; name=file" if field == "filename" else ""
    head = f"Content-Disposition: form-data{other}; {field}*={charset}''{value}"
    form = f"--b-0\r\n{head}\r\n\r\ndata\r\n--b-0--".encode()
    try:
        ((name, filename, data),) = read(form)
    except InvalidArgument:
        return
    assert (name, data) == ("file", b"data")
    assert filename is not None
    filename.encode()  # so the daemon can answer with it


def test_what_is_no_text_in_a_filename_is_replaced():
    named = "form-data; name=file; filename*=utf-7''x%2B2AA-"
    form = f"--b-0\r\nContent-Disposition: {named}\r\n\r\n\r\n--b-0--".encode()
    assert read(form) == [("file", "x?", b"")]


def test_what_is_withheld_of_a_file_is_no_longer_than_a_delimiter():
    random_ = random.Random(SEED)
    parser = Multipart(TYPE)
    parser.push(b'--b-0\r\nContent-Disposition: form-data; name="file"\r\n\r\n')
    num_in = num_out = 0
    for _ in range(300):
        chunk = random_.choice([b"\r\n--b-", b"\r", b"x" * 999, b"\r\n" * 50])
        num_in += len(chunk)
        num_out += sum(len(each.data) for each in parser.push(chunk) if isinstance(each, PartData))
        assert num_in - num_out < len(b"\r\n--b-0")
