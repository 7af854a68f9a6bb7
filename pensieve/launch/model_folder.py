"""Finds the folder of a model, and loads what needs no torch from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.core.sampling import Sampling
from pensieve.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from pensieve.text import ChatTemplate

MAX_TOKENS = 1024  # of a reply, where the request does not set it
HEADER_BYTES_MAX = 1 << 24  # of a safetensors file, that go into the fingerprint
Report = Callable[[str], None]  # called with one line about each stage of the start


def resolve_model(name: str) -> Path:
    """The folder of a model: a path, a hub id (fetched if the hub can be reached), or the built-in."""
    if not name:
        from pensieve.builtin import MODEL_PATH

        return MODEL_PATH
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is a file; a model is a folder with config.json and safetensors")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"there is no model folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no model folder {name}, and it cannot be fetched: {first_line}"
        ) from error


def model_name(name: str) -> str:
    """What clients may know of it: a hub id, or a folder's own name without the path to it."""
    if not name:
        return "built-in"
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


@dataclass(frozen=True)
class LoadedTexts:
    """The chat template with its tokenizer, a fingerprint of what its token ids belong to, and defaults."""

    template: ChatTemplate
    fingerprint: str
    defaults: Sampling


def load_texts(folder: Path, report: Report, chat_template: Path | None = None) -> LoadedTexts:
    """Tokenizer and chat template (of that file, if one is given), probed; needs no torch."""
    from pensieve.text import ChatTemplate, Tokenizer, probe

    tokenizer = Tokenizer.load(folder, chat_template)
    template = ChatTemplate(tokenizer)
    found = probe(template)
    if found.lost_controls:
        raise UnsupportedModel(
            "its chat template makes control tokens by formatting or a filter, where they cannot be "
            f"distinguished from text (seen in {found.lost_controls[0]})"
        )
    for difference in found.differences:
        report(f"chat template: {difference}")
    try:
        fingerprint = fingerprint_of(folder, tokenizer.fingerprint())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    defaults = replace(generation_defaults(folder), max_tokens=MAX_TOKENS)
    return LoadedTexts(template, fingerprint, defaults)


def generation_defaults(folder: Path) -> Sampling:
    """What the model's authors recommend in generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return Sampling()
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    kinds = {name: int if name == "top_k" else float for name in names}
    values = {name: kinds[name](given[name]) for name in names if given.get(name) is not None}
    if not given.get("do_sample", False):
        values["temperature"] = 0.0
    else:
        values.setdefault("temperature", 1.0)
    return Sampling(**values)  # type: ignore[arg-type]


def fingerprint_of(folder: Path, tokenizer_fingerprint: str) -> str:
    """A hash of model, tokenizer and template, to which the token ids of a history belong."""
    digest = hashlib.sha256(tokenizer_fingerprint.encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(folder.glob("*.safetensors")):
        with weights.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_size, HEADER_BYTES_MAX)))
    return digest.hexdigest()[:32]
