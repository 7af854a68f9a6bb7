"""Read the metadata of a GGUF file, and map its tensors into memory."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pensieve.errors import ModelError, UnsupportedModel, one_line
from pensieve.extras import need
from pensieve.gguf import MAGIC

BRIEF = 100  # error messages show at most this many characters of a value


def library(purpose: str = "a GGUF file") -> ModuleType:
    """Import and return llama.cpp's `gguf` package, which reads the format and unpacks quantised blocks."""
    return need("gguf", "gguf", purpose)


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    kind: str  # F32, BF16, Q4_K, ...
    data: Any  # memory-mapped: rows of floats, or rows of bytes that contain quantised blocks

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Header:
    """Metadata by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = library().GGUFReader(path)
            self._fields = reader.fields
            self.tensors = {
                each.name: Tensor(
                    each.name,
                    tuple(int(size) for size in reversed(each.shape)),
                    each.tensor_type.name,
                    each.data,
                )
                for each in reader.tensors
            }
            self.architecture = str(self.get("general.architecture"))
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ModelError(f"{path} is not a complete GGUF file: {one_line(error)}") from error
        if (parts := self.get("split.count", 1)) > 1:
            raise UnsupportedModel(
                f"{path} is one of {parts} parts. Join them with llama-gguf-split --merge"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata. An array becomes a list."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"{self.path.name}: {key} is {brief(value)}, not one number")
        return value

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._fields if key.startswith(prefix)]

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= BRIEF else text[: BRIEF - 3] + "..."


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF. Checks its first bytes, because Ollama's files have no suffix."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
