"""Find or create the folder of a model, and load its tokenizer and chat template, which need no torch."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.errors import ConfigError, ModelError, UnsupportedModel
from pensieve.gguf.header import is_gguf
from pensieve.launch import smollm2
from pensieve.launch.model_cache import (
    Check,
    cached_folder,
    check_room,
    find_or_make,
    models_folder,
)
from pensieve.sampling import DefaultSampling, Sampling, default_sampling

if TYPE_CHECKING:
    from pensieve.text import ChatTemplate

KEY_BYTES = 1 << 20  # how much is read at the start and at the end of a GGUF file
HEADER_BYTES_MAX = 1 << 24  # how much of a safetensors header is read for the fingerprint
# pieces of each weight file, for the fingerprint of the weights
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
Report = Callable[[str], None]  # receives one line per stage of the start


def resolve_model(
    name: str, report: Report = lambda line: None, check: Check = lambda: None
) -> Path:
    """Return the folder of a model.

    `name` is a path, the id of a model on the Hugging Face hub, `smollm2`, or "" for the built-in model. If
    the model is not cached yet, it is downloaded, and a GGUF file is converted (see `needs_conversion`).
    """
    if not name:
        from pensieve.builtin import MODEL_PATH

        return MODEL_PATH
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name == smollm2.NAME:
        return smollm2.smollm2(report, check)
    if path.is_file() and is_gguf(path):
        return _converted_folder(path, report, check)
    if path.exists():
        raise ModelError(
            f"{name} is not a GGUF file. A model is a GGUF file, or a folder with config.json and "
            "safetensors files"
        )
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        suggestions = difflib.get_close_matches(name, [smollm2.NAME], 1)
        raise ModelError(
            f'unknown model "{name}". Did you mean "{suggestions[0]}"?'
            if suggestions
            else f"there is no {'file' if name.endswith('.gguf') else 'model folder'} {name}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no model folder {name}, and the hub does not provide the model: {first_line}"
        ) from error


def model_name(name: str) -> str:
    """Return the name that clients see: a hub id, or the name of a folder or file without its path."""
    if not name:
        return "built-in"
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else name


def needs_conversion(name: str) -> bool:
    """Return whether `resolve_model` would first download smollm2 or convert a GGUF file."""
    path = Path(name).expanduser()
    if not name or path.is_dir():
        return False
    if name == smollm2.NAME:
        return not smollm2.is_cached()
    return path.is_file() and is_gguf(path) and cached_folder(_key(path)) is None


def _converted_folder(path: Path, report: Report, check: Check) -> Path:
    """Return the folder for a GGUF file. The first call converts the file."""
    from pensieve.gguf.convert import Conversion

    def make(folder: Path) -> None:
        report(f"reading {path.name}")
        conversion = Conversion(path)
        report(conversion.sizes())
        check_room(conversion.num_bytes, path.name)
        conversion.write(folder, report, check)
        report(f"the converted model is kept in {models_folder() / _key(path)}")

    return find_or_make(_key(path), make, report, check)


def _key(path: Path) -> str:
    """Return a cache key for a file. The file may be huge, so only its start and end are read.

    The key includes the modification time, because two trainings of a model may have equal starts and ends.
    """
    try:
        status = path.stat()
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(KEY_BYTES))
            file.seek(max(status.st_size - KEY_BYTES, 0))
            digest.update(file.read(KEY_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    stem = re.sub(r"[^\w.-]+", "_", path.stem)[:64]
    return f"{stem}-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class LoadedTexts:
    """The chat template with its tokenizer, the fingerprint of the model, and the default sampling."""

    template: ChatTemplate
    fingerprint: str
    defaults: Sampling
    defaults_from_model: bool = False  # the default sampling comes from the model's files


def load_texts(folder: Path, report: Report, chat_template: Path | None = None) -> LoadedTexts:
    """Load tokenizer and chat template, and probe the template. `chat_template` replaces the model's."""
    from pensieve.text import ChatTemplate, Tokenizer, probe

    tokenizer = Tokenizer.load(folder, chat_template)
    template = ChatTemplate(tokenizer)
    found = probe(template)
    if found.lost_controls:
        raise UnsupportedModel(
            "its chat template builds control tokens with string formatting or a filter. They cannot be "
            f"distinguished from text (seen in {found.lost_controls[0]})"
        )
    for difference in found.differences:
        report(f"chat template: {difference}")
    try:
        fingerprint = fingerprint_of(folder, tokenizer.fingerprint())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {folder}: {error}") from error
    return LoadedTexts(template, fingerprint, *_default_sampling(folder))


def _default_sampling(folder: Path) -> DefaultSampling:
    path = folder / "generation_config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    try:
        return default_sampling(given)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path} has no usable sampling values: {error}") from error


def fingerprint_of(folder: Path, tokenizer_fingerprint: str) -> str:
    """Return a hash of model, tokenizer and template. The store keeps it with the token ids of a history."""
    digest = hashlib.sha256(tokenizer_fingerprint.encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(folder.glob("*.safetensors")):
        with weights.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_size, HEADER_BYTES_MAX)))
    return digest.hexdigest()[:32]


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of config and weights, to compare the folders of two machines.

    The hash covers each file's size, header (names and shapes) and SAMPLES pieces. Two trainings of a model
    differ almost everywhere. Reading all weights, perhaps hundreds of gigabytes, would delay the start.
    """
    digest = hashlib.sha256()
    try:
        for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                for number in range(1, SAMPLES + 1):
                    file.seek(max(size * number // SAMPLES - SAMPLE_BYTES, 0))
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error}") from error
    return digest.hexdigest()[:32]
