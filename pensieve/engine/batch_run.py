"""Run a batch of requests as turns of an engine: make its messages, and collect results from its events.

Each request is a turn in a conversation that only the engine knows. The conversation is deleted when the
request has its result. group_feed.py decides which request is submitted next.

**How a prefix is shared.** Chunks are found by their content (core/content.py). The first request of a group,
its opener, is submitted alone. When its first token arrives, the prompt has been computed, and the other
requests find the prefix. The opener's conversation *keeps* the prefix: it is deleted with the group. If a
part of the prefix was evicted, a request computes this part again, and its conversation keeps the prefix from
then on. So no special case is needed after an eviction, a pause or the loss of an engine.

    go ──> messages for the engine          call it at the start, and after each `take` or `resume`
    take(event) ──> Finished or None        call it with events of the batch's turns (`owns`)

Each request has one result. If its turn was cancelled, or ended because the engine failed or its queue was
full, the request is submitted again. It is then computed from the start. The seed is the same, so the reply
is the same.

At most WAITING_MAX submitted turns wait for their admission. So a batch does not fill the engine's queue,
however many requests fit into memory. After QUEUE_FULL, nothing is submitted until a turn of the batch has an
event. If the batch has no turn left, submitting continues.

For comparison, there are two other modes of sharing. `off` runs each request by itself, in the order of the
file. `lru` also runs the requests in the order of the file. Each request finds the cached chunks of
earlier requests. The conversations stay in the cache until they are evicted. (This is how engines with prefix
caching run a batch. It is not the eviction policy `lru`, and works with every policy.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pensieve.core.group_feed import DropPrefix, FeedConfig, GroupFeed, Submit
from pensieve.core.identities import salted
from pensieve.core.iteration import SampledToken
from pensieve.core.prefix_groups import PrefixGroup, prefix_groups
from pensieve.core.turn import HAS_REPLY, FinishReason, TurnOptions, Usage
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    EngineEvent,
    EngineMessage,
    RewindConversation,
    SubmitTurn,
    TurnAdmitted,
    TurnEnded,
)

PrefixSharing = Literal["groups", "lru", "off"]
_TurnEvent = SampledToken | TurnAdmitted | TurnEnded
WAITING_MAX = 128  # about as many short prompts as an iteration admits
RETRIED_FAILURES = ("QUEUE_FULL", "ENGINE_FAILED")  # failures that are not the request's fault


@dataclass(frozen=True, slots=True)
class BatchRequest:
    tokens: array[int]  # 'I': its whole prompt
    options: TurnOptions = field(default_factory=TurnOptions)
    cache_salt: str = ""  # only requests with the same salt share a prefix


class Finished(NamedTuple):
    """The result of a request."""

    request: int
    samples: tuple[SampledToken, ...]
    finish: FinishReason
    failure: str | None  # the reason, if finish is FAILED
    usage: Usage

    @property
    def token_ids(self) -> list[int]:
        return [each.token_id for each in self.samples]

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.samples)


@dataclass(slots=True)
class _Active:
    request: int
    group: int
    shared_tokens: int  # tokens of its prompt in whole chunks of the prefix
    missing_tokens: int | None = None  # at its admission; None: it waits
    samples: list[SampledToken] = field(default_factory=list)

    def computed_part_of_prefix(self, num_tokens: int) -> bool:
        """Whether it has computed a part of its prefix. `num_tokens`: the length of its prompt."""
        return self.missing_tokens is None or self.missing_tokens > num_tokens - self.shared_tokens


class BatchRun:
    def __init__(
        self,
        name: str,
        requests: Sequence[BatchRequest],
        feed: FeedConfig,
        next_attempt_id: Callable[[], int],
        share: str = "",
        weight: float = 1.0,
        sharing: PrefixSharing = "groups",
        *,
        root: str,
        reorders: bool = True,
    ) -> None:
        """`next_attempt_id` returns a new id; `share`, `weight` and `root` are as in `SubmitTurn`.

        `reorders=False` runs the groups in the order of the file, for comparison.
        """
        self._name, self._requests, self._next_attempt_id = name, requests, next_attempt_id
        self._share, self._weight, self._size = share, weight, feed.chunk_tokens
        self._root = root if sharing != "off" else ""
        self._keeps_all = sharing == "lru"
        groups = [PrefixGroup(0, (request,)) for request in range(len(requests))]
        if sharing == "groups":
            groups = _groups(requests, reorders)
        num_tokens = [len(each.tokens) for each in requests]
        max_tokens = [each.options.sampling.max_tokens for each in requests]
        self._feed = GroupFeed(groups, num_tokens, max_tokens, feed)
        self._active: dict[int, _Active] = {}  # by attempt_id
        self._messages: list[EngineMessage] = []  # follow from events; returned by the next `go`
        self._kept: dict[str, None] = {}  # conversations that outlive their turn
        # By group: the request whose conversation keeps the prefix.
        self._keepers: dict[int, int] = {}
        self._is_paused = self._holds_back = False
        self._num_waiting = 0  # active requests whose turns are not admitted
        self.saved_tokens = 0  # cached tokens of prompts
        self.prompt_tokens = 0  # of requests that have their result
        self.output_tokens = 0

    # -- to the engine --

    def go(self, submits: bool = True) -> list[EngineMessage]:
        """Return the messages to send now, in order. `submits=False`: no new turns."""
        messages, self._messages = self._messages, []
        while (
            (submits or not self.num_left)
            and self._may_go()
            and (action := self._feed.next()) is not None
        ):
            if isinstance(action, DropPrefix):
                keeper = self._keepers.pop(action.group, None)
                if keeper is not None:
                    messages += self._delete(self._conversation_id(keeper))
            else:
                messages.append(self._submit(action))
        if self._feed.is_done:
            for kept in list(self._kept):
                messages += self._delete(kept)
        return messages

    def pause(self) -> list[EngineMessage]:
        """Cancel all turns and submit none until `resume`. Their requests are then computed again."""
        self._is_paused = True
        return [CancelTurn(attempt_id, 0) for attempt_id in self._active]

    def resume(self) -> None:
        self._is_paused = False

    def stop(self) -> list[EngineMessage]:
        """Cancel all turns and delete everything in the engine."""
        messages, self._messages = [*self._messages, *self.pause()], []
        for kept in list(self._kept):
            messages += self._delete(kept)
        return messages

    def engine_lost(self) -> None:
        """Take back all running requests, because the engine is gone. The next `go` is for a new engine."""
        self._messages.clear()
        self._kept.clear()
        self._keepers.clear()
        for active in self._active.values():
            self._feed.take_back(active.request)
        self._active.clear()
        self._num_waiting = 0
        self._holds_back = False

    # -- from the engine --

    def take(self, event: EngineEvent) -> Finished | None:
        """Handle an event. Return the request's result if the event ended it. Ignores other turns' events."""
        active = self._active.get(event.attempt_id) if isinstance(event, _TurnEvent) else None
        if active is None:
            return None
        if isinstance(event, TurnEnded):
            return self._end(active, event)
        self._holds_back = False
        if isinstance(event, TurnAdmitted):
            self._num_waiting -= active.missing_tokens is None
            active.missing_tokens = event.missing_tokens
        elif isinstance(event, SampledToken):
            active.samples.append(event)
            if len(active.samples) == 1:
                self._prompt_computed(active)
        return None

    def owns(self, attempt_id: int) -> bool:
        return attempt_id in self._active

    def request_of(self, attempt_id: int) -> int | None:
        """Return the request of a turn that has not ended."""
        active = self._active.get(attempt_id)
        return active.request if active is not None else None

    @property
    def is_done(self) -> bool:
        """Whether each request has its result, and the engine was told to delete all conversations."""
        return self._feed.is_done and not self._messages and not self._kept

    @property
    def num_active(self) -> int:
        return self._feed.num_active

    @property
    def num_left(self) -> int:
        """Requests without a result."""
        return self._feed.num_left

    def check(self) -> None:
        self._feed.check()
        assert len(self._active) == self._feed.num_active, "turns and active requests do not match"
        waiting = sum(each.missing_tokens is None for each in self._active.values())
        assert waiting == self._num_waiting <= WAITING_MAX, "waiting turns are miscounted"

    # -- the parts --

    def _may_go(self) -> bool:
        if self._is_paused:
            return not self._feed.num_left  # only the last prefixes remain to be dropped
        return self._num_waiting < WAITING_MAX and not (self._holds_back and self._active)

    def _submit(self, action: Submit) -> SubmitTurn:
        request, attempt_id = action.request, self._next_attempt_id()
        tokens, options = self._requests[request].tokens, self._requests[request].options
        shared = min(action.prefix_tokens, len(tokens) - 1)  # at least one token must be computed
        shared -= shared % self._size
        self._active[attempt_id] = _Active(request, action.group, shared)
        self._num_waiting += 1
        return SubmitTurn(
            attempt_id,
            self._conversation_id(request),
            tokens.tobytes(),
            0,
            options,
            share=self._share,
            weight=self._weight,
            root=self._root and salted(self._root, self._requests[request].cache_salt),
        )

    def _prompt_computed(self, active: _Active) -> None:
        """Note a request's first token: the prefix of the request's group is computed. Open the group."""
        if not self._feed.prefix_tokens_of(active.group):
            return
        if active.computed_part_of_prefix(len(self._requests[active.request].tokens)):
            former = self._keepers.get(active.group)
            self._keepers[active.group] = active.request
            if former is not None and self._conversation_id(former) in self._kept:
                self._messages += self._delete(self._conversation_id(former))
        self._feed.prefix_computed(active.group)

    def _end(self, active: _Active, event: TurnEnded) -> Finished | None:
        request = active.request
        del self._active[event.attempt_id]
        self._num_waiting -= active.missing_tokens is None
        self._holds_back = event.failure == "QUEUE_FULL"
        if event.finish is FinishReason.CANCELLED or event.failure in RETRIED_FAILURES:
            self._feed.take_back(request)
            self._end_conversation(active, is_kept=False)
            return None
        has_reply = event.finish in HAS_REPLY
        self._feed.ended(request, len(active.samples) if has_reply else None)
        keeps = self._keeps_all or self._keepers.get(active.group) == request
        self._end_conversation(active, is_kept=keeps and has_reply)
        self.saved_tokens += event.usage.device_tokens + event.usage.host_tokens
        self.prompt_tokens += len(self._requests[request].tokens)
        self.output_tokens += len(active.samples)
        return Finished(request, tuple(active.samples), event.finish, event.failure, event.usage)

    def _end_conversation(self, active: _Active, is_kept: bool) -> None:
        conversation_id = self._conversation_id(active.request)
        if is_kept:
            self._kept[conversation_id] = None
            if not self._keeps_all:
                self._messages.append(RewindConversation(conversation_id, active.shared_tokens))
            return
        if self._keepers.get(active.group) == active.request:
            del self._keepers[active.group]
        self._messages += self._delete(conversation_id)

    def _delete(self, conversation_id: str) -> list[EngineMessage]:
        self._kept.pop(conversation_id, None)
        return [DeleteConversation(conversation_id)]

    def _conversation_id(self, request: int) -> str:
        return f"~batch/{self._name}/{request}"


def _groups(requests: Sequence[BatchRequest], reorders: bool) -> list[PrefixGroup]:
    """Return the groups of requests that share a prefix. Requests with different salts share no prefix.

    Groups with the fewest tokens to compute come first (prefix_groups.py). Without `reorders`, groups with
    the earliest requests come first.
    """
    by_salt: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        by_salt.setdefault(request.cache_salt, []).append(number)
    prompts = [each.tokens for each in requests]
    groups = [
        PrefixGroup(group.prefix_tokens, tuple(numbers[each] for each in group.members))
        for numbers in by_salt.values()
        for group in prefix_groups([prompts[number] for number in numbers])
    ]
    if not reorders:
        return sorted(groups, key=lambda group: group.members)
    return sorted(groups, key=lambda group: (group.num_computed(prompts), group.members))
