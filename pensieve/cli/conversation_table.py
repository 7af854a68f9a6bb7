"""A table of conversations for people: title, age, size, what is cached, and an id.

`pensieve conversations ls` and `/list` in `pensieve chat` print this table. The ids in the table may be
shortened. `id_with_beginning` finds a conversation by a shortened id."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from pensieve.cli.markdown import without_control
from pensieve.client import Client, ConversationState
from pensieve.errors import InvalidArgument, NotFound, PensieveError

if TYPE_CHECKING:
    from pensieve.client.admin import Admin
    from pensieve.v1 import admin_pb2 as pb

SEARCHED_MAX = 5000  # only this many of the newest conversations are searched
NAMED_MAX = 4  # how many conversations an error names
CACHED_MAX = 1000  # at most this many cached conversations are requested from the daemon
ID_CHARACTERS_MAX = 20  # longer ids are shortened
SHORT_ID_CHARACTERS = 12  # enough to distinguish thousands of random ids
TITLE_COLUMNS_MIN, TITLE_COLUMNS_MAX = 16, 60
UNTITLED = "(no message yet)"

Cached = Mapping[str, "pb.CachedConversation"]


def cached_by_id(connect: Callable[[], Admin]) -> Cached | None:
    """Return what a daemon has cached, by conversation, or None if that is not available.

    Only a daemon with a UNIX socket in the data folder is asked. Over the network, this would need an admin
    token, and each rejected token would be a line in the audit log."""
    with contextlib.suppress(PensieveError), connect() as admin:
        if admin.address.startswith("unix:"):
            return by_id(admin.cached(limit=CACHED_MAX))
    return None


def by_id(cached: Sequence[pb.CachedConversation]) -> Cached:
    """Return cached conversations by id. Ids that several tenants use are left out."""
    count = Counter(each.conversation_id for each in cached)
    return {each.conversation_id: each for each in cached if count[each.conversation_id] == 1}


def table_of(
    states: Sequence[ConversationState], cached: Cached | None, marks: Sequence[str] = ()
) -> list[str]:
    """Return a header and a row for each conversation. `marks` are put before the rows."""
    if not states:
        return []
    ids = short_ids([each.conversation_id for each in states])
    rows = [
        [
            f"{each.title or UNTITLED}",
            "replying" if each.running_turn_id else age_of(each.updated_at),
            f"{each.num_messages:,}",
            f"{each.num_tokens:,}",
            *(
                []
                if cached is None
                else [cached_text(each, cached.get(each.conversation_id)) or "-"]
            ),
            short_id,
        ]
        for each, short_id in zip(states, ids, strict=True)
    ]
    head = ["title", "age", "messages", "tokens", *([] if cached is None else ["cached"]), "id"]
    lead = max(map(len, marks), default=0)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    others = lead + 2 * len(head) + sum(widths[1:])
    room = shutil.get_terminal_size((100, 24)).columns - others
    widths[0] = min(max(room, TITLE_COLUMNS_MIN), TITLE_COLUMNS_MAX)
    right = {2, 3}
    lines = []
    for mark, row in zip(["", *(marks or [""] * len(rows))], [head, *rows], strict=True):
        cells = [
            each.rjust(width) if index in right else each.ljust(width)
            for index, (each, width) in enumerate(zip(row[1:], widths[1:], strict=True), start=1)
        ]
        title = shortened(row[0], widths[0])
        lines.append("  ".join([*([mark.ljust(lead)] if lead else []), title, *cells]).rstrip())
    return lines


def cached_text(state: ConversationState, cached: pb.CachedConversation | None) -> str:
    """Return the share of a conversation's tokens in each tier of the cache; "" if nothing is cached."""
    if cached is None or not state.num_tokens:
        return ""
    # A running turn has tokens in the cache that its conversation does not have yet.
    held = max(state.num_tokens, cached.device_tokens + cached.host_tokens)
    tiers = (("device", cached.device_tokens), ("host", cached.host_tokens))
    return ", ".join(f"{num / held:.0%} {tier}" for tier, num in tiers if num)


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return the ids. A long id is shortened to a beginning that no other of these ids has."""
    ordered = sorted(ids)
    common = dict.fromkeys(ids, 0)  # length of the longest beginning shared with another id
    for before, after in pairwise(ordered):
        length = next(
            (index for index, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        common[before], common[after] = max(common[before], length), max(common[after], length)
    return [
        name
        if len(name) <= ID_CHARACTERS_MAX
        else name[: max(common[name] + 1, SHORT_ID_CHARACTERS)]
        for name in ids
    ]


def id_with_beginning(client: Client, beginning: str) -> str:
    """Return `beginning` if it is an existing id, otherwise the only id that begins with it.

    Searches the SEARCHED_MAX newest conversations.
    """
    try:
        return client.conversation(beginning).get().conversation_id
    except NotFound:
        pass
    newest = islice(client.conversations(), SEARCHED_MAX)
    return _only_match(beginning, (each.conversation_id for each in newest))


def _only_match(beginning: str, ids: Iterable[str]) -> str:
    found = [each for each in ids if each.startswith(beginning)]
    if not found:
        raise NotFound(f"no conversation has an id that is, or begins with, {beginning!r}")
    if len(found) > 1:
        more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        raise InvalidArgument(beginning, f"is ambiguous: {', '.join(found[:NAMED_MAX])}{more}")
    return found[0]


def shortened(text: str, width: int) -> str:
    """Return the beginning of a text in one line of exactly `width` columns, without control characters."""
    from rich.cells import cell_len, set_cell_size

    line = " ".join(without_control(text[: 4 * width]).split())
    is_whole = cell_len(line) <= width
    return set_cell_size(line, width) if is_whole else set_cell_size(line, width - 1) + "…"


def age_of(then: datetime, now: datetime | None = None) -> str:
    """Return approximately how long ago a time was."""
    seconds = ((now or datetime.now(UTC)) - then).total_seconds()
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h ago"
    return f"{seconds // 86400:.0f} days ago"
