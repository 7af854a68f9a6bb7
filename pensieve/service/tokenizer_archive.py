"""What of a model's folder a client needs to tokenize by itself: those files, as a zip archive.

Without weights, and without paths.  It takes as long as the vocabulary is large; in any thread.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from pensieve.errors import ModelError

NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.json", "config.json", "generation_config.json"),
)
ENDINGS = (".jinja", ".tiktoken")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files are the same archive


def tokenizer_archive(folder: Path) -> bytes:
    packed = io.BytesIO()
    try:
        files = [each for each in sorted(folder.iterdir()) if _belongs(each)]
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for each in files:
                entry = zipfile.ZipInfo(each.name, EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, each.read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return packed.getvalue()


def model_config(folder: Path) -> dict[str, Any]:
    """Its config.json; empty where that is none."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _belongs(path: Path) -> bool:
    return path.is_file() and (path.name in NAMES or path.suffix in ENDINGS)
