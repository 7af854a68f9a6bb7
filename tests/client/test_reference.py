"""The SDK reference explains everything public, and builds without a network."""

from __future__ import annotations

import dataclasses
import html
import inspect
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve import client, errors
from pensieve.client import AsyncConversation, Conversation, SamplingOptions, SendOptions
from pensieve.client.admin import Admin

ROOT = Path(__file__).resolve().parents[2]
CLASSES = [*(getattr(client, name) for name in client.__all__), Admin]
OPTIONS = SendOptions.__annotations__


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, found in vars(kind).items():
        if not name.startswith("_"):
            if isinstance(found, property):
                assert found.fget is not None
                yield name, found.fget
            elif inspect.isfunction(found):
                yield name, found


def is_named(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_public_class_method_and_argument_is_explained(kind: type) -> None:
    about = vars(kind).get("__doc__") or ""
    assert about, f"{kind.__name__} has no docstring of its own"
    if dataclasses.is_dataclass(kind):
        assert not about.startswith(f"{kind.__name__}("), "the docstring is the one of dataclass"
        for each in dataclasses.fields(kind):
            assert f"    {each.name}: " in about, f"{kind.__name__} does not explain {each.name}"
    missing = []
    for name, method in methods(kind):
        said = inspect.getdoc(method) or ""
        assert said, f"{kind.__name__}.{name} has no docstring"
        for argument in list(inspect.signature(method).parameters)[1:]:
            if argument in ("options", "message"):  # options are checked one by one below
                continue
            if not is_named(argument, said) and not is_named(argument, about):
                missing.append(f"{name}({argument})")
    assert not missing, f"{kind.__name__} does not explain {', '.join(missing)}"


@pytest.mark.parametrize("kind", [Conversation, AsyncConversation], ids=lambda kind: kind.__name__)
def test_the_help_of_send_explains_every_option(kind: type) -> None:
    said = pydoc.render_doc(kind.send, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert OPTIONS.keys() > SamplingOptions.__annotations__.keys()
    missing = [name for name in OPTIONS if not re.search(rf"^ +{name}: \S", said, re.MULTILINE)]
    assert not missing, f"help({kind.__name__}.send) does not explain {', '.join(missing)}"


def test_every_error_is_explained() -> None:
    for name, found in vars(errors).items():
        if inspect.isclass(found):
            assert vars(found).get("__doc__"), f"{name} has no docstring"
            assert name == "ErasurePending" or name in (errors.__doc__ or ""), (
                f"the tree lacks {name}"
            )


def test_the_reference_is_built_without_a_network_and_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [ROOT / "scripts" / "build_docs", tmp_path / "site"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            "http_proxy": "http://127.0.0.1:1",
            "https_proxy": "http://127.0.0.1:1",
            "PIP_NO_INDEX": "1",
        },
    )
    assert (built.returncode, built.stderr) == (0, "")
    site = tmp_path / "site"
    assert built.stdout.strip() == str(site / "index.html")
    index = (site / "index.html").read_text(encoding="utf-8")
    page = (site / "pensieve" / "client.html").read_text(encoding="utf-8")
    operator = (site / "pensieve" / "client" / "admin.html").read_text(encoding="utf-8")
    tree = (site / "pensieve" / "errors.html").read_text(encoding="utf-8")
    for name in ("client", "client/admin", "errors"):
        assert f'href="pensieve/{name}.html"' in index
    for kind in CLASSES:
        text = operator if kind is Admin else page
        section = re.search(rf'<section id="{kind.__name__}">.*?</section>', text, re.DOTALL)
        assert section is not None, f"the page lacks {kind.__name__}"
        shown = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", section[0])).split())
        first = (inspect.getdoc(kind) or "").split(".")[0].split("`")[0]
        assert " ".join(first.split()) in shown, (
            f"{kind.__name__} is on the page without its docstring"
        )
        for name, _ in methods(kind):
            assert f'id="{kind.__name__}.{name}"' in text, f"the page lacks {kind.__name__}.{name}"
    assert all(f'id="{name}"' in tree for name in ("NotFound", "TurnRunning", "Loading"))
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="?https?:', page + index + tree)
    assert "<class" not in html.unescape(page), "an annotation is shown as Python's own name for it"
