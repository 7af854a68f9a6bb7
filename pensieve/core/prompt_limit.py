"""How many tokens of prompts share an iteration with turns that generate.

Whoever generates waits for the whole iteration, so a long piece of somebody's prompt is a gap in everybody
else's reply.  `PromptLimit` learns from the iterations that were committed how long one takes without
prompts, and how much a prompt token adds, and allows as many as add no more than `seconds_max`.  Where
nobody generates there is no limit: nobody waits.

Both are medians of the last few measurements, so one late iteration changes nothing; the machine, the
model, the load beside it and longer contexts change them within a few iterations.  The times are those that
`plan` and `commit` are given, so the limit is as repeatable as the rest: a journal replays to the same
pieces.  Before anything was measured there is no limit either.

An iteration that was planned while another was computed began when that one was committed.  A prompt ends
however slow the machine is: TOKENS_MIN are always allowed.  They cost little, since the time of a small
iteration is that of reading the weights.
"""

from __future__ import annotations

from collections import deque

from pensieve.core.iteration_draft import IterationDraft

TOKENS_MIN = 16
NUM_KEPT = 7  # measurements


class PromptLimit:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max  # 0: no limit
        self._without: deque[float] = deque(
            maxlen=NUM_KEPT
        )  # seconds of iterations without prompts
        self._per_token: deque[float] = deque(maxlen=NUM_KEPT)  # seconds that a prompt token added
        # Tokens of prompts, None where all turns generated; and when it was planned.
        self._uncommitted: deque[tuple[int | None, float]] = deque()
        self._committed_at = float("-inf")

    def limit(self, draft: IterationDraft) -> None:
        """Leave room for so many tokens of prompts; the draft has all its decodes and nothing else."""
        draft.num_decodes = len(draft.slices)
        each = median(self._per_token)
        if self._seconds_max and each and draft.num_decodes:
            allowed = int(min(self._seconds_max / each, draft.num_tokens_left))
            draft.leave(max(allowed // TOKENS_MIN, 1) * TOKENS_MIN)

    def planned(self, draft: IterationDraft, now: float) -> None:
        alone = draft.num_decodes and draft.num_tokens == draft.num_decodes
        num_prompt_tokens = None if alone else draft.num_tokens - draft.num_decodes
        self._uncommitted.append((num_prompt_tokens, now))

    def committed(self, now: float) -> None:
        num_prompt_tokens, planned_at = self._uncommitted.popleft()
        seconds = now - max(planned_at, self._committed_at)
        self._committed_at = now
        if num_prompt_tokens is None:
            self._without.append(seconds)
        elif num_prompt_tokens >= TOKENS_MIN:
            self._per_token.append(max(seconds - median(self._without), 0.0) / num_prompt_tokens)


def median(values: deque[float]) -> float:
    """The lower one of two; 0 where there are none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
