"""An iteration is data: what the scheduler decided, and what the executor answers.

The executor's contract, on which the bookkeeping relies:

* `copies` are done before any slice of the same iteration is written, `swap_ins` before any slice
  attends to their pages (a layer waits for that layer's copy only).  Both see every write of
  earlier iterations; so do `swap_outs`.
* A slice may attend to what a slice before it in the same iteration computes, and to nothing that a later
  one does.  So in each layer the keys and values of all slices are written before any slice attends; or
  the slices are computed in several goes, in their order.
* A copy is named by its `copy_id` and reported once in `Outcome.finished_copies`, in this or in any
  later outcome.  Until then the core moves neither of its pages.  Page-to-page `copies` are finished
  when their iteration is collected and are not reported.
* An iteration without slices is collected when at least one outstanding copy has finished.
* An iteration may be launched while the one before it is not collected.  The last position of a
  slice may then be one whose token that iteration samples; the executor puts it in its place.  If
  that row fails, or turns out to have ended its turn, what comes of the slice is thrown away.
* A slice that `needs_token` yields exactly one `Sample` or one `TurnFailure`; other slices yield
  nothing unless they fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve.core.turn import FinishReason, Turn


class Slice(NamedTuple):
    """Positions [start, stop) of a turn; they attend to everything before them."""

    turn: Turn
    start: int
    stop: int
    needs_token: bool  # the logits of position stop - 1 are sampled


class PageCopy(NamedTuple):
    """The first `num_slots` slots of one device page to another (copy on write)."""

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


@dataclass(frozen=True, slots=True)
class Iteration:
    index: int
    slices: tuple[Slice, ...]
    copies: tuple[PageCopy, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)


class Logprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The token that a turn sampled, with what the detokeniser released for it."""

    turn_id: int
    token_id: int
    finish: FinishReason | None = None  # STOP or LENGTH when this token ends the turn
    text: str = ""
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


class TurnFailure(NamedTuple):
    turn_id: int
    reason: str  # NAN_LOGITS, ...
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    samples: tuple[Sample, ...] = ()
    finished_copies: tuple[int, ...] = ()
    failures: tuple[TurnFailure, ...] = ()
