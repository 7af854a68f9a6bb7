"""The small chat model that ships with Pensieve, so that everything runs offline.

It remembers what it is told (names, places, numbers) and says it back many turns later, and knows
next to nothing else. That is its purpose: a KV-token that went wrong shows as a wrong answer.
`scripts/train_builtin.py` makes everything in `model/` from nothing but the dialogues of
`scripts/builtin_corpus`.
"""

from __future__ import annotations

from pathlib import Path

NAME = "builtin"
MODEL_PATH = Path(__file__).parent / "model"

__all__ = ["MODEL_PATH", "NAME"]
