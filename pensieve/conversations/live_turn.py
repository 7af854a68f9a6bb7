"""The live turn, and the values about it that the store threads and the event loop exchange.

    store thread                                    event loop
    StartedTurn     committed as `running`    ──>   LiveTurn, followed by its clients
    RetriedTurn     found by its request_id   ──>   attach to the LiveTurn, or replay the stored reply
    CommittedReply  <── TurnReply             ───   the engine has ended the turn

An unstored turn (unstored.py) begins and ends in the event loop alone. All values are frozen, except
`LiveTurn` and its `ReplyTokens`.

While a turn runs, text that may begin a stop string is *withheld*, and so are incomplete characters
(text/reply.py). If a client stops the turn, the tokens of withheld text may be kept. The text is then added
to the stored message, and sent to the followers.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from pensieve.conversations.binding.chain import ChainEnd
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.logprobs import PackedLogprobs, Row, pack
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import HAS_REPLY, FinishReason, Usage
from pensieve.engine.messages import SubmitTurn
from pensieve.errors import PensieveError
from pensieve.store import records
from pensieve.store.responses import StoredResponse
from pensieve.text import Part, PartMarker
from pensieve.text.reply_pieces import Piece, ReplyPieces


class RecomputeReason(StrEnum):
    DROPPED = "dropped"  # both tiers were full of more valuable chunks
    ENGINE_RESTARTED = "engine_restarted"
    FINGERPRINT_CHANGED = "fingerprint_changed"


class TurnPhase(Enum):
    """The phase of a live turn. `TurnEnds` changes it (turn_ends.py)."""

    RUNNING = "running"  # the engine has the turn
    COMMITTING = "committing"  # the engine has ended the turn; the store writes the end
    GIVING_UP = "giving_up"  # nothing of the turn is kept; the store writes the interruption
    ENDED = "ended"  # `finish` is set


LEGAL_TRANSITIONS: Mapping[TurnPhase, frozenset[TurnPhase]] = {
    TurnPhase.RUNNING: frozenset({TurnPhase.COMMITTING, TurnPhase.GIVING_UP}),
    TurnPhase.COMMITTING: frozenset({TurnPhase.ENDED}),
    TurnPhase.GIVING_UP: frozenset({TurnPhase.ENDED}),
    TurnPhase.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """A turn that the store holds as `running`, with the message that submits it to the engine."""

    turn: records.StoredTurn
    request: TurnRequest
    submit: SubmitTurn  # `Turns.begin` adds attempt_id, share and weight
    first_revision: int  # of the conversation before the turn
    prompt_end: array[int]  # the last tokens before the reply; a template may open thinking in them
    changed_at: float  # when the conversation was last changed
    is_tokenized_again: bool  # the log was tokenized again since the last turn


@dataclass(frozen=True, slots=True)
class RetriedTurn:
    """The turn that a request retries: an earlier request with the same request_id began it."""

    turn: records.StoredTurn
    reply: records.NewMessage | None  # None while it runs


@dataclass(frozen=True, slots=True)
class TurnReply:
    """The result of a turn, to be committed."""

    turn_id: int
    token_ids: tuple[int, ...]
    text: str
    stream: Mapping[str, Any]  # the parts of its deltas; see `stream_of`
    finish: FinishReason
    figures: Mapping[str, Any]  # usage, as it is stored
    is_cut: bool = False  # a client stopped the turn: withheld text may follow `text`
    logprobs: bytes = b""  # packed
    chain: ChainEnd | None = None  # of the client's history before the reply
    state: records.ChainState | None = None  # of the chain after the reply, if already computed
    response: StoredResponse | None = None  # for a client of the Responses API
    attempt: int = 0  # of the turn
    begins: str = ""  # the start of the reply, given by the client; its tokens count as prompt

    @property
    def content(self) -> str:
        """The text of the stored message. If `is_cut`, `History.finish` also adds the withheld text."""
        return self.begins + self.text


class PromptTokens(NamedTuple):
    """The number of tokens of a prompt, and how many of them were cached."""

    num_tokens: int
    num_cached: int = 0


class CommittedReply(NamedTuple):
    revision: int
    tail: str  # withheld text of a stopped turn, which its followers do not have yet


@dataclass(slots=True)
class ReplyTokens:
    """Some or all tokens of a reply, in columns.

    A column has plain values, not one object per token. So a thousand turns of a thousand tokens are only a
    few thousand objects for the garbage collector (`pensieve.gc_pause`). `LiveTurn.withheld` has no token,
    so its text has entries in `texts` and `parts` only.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of each token: the text that it completed
    finish: FinishReason = FinishReason.STOP  # one of HAS_REPLY; only used for a whole reply
    parts: list[Part] = field(default_factory=list)  # of each token; empty: all text
    # Of each token, if requested: its log probability and the alternatives.
    logprobs: Sequence[Row] = field(default_factory=list)

    def span(self, start: int, stop: int) -> ReplyTokens:
        """Return the tokens from `start` to before `stop`."""
        return ReplyTokens(
            self.token_ids[start:stop],
            self.texts[start:stop],
            self.finish,
            self.parts[start:stop],
            self.logprobs[start:stop],
        )

    def is_of(self, *parts: Part) -> list[bool]:
        """For each token, return whether it belongs to one of these parts."""
        if not self.parts:
            return [Part.TEXT in parts] * len(self.texts)
        return [each in parts for each in self.parts]

    @property
    def num_thinking(self) -> int:
        return sum(self.is_of(Part.THINKING))

    def pieces(self, reply_pieces: ReplyPieces) -> list[Piece]:
        """Return the pieces of these tokens. `reply_pieces` must have all earlier tokens of the reply."""
        found: list[Piece] = []
        for text, part in zip(self.texts, self.parts, strict=True):
            found += reply_pieces.push(text, part)
        return found


