"""The text side of a model, as the service takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pensieve.core.sampling import Sampling
from pensieve.text import ChatTemplate


class Texts(Protocol):
    """The text side of a model."""

    @property
    def template(self) -> ChatTemplate: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def defaults(self) -> Sampling: ...
    @property
    def recommended(self) -> Mapping[str, float]: ...
