"""The protocol of a retention policy, which says what each cached chunk is worth.

The eviction of pages (core/eviction.py) decides when something has to go; a policy decides what.  It

* puts each chunk into a class and gives each class a value that falls with the idle time
  (`class_of`, `value`; policies/queue.py says why in this form),
* hears when turns of a conversation begin and end, should it learn from that, and
* decides where a copy between the tiers is not worth its seconds.

A new policy is a file beside this one, a line in registry.py, and a choice of the setting `policy` in
config/settings.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pensieve.core.prefix_tree import Branch


class EndedTurn(NamedTuple):
    """What a policy may learn from when a turn has ended."""

    input_tokens: int
    output_tokens: int
    length: int = 0  # of the conversation's log
    away_seconds: float = 0.0  # how long its client expects to be away; 0: unknown


class RetentionPolicy(Protocol):
    """What a chunk is worth, by its class and idle time; within a class the longer idle is worth less."""

    name: str
    num_classes: int
    class_ratio: float  # between the values of neighboring classes, at most; they rise

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        """Return the class of a chunk, in 0..num_classes - 1.

        `value` of that class must not exceed what the chunk is worth, at any idle time.
        """

    def value(self, class_index: int, idle_seconds: float) -> float:
        """The retention value of a class's chunks that have been idle for so long."""

    def set_capacity(self, num_tokens: int) -> None:
        """How many tokens both tiers have room for; called once, before anything else."""

    def turn_began(self, conversation_id: str, now: float) -> None:
        """A turn of that conversation has been admitted."""

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        """Returns the conversation's ratio: how much likelier than others it is to return."""

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        """A conversation `target_id` begins with the past of another."""

    def initial_idle_seconds(self, away_seconds: float) -> float:
        """The idle time a conversation starts with, given how long its client expects to be away."""

    def worth_swapping_in(self, chunk_index: int) -> bool:
        """True: a chunk on the host is copied in when it is needed; False: it is computed again."""

    def worth_swapping_out(self, branch: Branch, chunk_index: int, now: float) -> bool:
        """False: the chunk is not worth a copy to the host, and may be dropped instead."""


class StaticPolicy:
    """The answers of a policy that learns nothing: it takes a client's word for how long it will be away,
    and copies whatever it can copy."""

    def set_capacity(self, num_tokens: int) -> None:
        pass

    def turn_began(self, conversation_id: str, now: float) -> None:
        pass

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        return 1.0

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        pass

    def initial_idle_seconds(self, away_seconds: float) -> float:
        return away_seconds

    def worth_swapping_in(self, chunk_index: int) -> bool:
        return True

    def worth_swapping_out(self, branch: Branch, chunk_index: int, now: float) -> bool:
        return True
