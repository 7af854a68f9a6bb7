"""One setting: its name, what its text means, and its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Setting(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    default: str  # as it would be written; "" for none
    help: str
    metavar: str = ""  # "" for a switch
    group: str = "settings"
    spelled: str = ""  # the flag, where it is not the name
    secret: bool = False

    @property
    def flag(self) -> str:
        return self.spelled or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PENSIEVE_" + self.name.upper()


Table = tuple[Setting, ...]