NO_TOKENS = ReplyTokens()


@dataclass(slots=True)
class LiveTurn:
    """A turn as its followers see it. It is complete when `finish` is set, so `finish` is set last."""

    turn_id: int
    conversation_id: str
    history_tokens: int
    prompt_tokens: int  # tokens after the history and before the reply
    reply: ReplyTokens = field(default_factory=ReplyTokens)  # grows while the turn runs
    request: TurnRequest | None = None  # None if the reply is replayed, or the turn unstored
    accepted_at: float = 0.0  # when the daemon took the request, by the loop's clock
    begun_at: float = 0.0  # when the store had the turn, by the loop's clock
    admitted: bool = False  # the engine has room for the turn
    cached_tokens: int = 0  # tokens of the context that had KV at admission
    phase: TurnPhase = TurnPhase.RUNNING
    finish: FinishReason | None = None
    failure: PensieveError | None = None
    usage: Usage | None = None
    revision: int | None = None
    replayed: bool = False
    stopped: bool = False  # a client has stopped it
    kept: int | None = None  # number of tokens that a stop has kept; None: all
    tenant: str = ""
    attempt_id: int = 0  # the id of this attempt at the turn, for the engine and for `Turns`
    request_id: str = ""
    first_revision: int = 0  # of the conversation before the turn
    attempt: int = 1  # counts the attempts at the turn; clients get it in TurnStarted
    recompute_reason: str = ""  # the reason if tokens are recomputed
    figures: dict[str, Any] = field(default_factory=dict)  # usage, as it is stored
    marker: PartMarker | None = None
    tail: str = ""  # withheld text of a stopped turn; it follows the text of the last token
    token_at: float = 0.0  # when the latest tokens came, by the loop's clock
    num_timed: int = 0  # tokens that are counted in the latencies
    weight: float = 1.0  # of the tenant
    priority: int = 0
    prompt_seconds: float = 0.0  # predicted for the prompt alone

    @property
    def is_stored(self) -> bool:
        """Whether the turn is stored. An unstored turn has a negative id."""
        return self.turn_id >= 0

    @property
    def text(self) -> str:
        return "".join(self.reply.texts[: self.kept])

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply, without those that a stop has cut."""
        return len(self.reply.token_ids) if self.kept is None else self.kept

    @property
    def withheld(self) -> ReplyTokens:
        """The withheld text of a stopped turn, for a follower that has all tokens."""
        if not self.tail:
            return NO_TOKENS
        return ReplyTokens(texts=[self.tail], parts=[self.reply.parts[self.num_tokens - 1]])

    def whole_reply(
        self, finish: FinishReason | None = None, tail: str | None = None
    ) -> ReplyTokens:
        """Return the whole reply. If the turn is about to end, pass its `finish` and `tail`."""
        tail = self.tail if tail is None else tail
        found = self.reply.span(0, self.num_tokens)
        if tail and found.texts:
            found.texts[-1] += tail
        finish = finish or self.finish
        if finish in HAS_REPLY:  # else the turn was cancelled
            found.finish = finish
        return found

    @property
    def prompt(self) -> PromptTokens:
        """The numbers of prompt tokens. The turn must have ended."""
        figures = self.figures
        num_cached = int(figures.get("device_tokens", 0)) + int(figures.get("host_tokens", 0))
        return PromptTokens(int(figures.get("prompt_tokens", 0)), num_cached)

    @property
    def num_charged_tokens(self) -> int:
        """Tokens for which the tenant pays: the reply, and the prompt if the engine has admitted the turn."""
        if self.figures and self.usage is not None:  # includes sampled tokens that a stop has cut
            return self.usage.new_tokens + self.usage.output_tokens
        return self.num_tokens + (self.prompt_tokens if self.admitted else 0)

    def move_to(self, phase: TurnPhase) -> None:
        assert phase in LEGAL_TRANSITIONS[self.phase], (self.turn_id, self.phase, phase)
        self.phase = phase

    def take(self, token: SampledToken) -> None:
        """Append a sampled token. `token_ids` is extended last, because followers go by its length."""
        reply = self.reply
        if token.logprob is not None:
            assert isinstance(reply.logprobs, list)
            reply.logprobs.append((token.logprob, token.top_logprobs))
        reply.texts.append(token.text)
        reply.parts.append(self.marker.push(token.token_id) if self.marker else Part.TEXT)
        reply.token_ids.append(token.token_id)


def stream_of(live: LiveTurn) -> dict[str, Any]:
    """Split a reply into runs of tokens of the same part, so that its deltas can be sent again.

    `parts` has (part, tokens, characters) of each run, unless the reply is only text. If the client gave the
    start of the reply, this text is a first run without tokens.
    """
    stream: dict[str, Any] = {}
    begins = live.request.reply_begins if live.request is not None else ""
    runs: list[list[Any]] = [[Part.TEXT.value, 0, len(begins)]] if begins else []
    for part, text in zip(
        live.reply.parts[: live.kept], live.reply.texts[: live.kept], strict=True
    ):
        if not runs or not runs[-1][1] or runs[-1][0] != part.value:
            runs.append([part.value, 0, 0])
        runs[-1][1] += 1
        runs[-1][2] += len(text)
    if begins or any(run[0] != Part.TEXT.value for run in runs):
        stream["parts"] = runs
    return stream


def packed_logprobs(live: LiveTurn) -> bytes:
    """Pack the logprobs of a turn that the engine has ended. May be called in any thread."""
    return pack(live.reply.logprobs[number] for number in range(live.num_tokens))


def replayed(turn: records.StoredTurn, reply: records.NewMessage) -> LiveTurn:
    """Make an ended live turn out of a stored reply, for another follower."""
    assert turn.finish_reason is not None
    num_tokens, content = len(reply.token_ids), reply.content
    texts, parts = [""] * num_tokens, [Part.TEXT] * num_tokens
    runs = reply.extra.get("parts") or [[Part.TEXT.value, num_tokens, len(content)]]
    token = character = 0
    for part, tokens, characters in runs:
        parts[token : token + tokens] = [Part(part)] * tokens
        end = character + characters if token + tokens < num_tokens else len(content)
        if tokens:
            texts[token] = content[character:end]
        token, character = token + tokens, end
    return LiveTurn(
        turn.turn_id,
        turn.conversation_id,
        history_tokens=0,
        prompt_tokens=0,
        reply=ReplyTokens(
            list(reply.token_ids),
            texts,
            parts=parts,
            logprobs=PackedLogprobs(reply.logprobs) if reply.logprobs else [],
        ),
        phase=TurnPhase.ENDED,
        finish=FinishReason(turn.finish_reason),
        revision=turn.revision,
        replayed=True,
        tenant=turn.tenant,
        request_id=turn.request_id,
        first_revision=(turn.revision or 1) - 1,
        attempt=turn.attempts,
        figures=dict(turn.usage),
    )


def cache_key(tenant: str, conversation_id: str) -> str:
    """Return the engine's key of a conversation. Ids have no slash, so tenants never share keys."""
    return f"{tenant}/{conversation_id}" if tenant else conversation_id


