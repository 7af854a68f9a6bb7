"""The conversations that `/list` shows and `/resume` finds: numbers, titles, ages.

A number means what the list showed under it, also after other conversations have come; one that was not
shown yet counts from the latest.  An id that exists is always itself, then come numbers, then beginnings
of ids, among the SEARCHED_MAX latest.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from itertools import islice

from pensieve.client import Client, ConversationState
from pensieve.errors import InvalidArgument, NotFound

PAGE = 10  # conversations
SEARCHED_MAX = 5000
COMPLETED_MAX = 200
COMPLETION_SECONDS = 2.0
NAMED_MAX = 4  # of several that a beginning may mean


class ChatList:
    """What a person has seen of the conversations."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._shown: dict[int, str] = {}  # ids by number

    def page(self, number: int, present: str) -> list[str]:
        """The lines of a page, the latest conversations first; `present` is marked."""
        first = (number - 1) * PAGE
        found = list(islice(self._client.conversations(), first, first + PAGE + 1))
        lines = [
            self._line(first + index, each, present)
            for index, each in enumerate(found[:PAGE], start=1)
        ]
        if len(found) > PAGE:
            lines.append(f"/list {number + 1} has older ones")
        return lines

    def find(self, which: str) -> str:
        """The id that a person means."""
        try:
            return self._client.conversation(which).get().conversation_id
        except NotFound:
            pass
        if which.isdecimal() and (named := self._numbered(int(which))):
            return named
        latest = (each.conversation_id for each in self._client.conversations())
        found = [each for each in islice(latest, SEARCHED_MAX) if each.startswith(which)]
        if not found:
            raise NotFound(f"no conversation has the number or the id {which!r}; /list shows them")
        if len(found) > 1:
            more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
            raise InvalidArgument(which, f"may be {', '.join(found[:NAMED_MAX])}{more}")
        return found[0]

    def latest(self) -> list[str]:
        """Ids to choose from while a line is typed."""
        states = self._client.conversations(timeout=COMPLETION_SECONDS)
        return [each.conversation_id for each in islice(states, COMPLETED_MAX)]

    def _numbered(self, number: int) -> str | None:
        if number in self._shown or number < 1:
            return self._shown.get(number)
        state = next(islice(self._client.conversations(), number - 1, number), None)
        return None if state is None else state.conversation_id

    def _line(self, number: int, state: ConversationState, present: str) -> str:
        self._shown[number] = state.conversation_id
        mark = "*" if state.conversation_id == present else " "
        rest = f"{age_of(state.updated_at):>8}  {state.num_messages:>4} messages  {state.conversation_id}"
        width = shutil.get_terminal_size().columns - len(rest) - 8
        return f"{mark}{number:>3}  {shortened(self._title(state), max(width, 16))}  {rest}"

    def _title(self, state: ConversationState) -> str:
        """The first words that a user said."""
        messages = self._client.conversation(state.conversation_id).messages(page_size=2)
        try:
            texts = [each.text for each in islice(messages, 2) if each.role == "user"]
        except NotFound:  # deleted meanwhile
            return ""
        return texts[0] if texts else ""


def shortened(text: str, width: int) -> str:
    """Its beginning as one line of exactly that width, without what a terminal would obey."""
    line = "".join(each if each.isprintable() else " " for each in text[: 4 * width])
    line = " ".join(line.split())
    return line.ljust(width) if len(line) <= width else line[: width - 1] + "…"


def age_of(then: datetime, now: datetime | None = None) -> str:
    """How long ago that was, roughly."""
    seconds = ((now or datetime.now(UTC)) - then).total_seconds()
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h"
    return f"{seconds // 86400:.0f} days"
