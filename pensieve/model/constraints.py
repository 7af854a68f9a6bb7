"""Keep replies within their constraints: compute which tokens may come next, while the forward runs.

    prepare     a thread compiles, before the scheduler knows the turn (engine/turns_awaiting_constraints.py)
    launch      start_masks ── a job for each constrained row ──> threads: consume new tokens, make the mask
                forward                                               │
                masks  <──────────────────────────────────────────────┘ waits for unfinished jobs
                sample: each row among the tokens that its mask allows

A *mask* has a bit for each token.  It depends only on the constraint and on the reply's tokens so far.  So
suspending, recomputing or restarting a turn does not change its reply.

**End of a reply.**  An end token (end of turn, or one of the client's stop tokens) is allowed where the
grammar accepts the reply as complete.  Where the grammar allows no further token, only end tokens are
allowed, even before `min_tokens`.  The turn then ends with STOP.  `max_tokens`, the end of the context and
the client's stop strings can still cut a reply short.

**Thinking is unconstrained.**  The prompt or the reply's first token may open the thinking.  The constraint
then applies only after the closing mark.  Before the mark, only end tokens are masked.  If the prompt has
already closed the thinking, the reply cannot open it again.  Both marks are recognised by the ids of control
tokens, as in text/parts.py.

**One token ahead.**  A row may be launched while only the device knows its previous token (`Row.is_ahead`).
The row's forward is launched first.  The row's job starts when the previous token has arrived on the host,
and makes the mask while the device computes the forward.  If the previous token ends the turn, the row gets
no mask, because its result is discarded.

**A constraint that fails** (a step takes too much work, the vocabulary lacks a token) fails only its turn.
The row is sampled without a mask, and `collect` reports CONSTRAINT_FAILED instead of the sampled token.

Only one job at a time uses a turn's `ConstrainedReply`: the launching thread waits for all masks of an
iteration before it starts more jobs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from pensieve.core.constraint import Constraint
from pensieve.core.iteration import CONSTRAINT_FAILED, TurnFailure, TurnStart
from pensieve.errors import ConfigError
from pensieve.model.sampling.masks import TokenMask
from pensieve.model.sampling.penalties import Row
from pensieve.text.grammars import GrammarError, Grammars, Matcher, Vocabulary
from pensieve.text.parts import THINKING_MARKS

THREADS = 4  # for masks
COMPILERS = 2
PROMPT_TAIL_TOKENS = 16  # a template may open the thinking in the generation prompt
FAILED = CONSTRAINT_FAILED


class ConstrainedVocabulary(Vocabulary, Protocol):
    def token_id(self, text: str) -> int | None: ...


class MaskJobs(NamedTuple):
    """Pending masks by row number, and the numbers of the rows that are ahead."""

    by_row: dict[int, Future[TokenMask | TurnFailure]]
    ahead: list[int]


NO_JOBS = MaskJobs({}, [])


class Masks(NamedTuple):
    """The rows of an iteration with their masks, and the turns whose constraints have failed."""

    rows: list[Row]
    failures: Mapping[int, TurnFailure]  # by attempt_id


class TurnConstraints:
    """Manage the constraints of an executor's turns."""

    def __init__(
        self, vocabulary: ConstrainedVocabulary, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        """`vocab_size` is the model's and may exceed the vocabulary's; `eos_token_ids` end a turn."""
        self._grammars = Grammars(vocabulary)
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._num_bytes = -(-vocab_size // 8)
        self._vocab_size = vocab_size
        self._threads: ThreadPoolExecutor | None = None  # for masks
        # Separate, so that no mask waits for a compilation.
        self._compilers: ThreadPoolExecutor | None = None
        self._compiling: dict[int, Future[Matcher]] = {}  # by attempt_id, until the turn begins
        self._constrained: dict[int, ConstrainedReply] = {}  # by attempt_id, until the turn ends

    # -- before a turn begins: implements the engine's `Preparer` --

    def prepare(
        self, attempt_id: int, constraint: Constraint, on_ready: Callable[[], None]
    ) -> bool:
        """Return whether the constraint is compiled; if not, a thread compiles it, then calls `on_ready`."""
        compiling = self._compile(constraint)
        self._compiling[attempt_id] = compiling
        if compiling.done():
            return True
        compiling.add_done_callback(lambda _: on_ready())
        return False

    def is_ready(self, attempt_id: int) -> bool:
        return self._compiling[attempt_id].done()

    def forget(self, attempt_id: int) -> None:
        """Drop the compilation for a turn that has ended; the turn may never have begun."""
        if (compiling := self._compiling.pop(attempt_id, None)) is not None:
            compiling.cancel()

    # -- turns that have begun --

    def begin(self, start: TurnStart) -> None:
        """Begin a turn; a thread compiles its constraint unless `prepare` was called."""
        if start.constraint is None:
            return
        compiling = self._compiling.pop(start.attempt_id, None) or self._compile(start.constraint)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "masks")
        ends = self._eos_token_ids | frozenset(start.sampling.stop_token_ids)
        ends = frozenset(each for each in ends if each < self._vocab_size)
        thinking = ThinkingTracker(self._vocabulary, start.context[-PROMPT_TAIL_TOKENS:])
        self._constrained[start.attempt_id] = ConstrainedReply(
            start, compiling, ends, thinking, self._num_bytes
        )

    def end(self, attempt_id: int) -> None:
        self._constrained.pop(attempt_id, None)

    def start_masks(self, rows: Sequence[Row]) -> MaskJobs:
        """Start the masks of constrained rows. Rows that are ahead are only listed, for `start_ahead`."""
        if not self._constrained:
            return NO_JOBS
        jobs = MaskJobs({}, [])
        for number, row in enumerate(rows):
            if (reply := self._constrained.get(row.log.attempt_id)) is None:
                continue
            if row.is_ahead:
                jobs.ahead.append(number)
            else:
                jobs.by_row[number] = self._submit(reply, row.log.tokens)
        return jobs

    def start_ahead(self, jobs: MaskJobs, rows: Sequence[Row], newest: Mapping[int, int]) -> None:
        """Start the masks of rows that are ahead; `newest` has each row's previous token, by attempt_id."""
        for number in jobs.ahead:
            log = rows[number].log
            reply, token_id = self._constrained[log.attempt_id], newest[log.attempt_id]
            if token_id >= 0 and token_id not in reply.ends:  # otherwise the turn ends first
                tokens = log.tokens + array("I", [token_id])
                jobs.by_row[number] = self._submit(reply, tokens)

    def masks(self, jobs: MaskJobs, rows: list[Row]) -> Masks:
        """Wait for all masks."""
        if not jobs.by_row:
            return Masks(rows, {})
        failures: dict[int, TurnFailure] = {}
        rows = list(rows)
        for number, job in jobs.by_row.items():
            found = job.result()
            if isinstance(found, TurnFailure):
                failures[found.attempt_id] = found
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
    """Track whether a reply is thinking, from the end of the prompt and the reply's tokens."""

    def __init__(self, vocabulary: ConstrainedVocabulary, prompt_end: Sequence[int]) -> None:
        opening, closing = (
            frozenset(found for each in marks if (found := vocabulary.token_id(each)) is not None)
            for marks in THINKING_MARKS
        )
        self.opening, self._closing = opening, closing
        self.is_open = was_closed = False
        for token_id in prompt_end:
            if token_id in vocabulary.eos_token_ids:  # earlier tokens belong to another message
                self.is_open = was_closed = False
            was_closed |= token_id in closing
            self._update(token_id)
        self.may_open = bool(opening) and not self.is_open and not was_closed

    def push(self, token_id: int) -> bool:
        """Add a token; return whether it belongs to the thinking."""
        was_open = self.is_open
        if was_open or self.may_open:
            self._update(token_id)
        self.may_open = False
        return was_open or self.is_open

    def _update(self, token_id: int) -> None:
        if token_id in self.opening:
            self.is_open = True
        elif token_id in self._closing:
            self.is_open = False


class ConstrainedReply:
    """Follow the reply of one turn.  Only one thread at a time may use it."""

    def __init__(
        self,
        start: TurnStart,
        compiling: Future[Matcher],
        ends: frozenset[int],
        thinking: ThinkingTracker,
        num_bytes: int,
    ) -> None:
        self.num_followed = len(start.context)  # tokens of the turn's log that count as consumed
        self.ends = ends  # tokens that end the reply
        self._attempt_id = start.attempt_id
        self._compiling = compiling
        self._matcher: Matcher | None = None
        self._thinking = thinking
        self._num_bytes = num_bytes
        self._failure: TurnFailure | None = None

    def next_mask(self, tokens: Sequence[int]) -> TokenMask | TurnFailure:
        """Consume the new `tokens` and return the mask of the token after them."""
        self.num_followed += len(tokens)
        if self._failure is None:
            try:
                return self._next_mask(tokens)
            except (GrammarError, ConfigError) as error:
                message = f"the reply cannot satisfy its constraint: {error}"
                self._failure = TurnFailure(self._attempt_id, FAILED, message)
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
        may_continue = any(packed)
        if self._matcher.is_accepting:
            _set(packed, self.ends, True)
        elif not may_continue:
            raise GrammarError("no token of the vocabulary can come next")
        if self._thinking.may_open:
            _set(packed, self._thinking.opening, True)
            may_continue = True
        return TokenMask(bytes(packed), must_end=not may_continue)


def _set(packed: bytearray, token_ids: frozenset[int], allowed: bool) -> None:
    for token_id in token_ids:
        byte, bit = token_id >> 3, 1 << (token_id & 7)
        if allowed:
            packed[byte] |= bit
        else:
            packed[byte] &= ~bit
