"""The small chat model that ships with Pensieve, so that everything runs offline.

It repeats what it was told (names, places, numbers) many turns later, and knows next to nothing else. So a
wrong KV entry shows as a wrong answer. `scripts/train_builtin.py` makes all files in `model/` from the
dialogues of `scripts/builtin_corpus`.
"""

from __future__ import annotations

from pathlib import Path

NAME = "builtin"
MODEL_PATH = Path(__file__).parent / "model"

__all__ = ["MODEL_PATH", "NAME"]
