"""One prompt of several turns, each in a new conversation of its own: the choices of one request.

The first turn that begins with it lends its KV to those that come after it, token for token: what two prompts
have in common from the front is compared, since each was rendered by itself (a template may write the time).
The others begin when the first one has computed it (choices.py); one that comes earlier computes its own.

It belongs to the store thread.
"""

from __future__ import annotations

from array import array

from pensieve.service.prefixes import common


class SharedPrompt:
    def __init__(self) -> None:
        self._lender, self._tokens = "", array("I")

    def begin(self, key: str, tokens: array[int]) -> tuple[str, int] | None:
        """Whose KV the conversation of this key may begin with, and how many tokens; None of the first."""
        if not self._lender:
            self._lender, self._tokens = key, tokens
            return None
        return self._lender, common(self._tokens, tokens)
