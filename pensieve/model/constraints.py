"""Holds replies to their constraints: which tokens the next one of a turn may be, found beside the forward.

    prepare     a thread compiles, before the scheduler knows the turn (engine/held_turns.py)
    launch      start_masks ── a job for each constrained row ──> threads: consume what is new, make the mask
                forward                                               │
                masks  <──────────────────────────────────────────────┘ waits for what is not ready
                sample: each row among what its mask allows

A *mask* has a bit for each token.  It is a function of the constraint and of the reply's tokens so far, so a
reply is the same however its turn was suspended, recomputed or begun again.

**Where a reply may end.**  A token that ends it (end of turn, or one of the client's stop tokens) is allowed
where the grammar accepts, and is all that is left where the grammar takes nothing more; so the turn ends with
STOP.  `min_tokens` gives way there.  What cuts a reply all the same is `max_tokens`, the context's end and
the client's own stop strings.

**Thinking is free.**  If the prompt has opened the thinking, or the reply's first token opens it, the
constraint holds from the token behind its closing mark on.  Until then only the tokens that end a reply are
masked.  A prompt that has closed the thinking leaves nothing to open.  As in text/parts.py, the ids of
control tokens decide.

**One token ahead.**  A row may be launched while the token before it is known to the device only
(`Row.is_ahead`).  Its job is made after the forward was launched, when the iteration before has arrived on
the host: the device then computes this forward, so the mask is still made beside it.  A token that turns out
to have ended its turn is not consumed, and the row has no mask: its result is thrown away.

**A constraint that fails** (a step exceeds its fuel, the vocabulary lacks a token) fails its turn and
no other: the row is sampled without a mask, and `collect` reports CONSTRAINT_FAILED instead of its token.

The threads touch only what belongs to a turn's `ConstrainedReply`, one job at a time: whoever launches waits
for all masks of an iteration before it starts others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from pensieve.core.constraint import Constraint
from pensieve.core.iteration import TurnFailure, TurnStart
from pensieve.errors import ConfigError
from pensieve.model.sampling.masks import TokenMask
from pensieve.model.sampling.penalties import Row
from pensieve.text.grammars import GrammarError, Grammars, Matcher, Vocabulary
from pensieve.text.parts import THINKING_MARKS

THREADS = 4  # that make masks
COMPILERS = 2
PROMPT_TAIL_TOKENS = 16  # a template may open the thinking in the generation prompt
FAILED = "CONSTRAINT_FAILED"


class ConstrainedVocabulary(Vocabulary, Protocol):
    def token_id(self, text: str) -> int | None: ...


class MaskJobs(NamedTuple):
    """Masks of an iteration's rows that are under way, by the row's place; and the rows that are ahead."""

    by_row: dict[int, Future[TokenMask | TurnFailure]]
    ahead: list[int]


NO_JOBS = MaskJobs({}, [])


class Masks(NamedTuple):
    """The rows of an iteration with their masks, and the turns whose constraints have failed."""

    rows: list[Row]
    failures: Mapping[int, TurnFailure]  # by turn_id


class TurnConstraints:
    """Those of an executor's turns."""

    def __init__(
        self, vocabulary: ConstrainedVocabulary, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        """`vocab_size` is the model's, which may pad the vocabulary's; `eos_token_ids` end a turn."""
        self._grammars = Grammars(vocabulary)
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._num_bytes = -(-vocab_size // 8)
        self._vocab_size = vocab_size
        self._threads: ThreadPoolExecutor | None = None  # of masks, from the first constraint on
        self._compilers: ThreadPoolExecutor | None = None  # likewise; masks do not wait for them
        self._compiling: dict[int, Future[Matcher]] = {}  # by turn_id, until the turn begins
        self._constrained: dict[int, ConstrainedReply] = {}  # by turn_id, until the turn ends

    # -- before a turn begins: what the engine's `Preparer` is --

    def prepare(self, turn_id: int, constraint: Constraint, on_ready: Callable[[], None]) -> bool:
        """Whether it is compiled; else `on_ready` is called from a thread once it is, or has failed."""
        compiling = self._compile(constraint)
        self._compiling[turn_id] = compiling
        if compiling.done():
            return True
        compiling.add_done_callback(lambda _: on_ready())
        return False

    def is_ready(self, turn_id: int) -> bool:
        return self._compiling[turn_id].done()

    def forget(self, turn_id: int) -> None:
        """The turn has ended, and may never have begun."""
        if (compiling := self._compiling.pop(turn_id, None)) is not None:
            compiling.cancel()

    # -- turns that have begun --

    def begin(self, start: TurnStart) -> None:
        """A turn begins; if it has a constraint that nobody has prepared, a thread compiles it."""
        if start.constraint is None:
            return
        compiling = self._compiling.pop(start.turn_id, None) or self._compile(start.constraint)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "masks")
        ends = self._eos_token_ids | frozenset(start.sampling.stop_token_ids)
        ends = frozenset(each for each in ends if each < self._vocab_size)
        thinking = ThinkingTracker(self._vocabulary, start.context[-PROMPT_TAIL_TOKENS:])
        self._constrained[start.turn_id] = ConstrainedReply(
            start, compiling, ends, thinking, self._num_bytes
        )

    def end(self, turn_id: int) -> None:
        self._constrained.pop(turn_id, None)

    def start_masks(self, rows: Sequence[Row]) -> MaskJobs:
        """Begin with the masks of the rows whose logs are complete."""
        if not self._constrained:
            return NO_JOBS
        jobs = MaskJobs({}, [])
        for number, row in enumerate(rows):
            if (reply := self._constrained.get(row.log.turn_id)) is None:
                continue
            if row.is_ahead:
                jobs.ahead.append(number)
            else:
                jobs.by_row[number] = self._submit(reply, row.log.tokens)
        return jobs

    def start_ahead(self, jobs: MaskJobs, rows: Sequence[Row], newest: Mapping[int, int]) -> None:
        """Begin with the others; `newest` has the tokens that their logs lack, by turn_id."""
        for number in jobs.ahead:
            log = rows[number].log
            reply, token_id = self._constrained[log.turn_id], newest[log.turn_id]
            if token_id >= 0 and token_id not in reply.ends:  # else its turn ends before this row
                tokens = log.tokens + array("I", [token_id])
                jobs.by_row[number] = self._submit(reply, tokens)

    def masks(self, jobs: MaskJobs, rows: list[Row]) -> Masks:
        """Wait for all of them."""
        if not jobs.by_row:
            return Masks(rows, {})
        failures: dict[int, TurnFailure] = {}
        rows = list(rows)
        for number, job in jobs.by_row.items():
            found = job.result()
            if isinstance(found, TurnFailure):
                failures[found.turn_id] = found
            else:
                rows[number] = rows[number]._replace(mask=found)
        return Masks(rows, failures)

    def close(self) -> None:
        for threads in (self._threads, self._compilers):
            if threads is not None:
                threads.shutdown(cancel_futures=True)
        self._threads = self._compilers = None

    def _submit(
        self, reply: ConstrainedReply, tokens: array[int]
    ) -> Future[TokenMask | TurnFailure]:
        assert self._threads is not None
        return self._threads.submit(reply.next_mask, tokens[reply.num_followed :])

    def _compile(self, constraint: Constraint) -> Future[Matcher]:
        kind, text = constraint.kind.value, constraint.text
        if (known := self._grammars.known(kind, text)) is not None:
            found: Future[Matcher] = Future()
            found.set_result(known)
            return found
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(COMPILERS, "constraints")
        return self._compilers.submit(self._grammars.matcher, kind, text)


class ThinkingTracker:
    """Whether a reply is in its thinking, by the tokens of the prompt's end and its own."""

    def __init__(self, vocabulary: ConstrainedVocabulary, prompt_end: Sequence[int]) -> None:
        opening, closing = (
            frozenset(found for each in marks if (found := vocabulary.token_id(each)) is not None)
            for marks in THINKING_MARKS
        )
        self.opening, self._closing = opening, closing
        self.is_open = was_closed = False
        for token_id in prompt_end:
            if token_id in vocabulary.eos_token_ids:  # what is before belongs to another message
                self.is_open = was_closed = False
            was_closed |= token_id in closing
            self._go_on(token_id)
        self.may_open = bool(opening) and not self.is_open and not was_closed

    def push(self, token_id: int) -> bool:
        """Whether the token belongs to the thinking."""
        was_open = self.is_open
        if was_open or self.may_open:
            self._go_on(token_id)
        self.may_open = False
        return was_open or self.is_open

    def _go_on(self, token_id: int) -> None:
        if token_id in self.opening:
            self.is_open = True
        elif token_id in self._closing:
            self.is_open = False


class ConstrainedReply:
    """Follows the reply of one turn; used by one thread at a time."""

    def __init__(
        self,
        start: TurnStart,
        compiling: Future[Matcher],
        ends: frozenset[int],
        thinking: ThinkingTracker,
        num_bytes: int,
    ) -> None:
        self.num_followed = len(start.context)  # tokens of the turn's log
        self.ends = ends  # tokens that end the reply
        self._turn_id = start.turn_id
        self._compiling = compiling
        self._matcher: Matcher | None = None
        self._thinking = thinking
        self._num_bytes = num_bytes
        self._failure: TurnFailure | None = None

    def next_mask(self, tokens: Sequence[int]) -> TokenMask | TurnFailure:
        """Of the token behind these, which are new."""
        self.num_followed += len(tokens)
        if self._failure is None:
            try:
                return self._next_mask(tokens)
            except (GrammarError, ConfigError) as error:
                message = f"the reply's constraint cannot be held to: {error}"
                self._failure = TurnFailure(self._turn_id, FAILED, message)
        return self._failure

    def _next_mask(self, tokens: Sequence[int]) -> TokenMask:
        if self._matcher is None:
            self._matcher = self._compiling.result()
        for token_id in tokens:
            if not self._thinking.push(token_id):
                self._matcher.consume(token_id)
        if self._thinking.is_open:
            packed = bytearray(b"\xff" * self._num_bytes)
            _set(packed, self.ends, False)
            return TokenMask(bytes(packed))
        packed = self._matcher.mask()
        packed += bytes(self._num_bytes - len(packed))
        _set(packed, self.ends, False)
        takes_more = any(packed)
        if self._matcher.is_accepting:
            _set(packed, self.ends, True)
        elif not takes_more:
            raise GrammarError("no token of the vocabulary goes on")
        if self._thinking.may_open:
            _set(packed, self._thinking.opening, True)
            takes_more = True
        return TokenMask(bytes(packed), must_end=not takes_more)


def _set(packed: bytearray, token_ids: frozenset[int], allowed: bool) -> None:
    for token_id in token_ids:
        byte, bit = token_id >> 3, 1 << (token_id & 7)
        if allowed:
            packed[byte] |= bit
        else:
            packed[byte] &= ~bit
