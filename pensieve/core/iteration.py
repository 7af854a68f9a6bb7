"""The plan of one step as plain values (`Iteration`), and what came of it (`Outcome`).

An iteration is data.  Nothing in it is a live object of the scheduler: a slice holds copies of all that its
execution needs, so the same value serves the model, the other ranks, the simulator and a journal.

An executor gets what it must know of a turn once: `Iteration.started` lists the turns that have their first
slices here, `Iteration.ended` those that the executor may forget.  (vLLM: `scheduled_new_reqs` and
`finished_req_ids` of a `SchedulerOutput`.)

The executor's contract, on which the bookkeeping relies:

* `copies` are done before any slice of the same iteration is written, `swap_ins` before any slice
  attends to their pages (a layer waits for that layer's copy only).  Both see every write of
  earlier iterations; so do `swap_outs`.
* A slice may attend to what a slice before it in the same iteration computes, and to nothing that a later
  one does.  So in each layer the keys and values of all slices are written before any slice attends; or
  the slices are computed in several parts, in their order.
* A copy is named by its `copy_id` and reported once in `Outcome.finished_copies`, in this or in any
  later outcome.  Until then the core moves neither of its pages.  Page-to-page `copies` are finished
  when their iteration is collected and are not reported.
* Slices of `groups` are of turns whose KV lies on the host; they come behind all others, group by group.
  A group's pages are copied to a staging arena layer by layer, its slices write and attend there, and
  what they have written is copied back; the copies of a group that follows see it, and so do the
  `swap_ins` and groups of later iterations.  No slice reads what a slice of another group writes.
* An iteration without slices is collected when at least one outstanding copy has finished.
* An iteration may be launched while the one before it is not collected.  The last position of a
  slice may then be one whose token that iteration samples (`Slice.awaits_token`); the executor copies
  it into the batch.  If that row fails, or turns out to have ended its turn, the slice's result is thrown
  away.
* A slice that `needs_token` yields exactly one `SampledToken` or one `TurnFailure`; other slices yield
  nothing unless they fail.
* A turn may be in `ended` while a slice of it is not collected.  What is reported for it is ignored.
* A turn may start and end in one iteration (a warm that had nothing to compute): it is forgotten.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.core.constraint import Constraint
from pensieve.sampling import Sampling


class TurnStart(NamedTuple):
    """What an executor has to know of a turn until it ends."""

    turn_id: int
    context: array[int]  # 'I': token ids of its conversation's log and of its prompt
    sampling: Sampling
    constraint: Constraint | None = None
    continues_text: bool = False  # the prompt ends within a text


class Slice(NamedTuple):
    """Positions [start, stop) of a turn; they attend to everything before them."""

    turn_id: int
    start: int
    stop: int
    token_ids: array[int]  # 'I': of these positions; one less where the last one is awaited
    page_table: array[
        int
    ]  # 'i': device page of each chunk up to `stop`; in a group, see `PageGroup`
    needs_token: bool = False  # the logits of position stop - 1 are sampled
    is_last: bool = False  # that token ends the reply, which then has its maximal length

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def awaits_token(self) -> bool:
        """Whether the token at position stop - 1 is still being sampled, by the iteration before."""
        return len(self.token_ids) < self.stop - self.start

    def split(self, position: int) -> tuple[Slice, Slice]:
        """Cut it into two slices: the positions before `position`, and the others."""
        assert self.start < position < self.stop, (self.start, position, self.stop)
        num_first = position - self.start
        first = self._replace(
            stop=position, token_ids=self.token_ids[:num_first], needs_token=False, is_last=False
        )
        return first, self._replace(start=position, token_ids=self.token_ids[num_first:])


class PageCopy(NamedTuple):
    """Copy the first `num_slots` slots of one device page to another (copy on write)."""

    source_page: int
    target_page: int
    num_slots: int


class SwapIn(NamedTuple):
    copy_id: int
    host_page: int
    device_page: int
    num_slots: int


class SwapOut(NamedTuple):
    copy_id: int
    device_page: int
    host_page: int
    num_slots: int


class PageGroup(NamedTuple):
    """Slices of streamed turns that attend together, while their pages lie in a staging arena.

    Those are slices [first_slice, stop_slice) of the iteration, and the entries of their page tables are
    indexes into `host_pages`, ascending; each page is there once.
    """

    first_slice: int
    stop_slice: int
    host_pages: array[int]  # 'i'
    loaded_slots: array[int]  # 'i', of each page: so many leading slots are copied in, before
    stored_slots: array[
        int
    ]  # 'i', of each page: so many are copied back, after; 0: none was written


@dataclass(frozen=True, slots=True)
class Iteration:
    index: int
    slices: tuple[Slice, ...]
    copies: tuple[PageCopy, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    started: tuple[TurnStart, ...] = ()
    ended: tuple[int, ...] = ()  # turn ids
    predicted_seconds: float = 0.0  # that it takes (time_budget.py); 0: nothing is known yet
    groups: tuple[PageGroup, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)


class Logprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that was sampled for a turn, with the text that it releases.

    The same record goes from the executor through the core and over the pipe to the turn's readers.
    """

    turn_id: int
    token_id: int
    text: str = ""
    stopped: bool = False  # it ends the reply: an end-of-turn token, a stop token or a stop string
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


class TurnFailure(NamedTuple):
    turn_id: int
    reason: str  # NAN_LOGITS, CONSTRAINT_FAILED, ...
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    samples: tuple[SampledToken, ...] = ()
    finished_copies: tuple[int, ...] = ()
    failures: tuple[TurnFailure, ...] = ()
