"""Convert a GGUF file into a folder for transformers, or say why it cannot be served."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve.gguf.architectures import config_of, weights_of
from pensieve.gguf.header import Header
from pensieve.gguf.tokenizer import end_of_turn_ids, write_tokenizer
from pensieve.gguf.weights import NAMES, check_kinds, kind_of, num_bytes, write_weights

STEP_PERCENT = 20  # percentage of the bytes between two reports of progress
# names of sampling values in a GGUF file, and in generation_config.json
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class Conversion:
    """A file that has passed all checks and can be converted."""

    def __init__(self, path: Path, name: str = "", chat_template: str | None = None) -> None:
        """`chat_template` replaces the template in the file."""
        self.name = name or path.name
        self._header = Header(path)
        self._config = config_of(self._header)
        self._weights = weights_of(self._header)
        check_kinds(self._weights, path.name)
        self._texts = write_tokenizer(self._header)
        if chat_template is not None:
            self._texts["chat_template.jinja"] = chat_template
        self.num_bytes = num_bytes(self._weights)

    def sizes(self) -> str:
        """Return a line with the sizes on disk and in memory."""
        kinds = Counter[str]()
        for each in self._weights:
            kinds[each.tensor.kind] += each.tensor.num_elements
        (main, _), kind = kinds.most_common(1)[0], kind_of(self._weights)
        size = (
            f"{self.name}: {self._header.architecture}, {main}, {megabytes(self._header.num_bytes)}"
        )
        as_int8 = sum(
            each.tensor.num_elements * (1 if ".layers." in each.name else 2)
            for each in self._weights
        )
        return (
            f"{size}; its weights take {megabytes(self.num_bytes)} as {NAMES[kind]}, on the disk and in "
            f"memory (in memory about {megabytes(as_int8)} with --weights int8)"
        )

    def write(self, folder: Path, report: Callable[[str], None], check: Callable[[], None]) -> None:
        """Write the folder. `check` is called regularly, and may raise to cancel the conversion."""
        config = self._config | {"dtype": NAMES[kind_of(self._weights)]}
        ends = end_of_turn_ids(self._header)
        if ends:
            config["eos_token_id"] = ends[0]
        generation: dict[str, Any] = {"eos_token_id": ends} if ends else {}
        texts = self._texts | {
            "config.json": json.dumps(config, indent=2) + "\n",
            "generation_config.json": json.dumps(generation | self._sampling(), indent=2) + "\n",
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        reported = 0

        def progress(written: int) -> None:
            nonlocal reported
            check()
            percent = 100 * written // self.num_bytes
            if percent >= reported + STEP_PERCENT:
                reported = percent - percent % STEP_PERCENT
                report(f"converting {self.name}: {reported} %")

        write_weights(self._weights, folder / "model.safetensors", progress)

    def _sampling(self) -> dict[str, Any]:
        found = {
            ours: value
            for theirs, ours in SAMPLING.items()
            if (value := self._header.get(f"general.sampling.{theirs}")) is not None
        }
        return {"do_sample": True, **found} if found else {}


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 10e9 else f"{count / 1e9:,.1f} GB"
