"""Check that no turn was lost or duplicated, and that no conversation had two owners at a time.

`wrong_turns` compares the talker's messages with the stored conversation. `wrong_owners` checks the owner log
(owner_log.py), which lists the commits in order:

    opened, closed        a session. A closed session claims nothing more
    claimed               a session owns a conversation from now on, in an epoch that no other claim has.
                          No turn of the conversation is running
    begun, ended (turn)   by the session that owns the conversation, in its epoch. A turn gets its reply
                          only in the epoch in which it was begun

Both functions return problems as sentences.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve.launch.echo_engine import digest, next_token
from tests.cluster.talkers import Spoken

VISIBLE_MAX = 1  # errors that a talker may see per turn
END_ID = 2
WITH_REPLY = ("completed", "cancelled")


class Stored(NamedTuple):
    """A message of the history."""

    role: str
    text: str
    revision: int


def wrong_turns(name: str, spoken: Sequence[Spoken], stored: Sequence[Stored]) -> list[str]:
    """Return problems: lost, duplicated or changed turns of a conversation."""
    problems = []
    if len(stored) % 2 or any(
        each.role != ("user", "assistant")[at % 2] for at, each in enumerate(stored)
    ):
        return [f"{name}: the roles are {[each.role for each in stored]}"]
    turns = [
        (said.text, reply.text, reply.revision)
        for said, reply in zip(stored[::2], stored[1::2], strict=True)
    ]
    counts = Counter(text for text, _, _ in turns)
    problems += [f"{name}: {text!r} is there {n} times" for text, n in counts.items() if n > 1]
    known = {each.text for each in spoken}
    problems += [f"{name}: {text!r} was never sent" for text in counts if text not in known]
    acknowledged = [each for each in spoken if each.reply is not None]
    for each in acknowledged:
        if each.text not in counts:
            problems.append(f"{name}: {each.text!r} was acknowledged, and is lost")
        elif (each.text, each.reply, each.revision) not in turns:
            problems.append(f"{name}: {each.text!r} lacks the acknowledged reply or revision")
    sent = [each.text for each in acknowledged]
    if [text for text, _, _ in turns if text in sent] != [text for text in sent if text in counts]:
        problems.append(f"{name}: the turns are not in the order in which they were sent")
    revisions = [revision for _, _, revision in turns]
    if revisions != list(range(1, len(turns) + 1)):
        problems.append(f"{name}: the revisions are {revisions}")
    problems += [
        f"{name}: {each.text!r} cost {len(each.visible)} errors: {each.visible}"
        for each in spoken
        if len(each.visible) > VISIBLE_MAX
    ]
    return problems


def wrong_tokens(name: str, replies: Iterable[tuple[bool, Sequence[int]]], size: int) -> list[str]:
    """Return a problem if a token of the echo engine contradicts its arithmetic."""
    log = array("I")
    for number, (is_reply, token_ids) in enumerate(replies):
        for token_id in token_ids:
            if is_reply and token_id != next_token(digest(log), size, END_ID):
                return [f"{name}: message {number} does not follow from the history before it"]
            log.append(token_id)
    return []


@dataclass
class _Conversation:
    """The state of a conversation according to the log so far."""

    session: int = 0
    epoch: int = 0
    turn_id: int = 0  # id of the running turn; 0: none


class _Log:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._replicas: dict[int, str] = {}  # open session -> replica
        self._numbers: set[int] = set()  # numbers of all sessions
        self._epochs: set[int] = set()
        self._conversations: dict[bytes, _Conversation] = {}
        self._began: dict[int, tuple[bytes, int, int]] = {}  # turn -> conversation, session, epoch
        self._with_reply: set[int] = set()  # ids of turns

    def take(self, event: Mapping[str, Any]) -> None:
        getattr(self, f"_{event['event']}")(event)

    def _opened(self, event: Mapping[str, Any]) -> None:
        if event["session"] in self._numbers:
            self._report(event, "there was a session of this number")
        if event["replica"] in self._replicas.values():
            self._report(event, "its replica has another session")
        self._numbers.add(event["session"])
        self._replicas[event["session"]] = event["replica"]

    def _closed(self, event: Mapping[str, Any]) -> None:
        self._replicas.pop(event["session"], None)

    def _claimed(self, event: Mapping[str, Any]) -> None:
        found = self._conversations.setdefault(event["key"], _Conversation())
        if event["session"] not in self._replicas:
            self._report(event, "its session has ended or never began")
        if event["epoch"] in self._epochs:
            self._report(event, "the epoch is another claim's")
        if event["epoch"] <= found.epoch:
            self._report(event, f"an epoch {found.epoch} came before")
        if event["previous"] not in (0, found.session):  # 0: deleted and created again
            self._report(event, f"session {found.session} had it")
        if found.turn_id and event["previous"]:
            self._report(event, f"turn {found.turn_id} runs")
        self._epochs.add(event["epoch"])
        self._conversations[event["key"]] = _Conversation(event["session"], event["epoch"])

    def _begun(self, event: Mapping[str, Any]) -> None:
        turn_id, found = event["turn_id"], self._conversations[event["key"]]
        if event["session"] not in self._replicas:
            self._report(event, "its session has ended or never began")
        if (found.session, found.epoch) != (event["session"], event["epoch"]):
            self._report(event, f"session {found.session} has it, in epoch {found.epoch}")
        if found.turn_id:
            self._report(event, f"turn {found.turn_id} runs")
        if turn_id in self._with_reply:
            self._report(event, "it has its reply")
        found.turn_id = turn_id
        self._began[turn_id] = event["key"], event["session"], event["epoch"]

    def _ended(self, event: Mapping[str, Any]) -> None:
        turn_id, found = event["turn_id"], self._conversations[event["key"]]
        if found.turn_id != turn_id:
            self._report(event, f"it does not run; turn {found.turn_id or 'none'} does")
        found.turn_id = 0
        if event["how"] == "interrupted":  # the next owner may interrupt a turn, too
            return
        whose = event["key"], event["session"], event["epoch"]
        if self._began.get(turn_id) != whose:
            self._report(event, f"it was begun as {self._began.get(turn_id)}")
        if event["how"] in WITH_REPLY:
            self._with_reply.add(turn_id)

    def _report(self, event: Mapping[str, Any], why: str) -> None:
        self.problems.append(f"{dict(event)}: {why}")


def wrong_owners(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return forbidden events of the log."""
    log = _Log()
    for event in events:
        log.take(event)
    return log.problems