def unstored_key(tenant: str, number: int) -> str:
    """Return the engine's key of an unstored turn. It has two slashes, so it equals no `cache_key`."""
    return f"~unstored/{tenant}/{number}"


def names_of(key: str) -> tuple[str, str]:
    """Split a `cache_key` into tenant and conversation id."""
    tenant, _, conversation_id = key.rpartition("/")
    return tenant, conversation_id


def shared_name(key: str) -> str:
    """Return the name of the conversation that has shared KV; empty for unstored turns and batch jobs."""
    return "" if key.startswith(("~unstored/", "~batch/")) else names_of(key)[1]


USAGE_COUNTS = (
    *("prompt_tokens", "new_tokens", "device_tokens", "host_tokens", "recomputed_tokens"),
    *("shared_tokens", "output_tokens", "suspensions"),
)


def usage_figures(usage: Usage) -> dict[str, float]:
    """Return a turn's usage as it is stored and shown."""
    end = usage.finished_at if usage.finished_at is not None else usage.submitted_at
    admitted = usage.admitted_at if usage.admitted_at is not None else end
    first = usage.first_token_at if usage.first_token_at is not None else end
    return {
        **{name: getattr(usage, name) for name in USAGE_COUNTS},
        "queue_seconds": admitted - usage.submitted_at,
        "first_token_seconds": first - usage.submitted_at,
        "total_seconds": end - usage.submitted_at,
    }
