"""Number the conversations of `/list`, and find the conversation that `/resume` names.

A number means the conversation that the list has shown with this number, even if there are newer
conversations now. A number that was not shown counts from the newest conversation. The argument of `/resume`
is tried as an id, then as a number, then as the beginning of an id."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from pensieve.cli.conversation_table import Cached, id_with_beginning, table_of
from pensieve.client import Client
from pensieve.errors import NotFound

PAGE = 10  # conversations per page
COMPLETED_MAX = 200
COMPLETION_SECONDS = 2.0


class ChatList:
    """The numbers that were shown to the user."""

    def __init__(
        self, client: Client, cached: Callable[[str], Cached | None] = lambda conversation_id: None
    ) -> None:
        """`cached` takes a conversation's id and returns what the daemon has cached of it."""
        self._client = client
        self._cached = cached
        self._shown: dict[int, str] = {}  # ids by number

    def page(self, number: int, current_id: str) -> list[str]:
        """Return the lines of a page, newest conversation first. The conversation `current_id` is marked."""
        first = (number - 1) * PAGE
        found = list(islice(self._client.conversations(), first, first + PAGE + 1))
        marks = []
        for index, each in enumerate(found[:PAGE], start=first + 1):
            self._shown[index] = each.conversation_id
            marks.append(f"{'*' if each.conversation_id == current_id else ' '}{index:>3}")
        lines = table_of(found[:PAGE], self._cached(current_id) if found else None, marks)
        if len(found) > PAGE:
            lines.append(f"/list {number + 1} shows older conversations")
        return lines

    def find(self, name: str) -> str:
        """Return the id of the conversation that the user means."""
        if name.isdecimal():
            try:
                return self._client.conversation(name).get().conversation_id
            except NotFound:
                if conversation_id := self._numbered(int(name)):
                    return conversation_id
        try:
            return id_with_beginning(self._client, name)
        except NotFound:
            raise NotFound(
                f"no conversation has the number or the id {name!r} (try /list)"
            ) from None

    def newest(self) -> list[str]:
        """Return ids for completion."""
        states = self._client.conversations(timeout=COMPLETION_SECONDS)
        return [each.conversation_id for each in islice(states, COMPLETED_MAX)]

    def _numbered(self, number: int) -> str | None:
        if number in self._shown or number < 1:
            return self._shown.get(number)
        state = next(islice(self._client.conversations(), number - 1, number), None)
        return None if state is None else state.conversation_id
