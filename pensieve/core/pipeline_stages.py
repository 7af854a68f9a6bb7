"""Pipeline stages: choose the generating turns of an iteration, and estimate when stages become free.

With S stages, up to S iterations are in flight, each in a different stage. The first stage needs a turn's
last token, and the last stage samples this token. So a turn whose token is not known yet
(`Turn.pending_tokens`) cannot be in the next iteration. Generating turns are therefore divided into
*micro-batches* that alternate. A prompt needs no sampled token, so its pieces follow each other through the
stages without waiting.

    stage 1    A  B  A  B  …        A, B: micro-batches. The tokens of A are known when A begins again
    stage 2       A  B  A  …        in stage 1.

If micro-batches take different times, stages are idle in between (*bubbles*). `MicroBatches` chooses turns so
that all micro-batches take about the same time. `StageTimes` tells the time budget how long the next
iteration may take. Neither is used if the model has one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn


class MicroBatches:
    """Choose the generating turns of the next iteration.

    The time that each turn adds to an iteration is predicted (cost.py). Each micro-batch gets turns for 1/S
    of the total time of all generating turns, rounded to the nearest turn, and at least one turn. The turns
    that have waited longest go first. So micro-batches change only a little when a turn arrives or ends, and
    no turn is left out for more than one round.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._stages, self._cost = config.stages, config.cost
        # By attempt_id: the value of `_num_chosen` when the turn was last chosen.
        self._chosen: dict[int, int] = {}
        self._num_chosen = 0

    def choose(
        self,
        running: Sequence[Turn],
        with_place: Sequence[Turn],
        builder: IterationBuilder,
        background: bool,
    ) -> list[Turn]:
        """Return the turns that may be in this iteration, in their order.

        `with_place`: the turns of `running` that are not releasing their pages. Of these, `background`
        selects the background turns or the interactive turns.
        """
        turns = [turn for turn in with_place if turn.is_background == background]
        ready = [turn for turn in turns if not turn.pending_tokens]
        generating = [turn for turn in turns if turn.pending_tokens or not turn.is_prefill]
        builder.others_generate |= len(ready) < len(turns)
        self._chosen = {each.attempt_id: self._chosen.get(each.attempt_id, 0) for each in running}
        added = self._added_seconds(generating)
        share, taken = sum(added.values()) / self._stages, 0.0
        chosen_ids: set[int] = set()
        for turn in sorted(ready, key=lambda each: self._chosen[each.attempt_id]):
            if turn.attempt_id not in added:
                chosen_ids.add(turn.attempt_id)  # a prefill
            elif not taken or taken + added[turn.attempt_id] / 2 <= share:
                taken += added[turn.attempt_id]
                chosen_ids.add(turn.attempt_id)
                self._num_chosen += 1
                self._chosen[turn.attempt_id] = self._num_chosen
        return [turn for turn in ready if turn.attempt_id in chosen_ids]

    def _added_seconds(self, turns: Sequence[Turn]) -> dict[int, float]:
        """Predict the seconds that each turn adds to an iteration, by attempt_id; all are positive."""
        predict, most = self._cost.pass_seconds, len(turns)
        token_seconds = (predict(most, 0, 0, most) - predict(1, 0, 0, 1)) / max(most - 1, 1)
        added = {
            each.attempt_id: token_seconds
            + self._cost.attention_seconds(len(each.tokens), len(each.tokens))
            for each in turns
        }
        return added if all(each > 0.0 for each in added.values()) else dict.fromkeys(added, 1.0)


class StageTimes:
    """Estimate when stages become free, and how long the next iteration may take.

    An iteration that takes c seconds per stage leaves stage i at

        left[i] = max(left[i-1], free[i]) + c

    For the first stage, the time when the iteration was planned takes the place of left[i-1]. free[i] is the
    time when the previous iteration has left stage i.

    `committed` infers c from the time of the commit: the largest c such that the iteration would have left
    the last stage by then. So a bubble is not mistaken for slow compute. `longest` returns the largest c such
    that this iteration meets the objective. The micro-batches now in flight run again after this iteration.
    Assuming that each of these iterations takes c too, they must also meet the objective. Otherwise one
    micro-batch would use up the whole objective.

    The j-th iteration after this one leaves the last stage at most (S - i + j) · c after this iteration
    enters stage i. So both functions compute the minimum of a few quotients. All stages are assumed equally
    fast; c is the slowest stage's time.
    """

    def __init__(self, num_stages: int) -> None:
        self._free = [
            float("-inf")
        ] * num_stages  # when each stage is free after the committed iterations
        # (time of the plan, seconds in each stage)
        self._uncommitted: deque[tuple[float, float]] = deque()

    def planned(self, now: float, seconds: float) -> None:
        """Note the launch of an iteration that is predicted to take `seconds` in each stage."""
        self._uncommitted.append((now, seconds))

    def committed(self, now: float) -> float:
        """Note that the oldest iteration has left the last stage; return its seconds per stage."""
        at, _ = self._uncommitted.popleft()
        num_stages = len(self._free)
        bounds = [(at, num_stages)]  # (time, number of stages that are passed from this time on)
        bounds += [(free, num_stages - index) for index, free in enumerate(self._free)]
        seconds = max(min((now - begin) / number for begin, number in bounds), 0.0)
        self._free = self._leave_times(self._free, at, seconds)
        self._free[-1] = now
        return seconds

    def longest(self, now: float, since: float, limit: float) -> float:
        """Return the seconds that an iteration planned now may take in each stage.

        No turn may wait longer than `limit` from one token to the next. `since`: when the turns of this
        iteration got their latest tokens.
        """
        free, num_stages = self._free, len(self._free)
        leaves = [min(since, now)]  # for each iteration: when its turns had their last tokens
        for at, seconds in self._uncommitted:
            free = self._leave_times(free, at, seconds)
            leaves.append(max(free[-1], now))
        begins = [now, *islice(leaves, 1, None)]
        most = float("inf")
        for behind, last in enumerate(leaves):
            until = last + limit
            bounds = [(at, num_stages - index + behind) for index, at in enumerate(free)]
            bounds += [
                (at, num_stages + behind - number) for number, at in enumerate(begins[: behind + 1])
            ]
            most = min(most, *((until - begin) / number for begin, number in bounds))
        return max(most, 0.0)

    @staticmethod
    def _leave_times(free: list[float], at: float, seconds: float) -> list[float]:
        """Return when an iteration that is planned at `at` leaves each stage."""
        leave_times = []
        for each in free:
            at = max(at, each) + seconds
            leave_times.append(at)
        return leave_times
