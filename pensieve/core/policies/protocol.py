"""The protocol that an eviction policy implements: it gives each cached chunk a value.

Eviction (core/eviction.py) decides when a chunk must go, and the policy decides which chunk. A policy

* puts each chunk into a value class (`value_class_of`) and gives each value class a value that falls with
  the idle time (`value`); policies/queue.py explains why,
* is told when turns of a conversation begin and end, so that it can learn, and
* decides whether a copy between the tiers is worth its time.

CONTRIBUTING.md ("An eviction policy") lists the files of a new policy.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pensieve.core.prefix_tree import Branch


class EndedTurn(NamedTuple):
    """The facts about an ended turn from which a policy may learn."""

    input_tokens: int
    output_tokens: int
    length: int = 0  # of the conversation's log
    away_seconds: float = 0.0  # how long its client expects to be away; 0: unknown


class EvictionPolicy(Protocol):
    """Give chunks a value by value class and idle time.

    Within a value class, the value falls with the idle time.
    """

    name: str
    num_value_classes: int
    value_class_ratio: float  # the largest factor between the values of neighboring value classes

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        """Return the value class of a chunk, in 0..num_value_classes - 1.

        A value class is a rounded value. Round down: `value(value_class, idle_seconds)` must not exceed the
        exact value of the chunk, whatever the idle time is.

        In a branch, a later chunk must not have a lower value class than an earlier chunk, because the queue
        looks only at the first chunk that qualifies. While a branch is idle, the value class of its chunks
        must not fall, because an entry of the queue must be a lower bound of the branch's value. Exception:
        the branch loses a holder. The value class may also fall while a turn runs in a conversation that
        holds the branch: the turn pins the branch, and when the turn ends, the branch is queued again.
        """

    def value(self, value_class: int, idle_seconds: float) -> float:
        """Return the retention value of the chunks of a value class after `idle_seconds`."""

    def set_capacity(self, num_tokens: int) -> None:
        """Set the capacity of both tiers together. A chunk that is in both tiers counts once.

        Called once, before any other method.
        """

    def turn_began(self, conversation_id: str, now: float) -> None:
        """Learn that a turn of the conversation was admitted."""

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        """Learn from an ended turn; return the conversation's return_ratio.

        The return_ratio says how much likelier than others the conversation is to return.
        """

    def value_factor_of(self, conversation_id: str) -> float:
        """Return the factor (at most 1) on the value of a conversation whose turn has just ended."""

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        """Learn that the conversation `target_id` begins with the history of another."""

    def continued(self, conversation_id: str, new_id: str) -> None:
        """Learn that a conversation has got another id, before its next turn begins."""

    def initial_idle_seconds(self, away_seconds: float) -> float:
        """Return the idle time that a conversation has at the end of its turn.

        `away_seconds`: how long the client expects to be away.
        """

    def worth_swapping_in(self, chunk_index: int) -> bool:
        """Whether to copy a needed chunk in from the host; False: recompute it."""

    def worth_swapping_out(self, branch: Branch, chunk_index: int, now: float) -> bool:
        """Whether a chunk is worth a copy to the host; False: it may be dropped instead."""


class StaticPolicy:
    """Base of policies that learn nothing. They trust announced absences, and copy every chunk."""

    def set_capacity(self, num_tokens: int) -> None:
        pass

    def turn_began(self, conversation_id: str, now: float) -> None:
        pass

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        return 1.0

    def value_factor_of(self, conversation_id: str) -> float:
        return 1.0

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        pass

    def continued(self, conversation_id: str, new_id: str) -> None:
        pass

    def initial_idle_seconds(self, away_seconds: float) -> float:
        return away_seconds

    def worth_swapping_in(self, chunk_index: int) -> bool:
        return True

    def worth_swapping_out(self, branch: Branch, chunk_index: int, now: float) -> bool:
        return True
