"""Choose the generating turns of the next iteration if a model is divided into pipeline stages.

With S stages up to S iterations are in flight, each in another stage.  The first stage needs a turn's last
token, and the last stage samples it.  So a turn whose token is not known yet (`Turn.pending_tokens`) is in no
further iteration, and generating turns are divided into *micro-batches* which take turns.  A prompt needs no
token that is sampled: its pieces follow each other through the stages without waiting.

    stage 1    A  B  A  B  …        A, B: micro-batches of two stages;
    stage 2       A  B  A  …        A's tokens are known when it begins again

A stage stands idle behind an iteration that takes longer in the next one (a *bubble*), so micro-batches
should take the same time.  What each turn adds to an iteration is predicted (cost.py).  Each micro-batch has
an S-th of what all generating turns add, to the nearest turn, and one turn at least.  Turns that have waited
longest come first.  So turns that come and go change the micro-batches one by one, and none is left out for
longer than a round.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn


class MicroBatches:
    def __init__(self, config: SchedulerConfig) -> None:
        self._stages, self._cost = config.stages, config.cost
        self._chosen: dict[int, int] = {}  # by turn_id: when it was chosen last
        self._num_chosen = 0

    def chosen(
        self,
        running: Sequence[Turn],
        with_place: Sequence[Turn],
        builder: IterationBuilder,
        background: bool,
    ) -> list[Turn]:
        """Return the turns that may be in this iteration, in their order.

        They are background turns or the others, of those `with_place` among the running turns.
        """
        turns = [turn for turn in with_place if turn.is_background == background]
        ready = [turn for turn in turns if not turn.pending_tokens]
        generating = [turn for turn in turns if turn.pending_tokens or not turn.is_prefill]
        builder.others_generate |= len(ready) < len(turns)
        self._chosen = {each.turn_id: self._chosen.get(each.turn_id, 0) for each in running}
        added = self._added_seconds(generating)
        share, taken = sum(added.values()) / self._stages, 0.0
        there: set[int] = set()
        for turn in sorted(ready, key=lambda each: self._chosen[each.turn_id]):
            if turn.turn_id not in added:
                there.add(turn.turn_id)  # a prefill
            elif not taken or taken + added[turn.turn_id] / 2 <= share:
                taken += added[turn.turn_id]
                there.add(turn.turn_id)
                self._num_chosen += 1
                self._chosen[turn.turn_id] = self._num_chosen
        return [turn for turn in ready if turn.turn_id in there]

    def _added_seconds(self, turns: Sequence[Turn]) -> dict[int, float]:
        """What each adds to an iteration; by turn_id, and more than nothing."""
        predict, most = self._cost.pass_seconds, len(turns)
        of_a_token = (predict(most, 0, 0, most) - predict(1, 0, 0, 1)) / max(most - 1, 1)
        added = {
            each.turn_id: of_a_token
            + self._cost.attention_seconds(len(each.tokens), len(each.tokens))
            for each in turns
        }
        return added if all(each > 0.0 for each in added.values()) else dict.fromkeys(added, 1.0)
