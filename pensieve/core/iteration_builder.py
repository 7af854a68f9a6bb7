"""Build an iteration: its slices so far, and the room for more tokens.

A turn's missing positions are computed from the lowest upward, across the holes of its context. So when a
slice is launched, every position before its end has KV on the device, or gets it in the same iteration from a
swap-in or a slice. Planning a slice raises `chunk.filled` at once. So if several turns share a missing chunk,
the first planned turn computes the chunk and the others use it.

If time is limited (time_budget.py), a turn gets as many tokens as are predicted to fit into the remaining
time, given the length of its context, but at least TOKENS_MIN. Another prompt may join while there is time
for TOKENS_MIN tokens without a context. The first prompt may always join. If the tiles of the matrix kernels
are known (cost.py), a piece is shortened so that the iteration has whole tiles. If a turn goes before an
older prefill, HELD_BACK of the room for prompts, and at least TOKENS_MIN tokens, are left for the older
prefill (fair_queue.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from pensieve.core.cost import Work
from pensieve.core.iteration import (
    Iteration,
    PageCopy,
    PageGroup,
    Slice,
    SwapIn,
    SwapOut,
    TurnStart,
)
from pensieve.core.prefix_tree import Chunk
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import PageReservation
from pensieve.core.turn import Turn

TOKENS_MIN = 16  # minimum number of tokens of a prompt, even if time is short: one tile
HELD_BACK = 0.25  # fraction of the room for prompts that is left to the oldest prefill
TILE_EVERY = 4  # if only one tile fits, the oldest prefill gets it once in TILE_EVERY iterations

_new_tuple = tuple.__new__


class IterationBuilder:
    def __init__(self, config: SchedulerConfig, chunk_tokens: int, holds_back: bool = True) -> None:
        self.num_tokens_max = config.batch_tokens_max
        self.num_tokens_left = config.batch_tokens_max
        self.planned_at = 0.0
        self.num_decodes = 0  # decodes of interactive turns
        self.others_generate = False  # uncommitted iterations have decodes; see pipeline_stages.py
        self.predicted_without = 0.0  # predicted seconds of the decodes alone; see time_budget.py
        # Tokens of interactive turns, which are planned first. None: no background turn is planned yet.
        self.num_interactive: int | None = None
        self.holds_back = holds_back  # whether to hold tokens back even if only one tile fits
        self.seconds_max: float | None = None  # predicted seconds that prompts may add; None: any
        self.seconds_added = 0.0  # predicted seconds added by prompts
        self.predicted_seconds = 0.0  # prediction for the whole iteration; 0: unknown
        self._cost, self._copy_seconds = config.cost, config.copy_seconds
        self._pairs = self._keys = self._num_decode_slices = 0  # of all slices; see `Work`
        self.streamed: dict[int, Turn] = {}  # streamed turns with a slice, by attempt_id
        self.num_staged = 0  # pages of the streamed turns
        self.slices: list[Slice] = []
        self.groups: tuple[PageGroup, ...] = ()  # groups of the streamed turns' slices
        self.copies: list[PageCopy] = []
        self.swap_ins: list[SwapIn] = []
        self.sources: list[Chunk] = []  # the source chunks of `copies`
        self.turns: list[Turn] = []  # turns with a slice, each once
        self.filled_before: dict[
            Chunk, int
        ] = {}  # for each chunk that the iteration writes: `filled` before it
        # Chunks that the iteration completes and that have no identity yet, with their generations.
        self.completed: list[tuple[Turn, Chunk, int]] = []
        self.num_recomputed = 0  # positions that had KV before
        self.num_ranges_max = 0  # maximum number of separate slices of one turn
        self.required_pages = 0  # pages that should become available
        self._size = chunk_tokens

    @property
    def is_empty(self) -> bool:
        return not (self.slices or self.copies or self.swap_ins)

    def require_pages(self, num_pages: int) -> None:
        """Note that `num_pages` should become available for a turn that lacks pages."""
        self.required_pages = max(self.required_pages, num_pages)

    def admit(self, admission: PageReservation) -> None:
        """Take the copies and swap-ins of an admitted turn."""
        self.copies += admission.copies
        self.swap_ins += admission.swap_ins
        self.sources += admission.sources

    def decode(self, turn: Turn, num_tokens: int) -> None:
        """Add a slice of the last of the turn's `num_tokens` positions; all others have KV."""
        chunks = turn.chunks
        last = chunks[-1]
        if turn.streamed:
            self.filled_before[last] = last.filled
            last.host_filled += 1
            self.streamed[turn.attempt_id] = turn
            self.num_staged += len(chunks)
        elif last.filled == self._size - 1:  # a full chunk may be copied out
            self.filled_before[last] = last.filled
        last.filled += 1
        if last.filled == self._size:
            self._complete(turn, last)
        turn.frontier = num_tokens
        turn.num_uncommitted += 1
        turn.pending_tokens += 1
        self.turns.append(turn)
        self._pairs += num_tokens
        self._keys += num_tokens
        self._num_decode_slices += 1
        start, is_last = num_tokens - 1, num_tokens + 1 >= turn.length_max  # `Turn.ends_at`
        token_ids, pages = turn.tokens[start:num_tokens], turn.page_table[: len(chunks)]
        # Faster than `Slice(...)`. Every generating turn needs a slice.
        self.slices.append(
            _new_tuple(Slice, (turn.attempt_id, start, num_tokens, token_ids, pages, True, is_last))
        )
        self.num_tokens_left -= 1

    def _complete(self, turn: Turn, chunk: Chunk) -> None:
        if turn.identities is not None and chunk.identity is None:
            self.completed.append((turn, chunk, chunk.generation))

    def iteration(
        self,
        index: int,
        swap_outs: Iterable[SwapOut],
        started: Iterable[TurnStart],
        ended: Iterable[int],
    ) -> Iteration:
        """Return the finished iteration."""
        return Iteration(
            index,
            tuple(self.slices),
            tuple(self.copies),
            tuple(self.swap_ins),
            tuple(swap_outs),
            tuple(started),
            tuple(ended),
            self.predicted_seconds,
            self.groups,
        )

    def predicted(self) -> float:
        """Predict the seconds of the iteration so far."""
        seconds = self._cost.pass_seconds(*self.work)
        return max(seconds, self._copy_seconds * self.num_staged) if self.streamed else seconds

    @property
    def work(self) -> Work:
        return Work(self.num_tokens, self._pairs, self._keys, self._num_decode_slices)

    def has_room(self, held_for: Turn | None = None) -> bool:
        """Whether tokens of another prompt fit, after what is held back for an older prefill."""
        left = self.num_tokens_left
        if held_for is not None:
            if self._tokens_allowed(0, held_for) >= TOKENS_MIN:
                return True
            if self.holds_back or not self._is_narrow:
                return False
        if left and self.num_tokens > self.num_decodes:
            return self._tokens_allowed(0) >= min(TOKENS_MIN, left)
        return left > 0

    @property
    def _is_narrow(self) -> bool:
        """Whether two tiles would not fit, even without a context before them."""
        two = min(2 * TOKENS_MIN, self.num_tokens_max - self.num_decodes)
        if self.seconds_max is not None:
            two = self._cost.tokens_within(self.seconds_max, 0, two, TOKENS_MIN)
        return two < 2 * TOKENS_MIN

    def _tokens_allowed(self, start: int, held_for: Turn | None = None) -> int:
        """Return how many tokens of a prompt the time allows after a context of `start` tokens."""
        num_held, seconds_held = self._held_back(held_for) if held_for is not None else (0, 0.0)
        left = max(self.num_tokens_left - num_held, 0)
        if self.seconds_max is None:
            return left
        seconds = self.seconds_max - self.seconds_added - seconds_held
        return self._cost.tokens_within(seconds, start, left, TOKENS_MIN)

    def _in_whole_tiles(self, num_tokens: int, num_missing: int) -> int:
        """Shorten a piece of a prompt so that the iteration has whole tiles, if that pays.

        It pays if the iteration then computes more tokens per second. The last piece of a prompt is not cut.
        """
        total = self.num_tokens + num_tokens
        excess = total % self._cost.tile_tokens
        if not excess or num_tokens >= num_missing or num_tokens - excess < TOKENS_MIN:
            return num_tokens
        cut, whole = (
            self._cost.pass_seconds(each, self._pairs, self._keys) / each
            for each in (total, total - excess)
        )
        return num_tokens - excess if whole < cut else num_tokens

    def _held_back(self, turn: Turn) -> tuple[int, float]:
        """Return the tokens and seconds of this iteration that are held back for a turn."""
        start, end = turn.frontier, len(turn.tokens) + turn.pending_tokens
        num_tokens = int(HELD_BACK * (self.num_tokens_max - self.num_decodes))
        num_tokens = min(max(num_tokens, TOKENS_MIN), end - start)
        tile, whole = (
            self._cost.piece_seconds(start, start + each) for each in (TOKENS_MIN, num_tokens)
        )
        return num_tokens, min(max(HELD_BACK * (self.seconds_max or 0.0), tile), whole)

    @property
    def num_background(self) -> int:
        """Tokens of background turns; see background_room.py."""
        return 0 if self.num_interactive is None else self.num_tokens - self.num_interactive

    @property
    def only_decodes(self) -> bool:
        """Whether the iteration has decodes of interactive turns and nothing else."""
        return 0 < self.num_decodes == self.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of interactive turns."""
        return self.num_tokens - self.num_background - self.num_decodes

    def limit(self, num_tokens: int) -> None:
        """Allow at most `num_tokens` more tokens."""
        excess = max(self.num_tokens_left - num_tokens, 0)
        self.num_tokens_max -= excess
        self.num_tokens_left -= excess

    def fill(self, turn: Turn, held_for: Turn | None = None) -> int:
        """Add slices of the turn's missing positions, lowest first, up to the budget.

        Return the number of added tokens.
        """
        size, end = self._size, len(turn.tokens) + turn.pending_tokens
        position, num_ranges = turn.frontier, 0
        most = min(self.num_tokens_left, max(self._tokens_allowed(position, held_for), TOKENS_MIN))
        allowed = left = self._in_whole_tiles(most, turn.num_missing)
        start = None  # start of the current run of missing positions
        while position < end and left:
            chunk = turn.chunks[position // size]
            base = chunk.index * size
            limit = min(size, end - base)
            missing = base + chunk.filled
            if chunk.filled >= limit:
                if start is not None:
                    self.slices.append(self._slice(turn, start, position))
                    start = None
                position = base + limit
                continue
            if start is not None and missing > position:
                self.slices.append(self._slice(turn, start, position))
                start = None
            position = max(position, missing)
            if start is None:
                start = position
                num_ranges += 1
            taken = min(base + limit - position, left)
            self.filled_before.setdefault(chunk, chunk.filled)
            turn.discard_if_failed[chunk] = None
            chunk.filled += taken
            if chunk.filled == size:
                self._complete(turn, chunk)
            if turn.streamed:
                chunk.host_filled = chunk.filled
            if position < turn.computed_to:
                self.num_recomputed += min(position + taken, turn.computed_to) - position
            position += taken
            left -= taken
        if start is not None:
            needs_token = position == end and not turn.warm
            self.slices.append(self._slice(turn, start, position, needs_token))
            turn.pending_tokens += needs_token
        num_tokens = allowed - left
        self.num_tokens_left -= num_tokens
        if num_tokens:
            if turn.streamed:
                self.streamed[turn.attempt_id] = turn
                self.num_staged += -(-position // size)
            turn.num_uncommitted += 1
            self.turns.append(turn)
        turn.frontier = position
        self.num_ranges_max = max(self.num_ranges_max, num_ranges)
        return num_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_tokens_max - self.num_tokens_left

    def _slice(self, turn: Turn, start: int, stop: int, needs_token: bool = False) -> Slice:
        work = self.work.plus_slice(start, stop)
        _, self._pairs, self._keys, self._num_decode_slices = work
        self.seconds_added += self._cost.piece_seconds(start, stop)
        return Slice(
            turn.attempt_id,
            start,
            stop,
            turn.tokens[start:stop],
            turn.page_table[: -(-stop // self._size)],
            needs_token,
            needs_token and turn.ends_at(stop + 1),
        )
