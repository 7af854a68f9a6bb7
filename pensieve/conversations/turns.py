"""Keep the live turns: which there are, and what counts for whom. Belongs to the event loop.

`Turns` is plain and synchronous. It calls neither the store nor the engine. Invariants:

* A turn is here from the moment that the loop hears of its `running` row until its end is in the store and
  its followers can see it (turn_ends.py).
* Each attempt of a turn has a number of its own, so events of an attempt that was given up find no turn.
* A warm is not a live turn. It counts for its tenant from `begin_warm` until the engine has ended it or died.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import (
    LiveTurn,
    RecomputeReason,
    StartedTurn,
    TurnPhase,
    names_of,
    unstored_key,
)
from pensieve.core.iteration import SampledToken
from pensieve.engine.messages import TOKEN_BYTES, SubmitTurn
from pensieve.errors import Unavailable
from pensieve.guard.limits import Counts
from pensieve.text import PartMarker, Tokenizer

BACKGROUND_NUMBER_MIN = (
    1 << 40
)  # of the turns of batch jobs; those of conversations are counted from 1


DEATHS_ALONE, DEATHS_MAX = 2, 3
RECORDS_MAX = 10_000  # of turns that nobody has sent again; the oldest are forgotten


class Suspects:
    """Which turns were in the engine when it died, for one of them may be what kills it.

    Each turn that a killed process had is under suspicion, also a queued one. Clients send such turns again:

        1 death     it is tried again, beside all others
        2 deaths    it is tried again when no other such turn is in the engine
        3 deaths    it has failed, and no client sends it again by itself

    A death counts only where the turn had come no further than at an earlier one, so an innocent turn is soon
    cleared.  A turn that is sent again on purpose begins without a record.
    """

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, int]] = {}  # by turn id: deaths, tokens at most

    def engine_died(self, live: LiveTurn) -> bool:
        """Count it for a turn that the engine had; whether that was once too often."""
        num_deaths, num_tokens = self._records.pop(live.turn_id, (0, -1))
        num_deaths += not num_deaths or live.num_tokens <= num_tokens
        if num_deaths >= DEATHS_MAX:
            return True
        self._records[live.turn_id] = (num_deaths, max(num_tokens, live.num_tokens))
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return False

    def must_wait(self, live: LiveTurn, all_live: Callable[[], Iterable[LiveTurn]]) -> bool:
        """Whether the engine has another turn that may be what kills it, and this one may be too."""
        return self._is_grave(live) and any(
            self._is_grave(other) for other in all_live() if other is not live
        )

    def ended(self, live: LiveTurn) -> None:
        """The engine has ended it, and lives."""
        self._records.pop(live.turn_id, None)

    def _is_grave(self, live: LiveTurn) -> bool:
        num_deaths, num_tokens = self._records.get(live.turn_id, (0, 0))
        return num_deaths >= DEATHS_ALONE and live.num_tokens <= num_tokens


class _Warm(NamedTuple):
    tenant: str
    conversation_id: str
    counts: bool


class Turns:
    def __init__(self, tokenizer: Tokenizer, engine_since: float) -> None:
        """`engine_since`: KV of what was last changed before it is gone (wall clock)."""
        self.tokenizer = tokenizer
        self._engine_since = engine_since
        self._live: dict[int, LiveTurn] = {}  # by the number that the engine knows them by
        self._unadmitted: dict[int, LiveTurn] = {}  # those that the engine has no room for yet
        self._begun: dict[int, LiveTurn] = {}  # admitted, and without a token
        self._of_request: dict[tuple[str, str, str], LiveTurn] = {}
        self._num_of_tenant = Counts[str]()
        self._numbers = count(1)
        self._warms: dict[int, _Warm] = {}  # by number
        self._num_warms = Counts[tuple[str, str]]()
        self._num_counted = 0
        self.suspects = Suspects()

    # -- looking --

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_warms(self) -> int:
        """Those that count for a tenant."""
        return self._num_counted

    @property
    def num_own_warms(self) -> int:
        """Those that the daemon wants by itself."""
        return len(self._warms) - self._num_counted

    def num_of_tenant(self, tenant: str, conversation_id: str = "") -> int:
        """Its turns and warms, but for warms of this conversation, which its next turn takes over."""
        return self._num_of_tenant[tenant] - self._num_warms[tenant, conversation_id]

    @property
    def num_waiting(self) -> int:
        """Begun, and not admitted by the engine."""
        return len(self._unadmitted)

    @property
    def waiting_since(self) -> float | None:
        """When the one that has waited longest began."""
        return next((live.begun_at for live in self._unadmitted.values()), None)

    @property
    def num_begun(self) -> int:
        """Admitted by the engine, and without a token."""
        return len(self._begun)

    def without_token(self) -> list[LiveTurn]:
        """Those that the engine has begun, then those that wait, as they came."""
        return [*self._begun.values(), *self._unadmitted.values()]

    def all_live(self) -> list[LiveTurn]:
        return list(self._live.values())

    def of_conversation(self, conversation_id: str, tenant: str = "") -> LiveTurn | None:
        return self._first(
            lambda live: live.conversation_id == conversation_id and live.tenant == tenant
        )

    def of_request(self, request: TurnRequest) -> LiveTurn | None:
        """The turn that this request began and that still takes followers."""
        live = self._of_request.get((request.tenant, request.conversation_id, request.request_id))
        if live is None or live.request is None or live.phase is TurnPhase.GIVING_UP:
            return None
        return live if request.says_the_same_as(live.request) else None

    def of_request_id(self, tenant: str, conversation_id: str, request_id: str) -> LiveTurn | None:
        """The turn that a request began, whatever it said and however far the turn is."""
        return self._of_request.get((tenant, conversation_id, request_id))

    def of_number(self, number: int) -> LiveTurn | None:
        return self._live.get(number)

    def of_turn(self, turn_id: int) -> LiveTurn | None:
        """In its latest attempt; one that was given up may still be on its way out."""
        attempts = [live for live in self._live.values() if live.turn_id == turn_id]
        return max(attempts, key=lambda live: live.attempt, default=None)

    # -- a turn's life --

    def begin_warm(self, conversation_id: str, tenant: str, *, counts: bool = True) -> int:
        """The number of another warm; the engine never gets the same one twice.

        It counts for its tenant, unless the daemon wants it by itself.
        """
        number = next(self._numbers)
        self._warms[number] = _Warm(tenant, conversation_id, counts)
        if counts:
            self._num_counted += 1
            self._num_warms[tenant, conversation_id] += 1
            self._num_of_tenant[tenant] += 1
        return number

    def end_warm(self, number: int) -> str | None:
        """It has ended, or was never put; whose it was, if it was one."""
        if (warm := self._warms.pop(number, None)) is None:
            return None
        if warm.counts:
            self._num_counted -= 1
            self._num_warms[warm.tenant, warm.conversation_id] -= 1
            self._num_of_tenant[warm.tenant] -= 1
        return warm.tenant

    def begin(
        self, begun: StartedTurn, now: float, weight: float = 1.0
    ) -> tuple[LiveTurn, SubmitTurn]:
        """The live turn, and what submits it to the engine, with its tenant's weight."""
        turn = begun.turn
        submit = replace(
            begun.submit, turn_id=next(self._numbers), share=turn.tenant, weight=weight
        )
        live = LiveTurn(
            turn.turn_id,
            turn.conversation_id,
            submit.history_tokens,
            len(submit.tokens) // TOKEN_BYTES,
            request=begun.request,
            begun_at=now,
            tenant=turn.tenant,
            weight=weight,
            priority=submit.options.priority,
            number=submit.turn_id,
            request_id=turn.request_id,
            first_revision=begun.first_revision,
            attempt=turn.attempts,
            recompute_reason=self._recompute_reason(begun),
            marker=PartMarker(self.tokenizer, begun.prompt_end),
            shared_from=names_of(submit.prefix_of)[1],
        )
        self._of_request[live.tenant, live.conversation_id, live.request_id] = live
        self.add(live)
        return live, submit

    def new_unstored(
        self,
        turn_id: int,
        tenant: str,
        submit: SubmitTurn,
        prompt_end: array[int],
        now: float,
        weight: float = 1.0,
    ) -> tuple[LiveTurn, SubmitTurn]:
        """The same of a turn that belongs to no conversation; it is live once it is added.

        Its id is negative. `submit` has no name, but for one that it goes on from.
        """
        number = next(self._numbers)
        submit = replace(
            submit,
            turn_id=number,
            conversation_id=submit.conversation_id or unstored_key(tenant, number),
            share=tenant,
            weight=weight,
        )
        live = LiveTurn(
            turn_id,
            "",
            0,  # all of it is its prompt
            len(submit.tokens) // TOKEN_BYTES,
            begun_at=now,
            tenant=tenant,
            weight=weight,
            priority=submit.options.priority,
            number=number,
            recompute_reason=RecomputeReason.DROPPED,
            marker=PartMarker(self.tokenizer, prompt_end),
        )
        return live, submit

    def check_suspect(self, live: LiveTurn) -> None:
        """Unavailable where the turn may be what kills the engine, and the engine has another such turn."""
        if self.suspects.must_wait(live, self.all_live):
            raise Unavailable("the engine died twice with this turn; it is tried again alone")

    def admit(self, number: int, missing_tokens: int = 0) -> LiveTurn | None:
        """The engine has room for it, and has to compute so much of its context; the turn, if it is known."""
        live = self._unadmitted.pop(number, None)
        if live is not None:
            live.admitted = True
            live.cached_tokens = live.history_tokens + live.prompt_tokens - missing_tokens
            self._begun[number] = live
        return live

    def take(self, token: SampledToken) -> LiveTurn | None:
        """Append a token to its turn, unless it takes none any more; the turn, if it is known."""
        live = self._live.get(token.turn_id)
        self._begun.pop(token.turn_id, None)
        if live is not None and live.phase is TurnPhase.RUNNING and not live.stopped:
            live.take(token)
        return live

    def end_warms(self) -> None:
        """The engine is gone, and they with it."""
        for number in list(self._warms):
            self.end_warm(number)

    def engine_started(self, now: float) -> None:
        """Whatever KV there was is gone."""
        self._engine_since = now

    def add(self, live: LiveTurn) -> None:
        self._live[live.number] = self._unadmitted[live.number] = live
        self._num_of_tenant[live.tenant] += 1

    def remove(self, live: LiveTurn) -> None:
        """It has ended."""
        if self._live.pop(live.number, None) is not None:
            self._num_of_tenant[live.tenant] -= 1
        self._unadmitted.pop(live.number, None)
        self._begun.pop(live.number, None)
        key = (live.tenant, live.conversation_id, live.request_id)
        if self._of_request.get(key) is live:  # not one of a conversation that was made anew
            del self._of_request[key]

    # -- inside --

    def _recompute_reason(self, begun: StartedTurn) -> RecomputeReason:
        """Should KV be missing: the latest thing that made it go."""
        if begun.is_tokenized_again:
            return RecomputeReason.FINGERPRINT_CHANGED
        if begun.changed_at < self._engine_since:
            return RecomputeReason.ENGINE_RESTARTED
        return RecomputeReason.DROPPED

    def _first(self, matches: Callable[[LiveTurn], bool]) -> LiveTurn | None:
        return next((live for live in self._live.values() if matches(live)), None)
