"""How many tokens of prompts share an iteration with turns that generate.

Whoever generates waits for the whole iteration, so a long piece of somebody's prompt is a gap in everybody
else's reply.  `PromptLimit` learns from the iterations that were committed how long one takes without
prompts, and how much a prompt token adds, and allows as many as add no more than `seconds_max`.  Where
nobody generates there is no limit: nobody waits.

What a token adds is the median of the last few measurements, so one late iteration changes nothing.  What an
iteration takes without prompts is that of the last one.  It is measured before any prompt joins, and where
prompts never end one iteration goes without them after PROBE_AFTER with some: when more turns generate, or
their contexts grow, what these take would else be charged to the prompts, whose pieces would become shorter
and shorter.  Where an iteration with prompts takes less, it is measured anew.

The times are those that `plan` and `commit` are given, so the limit is as repeatable as the rest: a journal
replays to the same pieces.

An iteration that was planned while another was computed began when that one was committed.  A prompt ends
however slow the machine is: TOKENS_MIN are always allowed.  They cost little, since the time of a small
iteration is that of reading the weights.
"""

from __future__ import annotations

from collections import deque

from pensieve.core.iteration_draft import IterationDraft

TOKENS_MIN = 16
NUM_KEPT = 7  # measurements of a prompt token
PROBE_AFTER = 16  # iterations with prompts, until there is one without


class PromptLimit:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max  # 0: no limit
        self._without: float | None = None  # seconds of an iteration; None: to be measured
        self._per_token: deque[float] = deque(maxlen=NUM_KEPT)  # seconds that a prompt token added
        self._num_with = 0  # iterations with prompts since the last one without
        # How many turns generate, tokens of prompts, and when it was planned.
        self._uncommitted: deque[tuple[int, int, float]] = deque()
        self._committed_at = float("-inf")

    def limit(self, draft: IterationDraft) -> None:
        """Leave room for so many tokens of prompts; the draft has all its decodes and nothing else."""
        draft.num_decodes = len(draft.slices)
        if not self._seconds_max or not draft.num_decodes:
            return
        if self._without is None or self._num_with >= PROBE_AFTER:
            draft.leave(0)
        elif each := median(self._per_token):
            allowed = int(min(self._seconds_max / each, draft.num_tokens_left))
            draft.leave(max(allowed // TOKENS_MIN, 1) * TOKENS_MIN)

    def planned(self, draft: IterationDraft, now: float) -> None:
        num_prompt_tokens = draft.num_tokens - draft.num_decodes
        self._num_with = self._num_with + 1 if num_prompt_tokens else 0
        self._uncommitted.append((draft.num_decodes, num_prompt_tokens, now))

    def committed(self, now: float) -> None:
        num_decodes, num_prompt_tokens, planned_at = self._uncommitted.popleft()
        seconds = now - max(planned_at, self._committed_at)
        self._committed_at = now
        if not num_prompt_tokens:
            if num_decodes:
                self._without = seconds
            return
        added = seconds - (self._without or 0.0)
        if num_decodes and added < 0.0:
            self._without = None
        elif num_prompt_tokens >= TOKENS_MIN and (num_decodes or not self._per_token):
            self._per_token.append(max(added, 0.0) / num_prompt_tokens)


def median(values: deque[float]) -> float:
    """The lower one of two; 0 where there are none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
