"""The registry of live turns and warms, with counts by tenant. Used only on the event loop.

`Turns` is synchronous and calls neither the store nor the engine. Invariants:

* A turn is registered when the event loop learns that the store has its `running` row. It is removed when its
  end is in the store and its followers can see the end (turn_ends.py).
* Each attempt at a turn has its own `attempt_id`, so events of an attempt that was given up find no turn.
* A warm is a request to compute KV in advance (`Warmer` in declared_prefixes.py). It is not a live turn. It
  counts for its tenant from `begin_warm` until the engine has ended it or has died.
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
    unstored_key,
)
from pensieve.core.iteration import SampledToken
from pensieve.engine.messages import TOKEN_BYTES, SubmitTurn
from pensieve.errors import Unavailable
from pensieve.guard.limits import Counts
from pensieve.text import PartMarker, Tokenizer

BACKGROUND_ATTEMPT_ID_MIN = 1 << 40  # first attempt_id of batch jobs' turns; other turns begin at 1
DEATHS_ALONE, DEATHS_MAX = 2, 3
# Records of turns that are never retried accumulate. Beyond this number, the oldest records are forgotten.
RECORDS_MAX = 10_000


class Suspects:
    """Remember which turns the engine had when it died, because one of them may have killed it.

    Every turn of the dead process is suspect, queued turns included. Clients retry such turns:

        1 death     the turn is tried again, together with other turns
        2 deaths    the turn is tried again when no other turn with 2 deaths is in the engine
        3 deaths    the turn has failed, with an error that clients do not retry automatically

    After the first death, a death counts only if the turn got no further (in tokens) than in its best earlier
    attempt. An innocent turn gets further, so its later deaths do not count. After 3 deaths the record is
    dropped, so a turn that a client sends again starts with 0 deaths.
    """

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, int]] = {}  # by turn id: deaths, most tokens reached

    def engine_died(self, live: LiveTurn) -> bool:
        """Count a death of the engine for a turn that it had. Return True if the turn has too many deaths."""
        num_deaths, num_tokens = self._records.pop(live.turn_id, (0, -1))
        num_deaths += not num_deaths or live.num_tokens <= num_tokens
        if num_deaths >= DEATHS_MAX:
            return True
        self._records[live.turn_id] = (num_deaths, max(num_tokens, live.num_tokens))
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return False

    def must_wait(self, live: LiveTurn, all_live: Callable[[], Iterable[LiveTurn]]) -> bool:
        """Whether this turn and another turn in the engine have 2 deaths and must not run together."""
        return self._must_be_alone(live) and any(
            self._must_be_alone(other) for other in all_live() if other is not live
        )

    def ended(self, live: LiveTurn) -> None:
        """Clear a turn that the engine has ended without dying."""
        self._records.pop(live.turn_id, None)

    def _must_be_alone(self, live: LiveTurn) -> bool:
        num_deaths, num_tokens = self._records.get(live.turn_id, (0, 0))
        return num_deaths >= DEATHS_ALONE and live.num_tokens <= num_tokens


class _Warm(NamedTuple):
    tenant: str
    conversation_id: str
    counts: bool


class Turns:
    def __init__(self, tokenizer: Tokenizer, engine_since: float) -> None:
        """`engine_since`: when the engine started (wall clock)."""
        self.tokenizer = tokenizer
        self._engine_since = engine_since
        self._live: dict[int, LiveTurn] = {}  # by attempt_id
        self._unadmitted: dict[int, LiveTurn] = {}  # the engine has no room for them yet
        self._awaiting_first_token: dict[int, LiveTurn] = {}  # admitted, and without a token
        self._of_request: dict[tuple[str, str, str], LiveTurn] = {}
        self._num_of_tenant = Counts[str]()
        self._attempt_ids = count(1)
        self._warms: dict[int, _Warm] = {}  # by attempt_id
        self._num_warms = Counts[tuple[str, str]]()
        self._num_counted = 0
        self.suspects = Suspects()

    # -- looking --

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_warms(self) -> int:
        """Warms that count for a tenant."""
        return self._num_counted

    @property
    def num_own_warms(self) -> int:
        """Warms that the daemon itself asked for."""
        return len(self._warms) - self._num_counted

    def num_of_tenant(self, tenant: str, conversation_id: str = "") -> int:
        """Return the number of a tenant's turns and warms.

        Warms of the conversation `conversation_id` do not count, because its next turn replaces them.
        """
        return self._num_of_tenant[tenant] - self._num_warms[tenant, conversation_id]

    @property
    def num_waiting(self) -> int:
        """Turns that the engine has not admitted yet."""
        return len(self._unadmitted)

    @property
    def waiting_since(self) -> float | None:
        """The time when the turn that has waited longest for admission began."""
        return next((live.begun_at for live in self._unadmitted.values()), None)

    @property
    def num_awaiting_first_token(self) -> int:
        """Turns that the engine has admitted and that have no token yet."""
        return len(self._awaiting_first_token)

    def without_token(self) -> list[LiveTurn]:
        """Return turns without a token: admitted turns first, then waiting ones, in order of arrival."""
        return [*self._awaiting_first_token.values(), *self._unadmitted.values()]

    def all_live(self) -> list[LiveTurn]:
        return list(self._live.values())

    def of_conversation(self, conversation_id: str, tenant: str = "") -> LiveTurn | None:
        return self._first(
            lambda live: live.conversation_id == conversation_id and live.tenant == tenant
        )

    def of_request(self, request: TurnRequest) -> LiveTurn | None:
        """Return the live turn that this request retries; None if it is being given up."""
        live = self._of_request.get((request.tenant, request.conversation_id, request.request_id))
        if live is None or live.request is None or live.phase is TurnPhase.GIVING_UP:
            return None
        return live if request.has_same_content_as(live.request) else None

    def of_request_id(self, tenant: str, conversation_id: str, request_id: str) -> LiveTurn | None:
        """Return the live turn with this request_id, whatever its content and phase."""
        return self._of_request.get((tenant, conversation_id, request_id))

    def of_attempt(self, attempt_id: int) -> LiveTurn | None:
        return self._live.get(attempt_id)

    def of_turn(self, turn_id: int) -> LiveTurn | None:
        """Return a turn's latest live attempt. An attempt that was given up may still be ending."""
        attempts = [live for live in self._live.values() if live.turn_id == turn_id]
        return max(attempts, key=lambda live: live.attempt, default=None)

    # -- a turn's life --

    def begin_warm(self, conversation_id: str, tenant: str, *, counts: bool = True) -> int:
        """Register a warm and return its attempt_id. `counts`: whether it counts for its tenant."""
        attempt_id = next(self._attempt_ids)
        self._warms[attempt_id] = _Warm(tenant, conversation_id, counts)
        if counts:
            self._num_counted += 1
            self._num_warms[tenant, conversation_id] += 1
            self._num_of_tenant[tenant] += 1
        return attempt_id

    def end_warm(self, attempt_id: int) -> str | None:
        """Remove a warm that has ended or was never sent, and return its tenant; None: no such warm."""
        if (warm := self._warms.pop(attempt_id, None)) is None:
            return None
        if warm.counts:
            self._num_counted -= 1
            self._num_warms[warm.tenant, warm.conversation_id] -= 1
            self._num_of_tenant[warm.tenant] -= 1
        return warm.tenant

    def begin(
        self, begun: StartedTurn, now: float, weight: float = 1.0
    ) -> tuple[LiveTurn, SubmitTurn]:
        """Make a begun turn live; return it with the message that submits it to the engine."""
        turn = begun.turn
        submit = replace(
            begun.submit, attempt_id=next(self._attempt_ids), share=turn.tenant, weight=weight
        )
        live = LiveTurn(
            turn.turn_id,
            turn.conversation_id,
            submit.history_tokens,
            submit.first_position + len(submit.tokens) // TOKEN_BYTES - submit.history_tokens,
            request=begun.request,
            begun_at=now,
            tenant=turn.tenant,
            weight=weight,
            priority=submit.options.priority,
            attempt_id=submit.attempt_id,
            request_id=turn.request_id,
            first_revision=begun.first_revision,
            attempt=turn.attempts,
            recompute_reason=self._recompute_reason(begun),
            marker=PartMarker(self.tokenizer, begun.prompt_end),
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
        """Make a turn that belongs to no conversation, and its SubmitTurn. Then call `add` to make it live.

        `turn_id` is negative.
        """
        attempt_id = next(self._attempt_ids)
        submit = replace(
            submit,
            attempt_id=attempt_id,
            conversation_id=unstored_key(tenant, attempt_id),
            share=tenant,
            weight=weight,
        )
        live = LiveTurn(
            turn_id,
            "",
            0,  # all tokens count as prompt
            len(submit.tokens) // TOKEN_BYTES,
            begun_at=now,
            tenant=tenant,
            weight=weight,
            priority=submit.options.priority,
            attempt_id=attempt_id,
            recompute_reason=RecomputeReason.DROPPED,
            marker=PartMarker(self.tokenizer, prompt_end),
        )
        return live, submit

    def check_suspect(self, live: LiveTurn) -> None:
        """Raise Unavailable if this turn must not run together with a turn in the engine (`Suspects`)."""
        if self.suspects.must_wait(live, self.all_live):
            raise Unavailable(
                "the engine died twice with this turn, and another such turn is running; retry later"
            )

    def admit(self, attempt_id: int, missing_tokens: int = 0) -> LiveTurn | None:
        """Record that the engine has room for a turn. Return the turn, or None if it is not live."""
        live = self._unadmitted.pop(attempt_id, None)
        if live is not None:
            live.admitted = True
            live.cached_tokens = live.history_tokens + live.prompt_tokens - missing_tokens
            self._awaiting_first_token[attempt_id] = live
        return live

    def take(self, token: SampledToken) -> LiveTurn | None:
        """Append a token to its turn, unless the turn is stopped or ending.

        Return the turn, or None if it is not live.
        """
        live = self._live.get(token.attempt_id)
        self._awaiting_first_token.pop(token.attempt_id, None)
        if live is not None and live.phase is TurnPhase.RUNNING and not live.stopped:
            live.take(token)
        return live

    def end_warms(self) -> None:
        """Remove all warms, because the engine is gone."""
        for attempt_id in list(self._warms):
            self.end_warm(attempt_id)

    def engine_started(self, now: float) -> None:
        """Note that a new engine has started, so all KV is lost."""
        self._engine_since = now

    def add(self, live: LiveTurn) -> None:
        self._live[live.attempt_id] = self._unadmitted[live.attempt_id] = live
        self._num_of_tenant[live.tenant] += 1

    def remove(self, live: LiveTurn) -> None:
        """Remove a turn that has ended."""
        if self._live.pop(live.attempt_id, None) is not None:
            self._num_of_tenant[live.tenant] -= 1
        self._unadmitted.pop(live.attempt_id, None)
        self._awaiting_first_token.pop(live.attempt_id, None)
        key = (live.tenant, live.conversation_id, live.request_id)
        if self._of_request.get(key) is live:  # a recreated conversation may have another turn here
            del self._of_request[key]

    # -- inside --

    def _recompute_reason(self, begun: StartedTurn) -> RecomputeReason:
        """Return the latest event that may have removed the turn's KV."""
        if begun.is_tokenized_again:
            return RecomputeReason.FINGERPRINT_CHANGED
        if begun.changed_at < self._engine_since:
            return RecomputeReason.ENGINE_RESTARTED
        return RecomputeReason.DROPPED

    def _first(self, matches: Callable[[LiveTurn], bool]) -> LiveTurn | None:
        return next((live for live in self._live.values() if matches(live)), None)
