"""Number the conversations of `/list`, and find the one that `/resume` names.

A number means the conversation that the list showed under it, also after newer ones have come. A number that
was not shown yet counts from the newest. An existing id comes first, then a number, then the beginning of an
id."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from pensieve.cli.conversation_table import Cached, table_of, with_beginning
from pensieve.client import Client
from pensieve.errors import NotFound

PAGE = 10  # conversations
COMPLETED_MAX = 200
COMPLETION_SECONDS = 2.0


class ChatList:
    """The numbers that a person has seen."""

    def __init__(
        self, client: Client, cached: Callable[[str], Cached | None] = lambda conversation_id: None
    ) -> None:
        """`cached` takes a conversation's id, and returns what the daemon has cached of that conversation."""
        self._client = client
        self._cached = cached
        self._shown: dict[int, str] = {}  # ids by number

    def page(self, number: int, present: str) -> list[str]:
        """Return the lines of a page, the newest conversation first; `present` is marked."""
        first = (number - 1) * PAGE
        found = list(islice(self._client.conversations(), first, first + PAGE + 1))
        marks = []
        for index, each in enumerate(found[:PAGE], start=first + 1):
            self._shown[index] = each.conversation_id
            marks.append(f"{'*' if each.conversation_id == present else ' '}{index:>3}")
        lines = table_of(found[:PAGE], self._cached(present) if found else None, marks)
        if len(found) > PAGE:
            lines.append(f"/list {number + 1} shows older ones")
        return lines

    def find(self, which: str) -> str:
        """Return the id that a person means."""
        if which.isdecimal():
            try:
                return self._client.conversation(which).get().conversation_id
            except NotFound:
                if named := self._numbered(int(which)):
                    return named
        try:
            return with_beginning(self._client, which)
        except NotFound:
            raise NotFound(
                f"no conversation has the number or the id {which!r} (try /list)"
            ) from None

    def newest(self) -> list[str]:
        """Return ids to choose from while a line is typed."""
        states = self._client.conversations(timeout=COMPLETION_SECONDS)
        return [each.conversation_id for each in islice(states, COMPLETED_MAX)]

    def _numbered(self, number: int) -> str | None:
        if number in self._shown or number < 1:
            return self._shown.get(number)
        state = next(islice(self._client.conversations(), number - 1, number), None)
        return None if state is None else state.conversation_id
