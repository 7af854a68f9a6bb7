"""Was anything lost, doubled, or written by two?  From what talkers know, what the history has, and its log.

`wrong_turns` compares a talker with its conversation.  `wrong_owners` walks through the event log of the
history service, which has the commits in their order, and keeps for every conversation who may write to it:

    opened, ended        a session; nothing comes of one that has ended
    claimed              a conversation is a session's from here on, in an epoch that no other claim has; the
                         session that had it has ended, gave it up, or runs no turn of it
    begun, ended (turn)  by the session that has the conversation, in the epoch that it has it in; a turn is
                         ended by the session that began it, and nobody claimed the conversation in between
    started              the service; it may have died between a commit and its line, so one claim, one
                         beginning and one end of each conversation may be missing before

Both return what is wrong, as sentences.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve.launch.echo_engine import digest, next_token
from tests.cluster.talkers import Spoken

VISIBLE_MAX = 1  # errors of a turn that its talker may see
END_ID = 2


class Stored(NamedTuple):
    """A message as the history has it."""

    role: str
    text: str
    revision: int


def wrong_turns(name: str, spoken: Sequence[Spoken], stored: Sequence[Stored]) -> list[str]:
    """Lost, doubled or changed turns of a conversation."""
    problems = []
    if len(stored) % 2 or any(
        each.role != ("user", "assistant")[at % 2] for at, each in enumerate(stored)
    ):
        return [f"{name}: the roles are {[each.role for each in stored]}"]
    turns = [
        (said.text, reply.text, reply.revision)
        for said, reply in zip(stored[::2], stored[1::2], strict=True)
    ]
    times = Counter(text for text, _, _ in turns)
    problems += [f"{name}: {text!r} is there {n} times" for text, n in times.items() if n > 1]
    known = {each.text for each in spoken}
    problems += [f"{name}: {text!r} was never sent" for text in times if text not in known]
    acknowledged = [each for each in spoken if each.reply is not None]
    for each in acknowledged:
        if each.text not in times:
            problems.append(f"{name}: {each.text!r} was acknowledged, and is lost")
        elif (each.text, each.reply, each.revision) not in turns:
            problems.append(f"{name}: {each.text!r} has another reply or revision than was told")
    wanted = [each.text for each in acknowledged]
    given = {each.text for each in acknowledged}
    if [text for text, _, _ in turns if text in given] != [t for t in wanted if t in times]:
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
    """Tokens of the echo engine that are not what arithmetic says; messages in order, whether sampled."""
    log = array("I")
    for number, (is_reply, token_ids) in enumerate(replies):
        for token_id in token_ids:
            if is_reply and token_id != next_token(digest(log), size, END_ID):
                return [f"{name}: message {number} is not what the history before it says"]
            log.append(token_id)
    return []


@dataclass
class _Conversation:
    """What the log has said of it so far."""

    session: int = 0
    epoch: int = 0
    turn_id: int = 0  # that runs
    is_certain: bool = True  # nothing of it may be missing


class _Log:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._num_starts = 0
        self._replicas: dict[int, str] = {}  # by open session
        self._ended: set[int] = set()
        self._epochs: dict[int, tuple[str, str]] = {}
        self._conversations: dict[tuple[str, str], _Conversation] = {}
        self._where: dict[int, tuple[str, str]] = {}  # conversations by turn

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self._started(event)
        elif kind == "opened":
            self._opened(event)
        elif kind == "ended" and "turn_id" not in event:
            self._session_ended(event["session"])
        else:
            if event["session"] not in self._replicas:
                self._wrong(event, "its session has ended or never began")
            getattr(self, f"_{kind}" if kind != "ended" else "_turn_ended")(event)

    # -- the service and its sessions --

    def _started(self, event: Mapping[str, Any]) -> None:
        self._num_starts += 1
        sessions = {int(number): name for number, name in event["sessions"].items()}
        for number in [each for each in self._replicas if each not in sessions]:
            self._session_ended(number)
        for number, name in sessions.items():
            if number in self._ended:
                self._wrong(event, f"session {number} had ended")
            self._replicas[number] = name
        for conversation in self._conversations.values():
            conversation.is_certain = False

    def _opened(self, event: Mapping[str, Any]) -> None:
        if event["session"] in self._replicas or event["session"] in self._ended:
            self._wrong(event, "there was a session of this number")
        if event["replica"] in self._replicas.values():
            self._wrong(event, "its replica has another session")
        self._replicas[event["session"]] = event["replica"]

    def _session_ended(self, session: int) -> None:
        self._replicas.pop(session, None)
        self._ended.add(session)
        for conversation in self._conversations.values():
            if conversation.session == session:
                conversation.turn_id = 0  # it is interrupted

    # -- conversations --

    def _claimed(self, event: Mapping[str, Any]) -> None:
        key, epoch = _key(event), event["epoch"]
        found = self._conversations.setdefault(key, _Conversation())
        self._new_epoch(event, key, found)
        if found.is_certain and event["previous"] != found.session:
            self._wrong(event, f"session {found.session} had it")
        if found.session in self._replicas and found.turn_id and found.is_certain:
            self._wrong(event, f"session {found.session} goes on, and runs turn {found.turn_id}")
        self._conversations[key] = _Conversation(event["session"], epoch)

    def _new_epoch(
        self, event: Mapping[str, Any], key: tuple[str, str], found: _Conversation
    ) -> None:
        epoch = event["epoch"]
        if epoch in self._epochs:
            self._wrong(event, f"the epoch is one of {self._epochs[epoch]}")
        if epoch <= found.epoch:
            self._wrong(event, f"an epoch {found.epoch} came before")
        self._epochs[epoch] = key

    def _owned(self, event: Mapping[str, Any], key: tuple[str, str]) -> _Conversation:
        """The conversation, which is to be the event's session's in the event's epoch."""
        found = self._conversations.setdefault(key, _Conversation(is_certain=False))
        if (found.session, found.epoch) == (event["session"], event["epoch"]):
            return found
        if found.is_certain:
            self._wrong(event, f"session {found.session} has it, in epoch {found.epoch}")
        else:
            self._new_epoch(event, key, found)
        # Its claim is missing, so the beginning of its turn may be missing, too.
        claimed = _Conversation(event["session"], event["epoch"], is_certain=False)
        self._conversations[key] = claimed
        return claimed

    def _begun(self, event: Mapping[str, Any]) -> None:
        key, turn_id = _key(event), event["turn_id"]
        found = self._owned(event, key)
        if found.turn_id and found.is_certain:
            self._wrong(event, f"turn {found.turn_id} runs")
        if self._where.setdefault(turn_id, key) != key:
            self._wrong(event, f"the turn is one of {self._where[turn_id]}")
        found.turn_id, found.is_certain = turn_id, True

    def _turn_ended(self, event: Mapping[str, Any]) -> None:
        turn_id = event["turn_id"]
        key = self._where.get(turn_id)
        if key is None:  # its beginning may be what is missing
            if self._num_starts < 2:
                self._wrong(event, "it never began")
            return
        found = self._owned(event, key)
        if found.turn_id != turn_id and found.is_certain:
            self._wrong(event, f"it does not run; turn {found.turn_id or 'none'} does")
        found.turn_id, found.is_certain = 0, True

    def _wrong(self, event: Mapping[str, Any], why: str) -> None:
        self.problems.append(f"{dict(event)}: {why}")


def wrong_owners(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the log says that must not be."""
    log = _Log()
    for event in events:
        log.take(event)
    return log.problems


def _key(event: Mapping[str, Any]) -> tuple[str, str]:
    return event["tenant"], event["conversation_id"]
