"""The small chat model that ships with Pensieve, so that everything runs offline.

It can repeat facts from the conversation (names, places, numbers) many turns later, and knows almost nothing
else. So a wrong KV entry causes a wrong answer. `scripts/train_builtin.py` creates all files in `model/` from
the dialogues of `scripts/builtin_corpus`.
"""

from __future__ import annotations

from pathlib import Path

NAME = "builtin"
MODEL_PATH = Path(__file__).parent / "model"

__all__ = ["MODEL_PATH", "NAME"]
