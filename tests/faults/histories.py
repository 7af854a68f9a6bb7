"""Track which histories are possible, given the answers that clients received.

Each client request is an *operation*: a turn, rewind, deletion or creation. While a request runs, or if its
answer was lost, the operation may or may not have happened. So this module keeps all possible states of each
conversation. Each read of the store and each answer excludes some states. If no state is left, an
acknowledged operation was lost, a refused operation happened, or an operation happened twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

ABSENT, GONE = -2, -1  # revisions of a conversation that does not exist yet, or was deleted


class Operation(NamedTuple):
    kind: str  # "turn", "rewind", "delete", "create", "fork"
    revision: int = 0  # rewind: its target; fork: the revision at which it branches off
    exchanges: tuple[tuple[int, int], ...] = ()  # fork: the exchanges that it starts with


class Seen(NamedTuple):
    """The store's view: the revision, and (operation, revision) of each turn in the history."""

    revision: int
    exchanges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _State:
    revision: int
    exchanges: tuple[tuple[int, int], ...] = ()
    pending: frozenset[int] = frozenset()  # operations that may still happen
    done: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (operation, revision it made) of operations that happened

    @property
    def numbers_done(self) -> set[int]:
        return {number for number, _ in self.done}

    def waiting_for(self, number: int) -> _State:
        return replace(self, pending=self.pending | {number})

    def without(self, number: int) -> _State:
        return replace(self, pending=self.pending - {number})


class Histories:
    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._states: dict[str, set[_State]] = {}

    def register(self, operation: Operation) -> int:
        """Return a number for a new operation. The operation cannot happen before `note_begun`."""
        self._operations.append(operation)
        return len(self._operations) - 1

    def note_begun(self, name: str, operation: Operation, number: int | None = None) -> int:
        """Note that an operation begins, or begins again if it has a `number`. Return its number."""
        if number is None:
            number = self.register(operation)
        self._states[name] = {
            state if number in state.numbers_done else state.waiting_for(number)
            for state in self._states.get(name, {_State(ABSENT)})
        }
        return number

    def is_pending(self, name: str, number: int) -> bool:
        return any(number in state.pending for state in self._states.get(name, ()))

    def num_pending(self, name: str) -> int:
        return max((len(state.pending) for state in self._states.get(name, ())), default=0)

    def note_withdrawn(self, name: str, number: int) -> None:
        """Note that the client gave up this operation. If it has not happened by now, it never will."""
        self._states[name] = {state.without(number) for state in self._states[name]}

    def note_acknowledged(self, name: str, number: int, revision: int | None = None) -> None:
        """Note that a client was told that the operation has happened and made `revision`."""
        self._states[name] = {
            state
            for state in self._closure(name)
            if any(each == number and revision in (None, made) for each, made in state.done)
        }
        assert self._states[name], (
            f"{name}: operation {number} was acknowledged and cannot have happened"
        )

    def note_refused(self, name: str, number: int) -> None:
        """Note that a client was told that the operation has not happened and will not."""
        self._states[name] = {
            state.without(number)
            for state in self._closure(name)
            if number not in state.numbers_done
        }
        assert self._states[name], f"{name}: operation {number} was refused and has happened"

    def note_seen(self, name: str, seen: Seen | None, live: Callable[[int], bool] | None) -> None:
        """Exclude states that contradict the store, and operations that are not `live` any more."""
        possible = {
            state
            for state in self._closure(name)
            if (seen is None and state.revision < 0)
            or (seen is not None and (state.revision, state.exchanges) == seen)
        }
        if not possible:
            wanted = sorted((state.revision, state.exchanges) for state in self._closure(name))
            raise AssertionError(f"{name}: the store shows {seen}, possible is {wanted}")
        if live is not None:
            possible = {
                replace(state, pending=frozenset(filter(live, state.pending))) for state in possible
            }
        self._states[name] = possible

    def names(self) -> list[str]:
        return list(self._states)

    def exists(self, name: str) -> bool:
        """Return whether the conversation may exist."""
        return any(
            state.revision >= 0 or (state.revision == ABSENT and state.pending)
            for state in self._states[name]
        )

    def is_gone(self, name: str) -> bool:
        """Return whether the conversation is certainly deleted."""
        return all(state.revision == GONE for state in self._states[name])

    def begin_again(self, name: str, pending: Iterable[int]) -> None:
        """Reuse this name for a new conversation, in which the `pending` operations may still happen."""
        self._states[name] = {_State(ABSENT, pending=frozenset(pending))}

    def has_happened(self, name: str, number: int) -> bool:
        """Return whether the operation has certainly happened."""
        return all(number in state.numbers_done for state in self._states[name])

    def _closure(self, name: str) -> set[_State]:
        """Return all states that are possible now: any pending operations may be done, in any order."""
        found = set(self._states[name])
        border = list(found)
        while border:
            for state in self._next(border.pop()):
                if state not in found:
                    found.add(state)
                    border.append(state)
        return found

    def _next(self, state: _State) -> Iterable[_State]:
        for number in sorted(state.pending):
            after = _after(state, number, self._operations[number])
            if after is not None:
                yield replace(
                    after,
                    pending=state.pending - {number},
                    done=state.done | {(number, after.revision)},
                )


def _after(state: _State, number: int, operation: Operation) -> _State | None:
    revision, exchanges = state.revision, state.exchanges
    if operation.kind in ("create", "fork"):
        if revision != ABSENT:
            return None
        return replace(state, revision=operation.revision, exchanges=operation.exchanges)
    if revision < 0:
        return None
    if operation.kind == "delete":
        return replace(state, revision=GONE, exchanges=())
    if operation.kind == "turn":
        return replace(state, revision=revision + 1, exchanges=(*exchanges, (number, revision + 1)))
    assert operation.kind == "rewind"
    if operation.revision not in (0, revision, *(made for _, made in exchanges)):
        return None
    kept = tuple(each for each in exchanges if each[1] <= operation.revision)
    return replace(state, revision=revision + 1, exchanges=kept)
