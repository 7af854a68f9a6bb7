"""Track which histories are possible, given the answers that clients received.

Each client request is a *deed*: a turn, rewind, deletion or creation. While a request runs, or if its answer
was lost, the deed may or may not have happened. So this module keeps all possible states of each
conversation. Each read of the store and each answer excludes some states. If no state is left, an
acknowledged deed was lost, a refused deed happened, or a deed happened twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

ABSENT, GONE = -2, -1  # revisions of a conversation that does not exist yet, or was deleted


class Deed(NamedTuple):
    kind: str  # "turn", "rewind", "delete", "create", "fork"
    revision: int = 0  # rewind: its target; fork: the revision at which it branches off
    exchanges: tuple[tuple[int, int], ...] = ()  # fork: the exchanges that it starts with


class Seen(NamedTuple):
    """The store's view: the revision, and (deed, revision) of each turn in the history."""

    revision: int
    exchanges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _State:
    revision: int
    exchanges: tuple[tuple[int, int], ...] = ()
    pending: frozenset[int] = frozenset()  # deeds that may still happen
    done: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (deed, revision it made) of deeds that happened

    @property
    def numbers_done(self) -> set[int]:
        return {number for number, _ in self.done}

    def waiting_for(self, number: int) -> _State:
        return replace(self, pending=self.pending | {number})

    def without(self, number: int) -> _State:
        return replace(self, pending=self.pending - {number})


class Histories:
    def __init__(self) -> None:
        self._deeds: list[Deed] = []
        self._states: dict[str, set[_State]] = {}

    def conceive(self, deed: Deed) -> int:
        """Return a number for a new deed. The deed cannot happen before `under_way`."""
        self._deeds.append(deed)
        return len(self._deeds) - 1

    def under_way(self, name: str, deed: Deed, number: int | None = None) -> int:
        """Note that a deed begins, or begins again if it has a `number`. Return its number."""
        if number is None:
            number = self.conceive(deed)
        self._states[name] = {
            state if number in state.numbers_done else state.waiting_for(number)
            for state in self._states.get(name, {_State(ABSENT)})
        }
        return number

    def is_pending(self, name: str, number: int) -> bool:
        return any(number in state.pending for state in self._states.get(name, ()))

    def num_pending(self, name: str) -> int:
        return max((len(state.pending) for state in self._states.get(name, ())), default=0)

    def withdrawn(self, name: str, number: int) -> None:
        """Note that the client gave up this deed. If it has not happened by now, it never will."""
        self._states[name] = {state.without(number) for state in self._states[name]}

    def acknowledged(self, name: str, number: int, revision: int | None = None) -> None:
        """Note that a client was told that the deed has happened and made `revision`."""
        self._states[name] = {
            state
            for state in self._closure(name)
            if any(each == number and revision in (None, made) for each, made in state.done)
        }
        assert self._states[name], (
            f"{name}: deed {number} was acknowledged and cannot have happened"
        )

    def refused(self, name: str, number: int) -> None:
        """Note that a client was told that the deed has not happened and will not."""
        self._states[name] = {
            state.without(number)
            for state in self._closure(name)
            if number not in state.numbers_done
        }
        assert self._states[name], f"{name}: deed {number} was refused and has happened"

    def seen(self, name: str, seen: Seen | None, live: Callable[[int], bool] | None) -> None:
        """Exclude states that contradict the store, and deeds that are not `live` any more."""
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
        """Reuse this name for a new conversation, in which the `pending` deeds may still happen."""
        self._states[name] = {_State(ABSENT, pending=frozenset(pending))}

    def has_happened(self, name: str, number: int) -> bool:
        """Return whether the deed has certainly happened."""
        return all(number in state.numbers_done for state in self._states[name])

    def _closure(self, name: str) -> set[_State]:
        """Return all states that are possible now: any pending deeds may be done, in any order."""
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
            after = _after(state, number, self._deeds[number])
            if after is not None:
                yield replace(
                    after,
                    pending=state.pending - {number},
                    done=state.done | {(number, after.revision)},
                )


def _after(state: _State, number: int, deed: Deed) -> _State | None:
    revision, exchanges = state.revision, state.exchanges
    if deed.kind in ("create", "fork"):
        if revision != ABSENT:
            return None
        return replace(state, revision=deed.revision, exchanges=deed.exchanges)
    if revision < 0:
        return None
    if deed.kind == "delete":
        return replace(state, revision=GONE, exchanges=())
    if deed.kind == "turn":
        return replace(state, revision=revision + 1, exchanges=(*exchanges, (number, revision + 1)))
    assert deed.kind == "rewind"
    if deed.revision not in (0, revision, *(made for _, made in exchanges)):
        return None
    kept = tuple(each for each in exchanges if each[1] <= deed.revision)
    return replace(state, revision=revision + 1, exchanges=kept)
