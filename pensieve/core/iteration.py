"""The plan of one step (`Iteration`) and its result (`Outcome`), as plain values.

An iteration contains no live object of the scheduler: a slice holds copies of everything that its execution
needs. So the same value serves the model, the other ranks, the simulator and a journal.

An executor is told about each turn once. `Iteration.started` lists the turns with their first slices in this
iteration. `Iteration.ended` lists the turns that the executor may forget. (vLLM: `scheduled_new_reqs` and
`finished_req_ids` of a `SchedulerOutput`.)

The bookkeeping relies on this contract of the executor:

* `copies` are done before any slice of the same iteration is written. `swap_ins` are done before any slice
  attends to their pages; a layer waits only for its own copy. `copies`, `swap_ins` and `swap_outs` see every
  write of earlier iterations.
* A slice may attend to positions that an earlier slice of the same iteration computes, but not to positions
  of a later slice. So an executor has two options. Either it writes, in each layer, the keys and values of
  all slices before any slice attends. Or it computes the slices in several parts, in order.
* A swap has a `copy_id` and is reported once in `Outcome.finished_copies`, in this or any later outcome.
  Until then, neither of its pages is used for anything else. Page-to-page `copies` are finished when their
  iteration is collected, and are not reported.
* Slices of `groups` belong to turns whose KV is on the host. These slices come after all others, group by
  group. For each layer, a group's pages are copied to a staging arena, its slices write and attend there, and
  the written slots are copied back. The following groups see the written slots, and so do the `swap_ins` and
  groups of later iterations. No slice reads positions that a slice of another group writes.
* An iteration without slices is collected when at least one outstanding copy has finished.
* An iteration may be launched before the previous iteration is collected. The previous iteration may then
  still be sampling the token of a slice's last position (`Slice.awaits_token`). The executor copies that
  token into the batch. If sampling fails, or if the token ends the turn, the slice's result is dropped.
* A slice with `needs_token` gives exactly one `SampledToken` or one `TurnFailure`. Other slices give a result
  only if they fail.
* A turn may be in `ended` while a slice of the turn is not collected. Results for that turn are ignored.
* A turn may start and end in one iteration, if it is a warm with nothing to compute. The executor forgets it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.core.constraint import Constraint
from pensieve.sampling import Sampling


class TurnStart(NamedTuple):
    """What an executor must know about a turn until it ends."""

    attempt_id: int
    context: array[int]  # 'I': token ids of the conversation's log and of the prompt
    sampling: Sampling
    constraint: Constraint | None = None
    continues_text: bool = False  # the prompt ends within a text


class Slice(NamedTuple):
    """Positions [start, stop) of a turn. They attend to all positions before them."""

    attempt_id: int
    start: int
    stop: int
    token_ids: array[int]  # 'I': tokens of these positions; without the last token if it is awaited
    # 'i': device page of each chunk up to `stop`; in a group, see `PageGroup`
    page_table: array[int]
    needs_token: bool = False  # the logits of position stop - 1 are sampled
    is_last: bool = False  # the sampled token ends the reply, which then has its maximal length

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def awaits_token(self) -> bool:
        """Whether the previous iteration is still sampling the token at position stop - 1."""
        return len(self.token_ids) < self.stop - self.start

    def split(self, position: int) -> tuple[Slice, Slice]:
        """Cut the slice into two: the positions before `position`, and the rest."""
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
    """Slices of streamed turns that attend together, while their pages are in a staging arena.

    The group has slices [first_slice, stop_slice) of the iteration. Their page tables contain ascending
    indexes into `host_pages`. No page is in `host_pages` twice.
    """

    first_slice: int
    stop_slice: int
    host_pages: array[int]  # 'i'
    loaded_slots: array[int]  # 'i': leading slots of each page, copied in before the slices run
    stored_slots: array[int]  # 'i': leading slots, copied back afterwards; 0: none was written


@dataclass(frozen=True, slots=True)
class Iteration:
    index: int
    slices: tuple[Slice, ...]
    copies: tuple[PageCopy, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    started: tuple[TurnStart, ...] = ()
    ended: tuple[int, ...] = ()  # attempt_ids
    predicted_seconds: float = 0.0  # predicted duration (time_budget.py); 0: unknown
    groups: tuple[PageGroup, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)


class Logprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token sampled for a turn, with the text that it releases.

    This record goes from the executor through the core and over the pipe to the turn's readers.
    """

    attempt_id: int
    token_id: int
    text: str = ""
    stopped: bool = False  # ends the reply: an end-of-turn token, stop token or stop string
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()
    repeats: bool = False  # stopped because the reply only repeats itself


CONSTRAINT_FAILED = "CONSTRAINT_FAILED"


class TurnFailure(NamedTuple):
    attempt_id: int
    reason: str  # NAN_LOGITS, CONSTRAINT_FAILED, ...
    message: str

    @property
    def spoils_kv(self) -> bool:
        """Whether the KV that the turn has computed or used may be wrong."""
        return self.reason != CONSTRAINT_FAILED


@dataclass(frozen=True, slots=True)
class Outcome:
    samples: tuple[SampledToken, ...] = ()
    finished_copies: tuple[int, ...] = ()
    failures: tuple[TurnFailure, ...] = ()
