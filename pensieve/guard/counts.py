"""Numbers by key that forget a key which is back at zero, so that they are no larger than what they count."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

Key = TypeVar("Key")


class Counts(Counter[Key]):
    """To be changed by `+=` and `-=` alone."""

    def __setitem__(self, key: Key, number: int) -> None:
        if number:
            super().__setitem__(key, number)
        else:
            self.pop(key, None)
