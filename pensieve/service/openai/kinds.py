"""The endpoints of OpenAI's API whose requests are understood, by their paths."""

from __future__ import annotations

from enum import StrEnum


class RequestKind(StrEnum):
    """What a body asks for."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSE = "/v1/responses"
