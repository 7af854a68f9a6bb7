"""Messages of vllm_engine.proto to values of ours and back.  No decisions are made here.

What this server cannot do is refused with the name of the field, never left undone in silence.  Of the
sampling, a number that the protocol leaves at 0 is as good as not given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import InvalidArgument
from pensieve.service.grpc import constraints
from pensieve.service.grpc.sizes import RESPONSE_BYTES_MAX
from pensieve.service.kv_events import Batch
from pensieve.service.live_turn import LiveTurn
from pensieve.text import Tokenizer
from pensieve.v1.routers import smg_common_pb2 as common
from pensieve.v1.routers import vllm_engine_pb2 as pb

CHOICES_MAX = 16
PIECE_TOKENS = (
    4096  # of a chunk, so that it fits into a message with 20 alternatives for each token
)
WHOLE_BYTES_MAX = RESPONSE_BYTES_MAX - (64 << 10)  # of a reply in one message
STOP_WINDOW_TOKENS = 1024  # at the end of a reply, in which a stop string is looked for
FINISH_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}
REFUSED = "is not supported by this server"


@dataclass(frozen=True)
class Requested:
    """What Generate asks for."""

    request_id: str
    prompt: Any  # token ids
    choices: tuple[TurnOptions, ...]
    is_streamed: bool


# -- in --


def requested(request: pb.GenerateRequest, context_max: int, priority_max: int) -> Requested:
    """`priority_max`: where it is below that of a request that names none, it is its priority."""
    if request.WhichOneof("input") != "tokenized" or not request.tokenized.input_ids:
        raise InvalidArgument(
            "tokenized.input_ids", "is missing: this server takes token ids alone"
        )
    for name in ("mm_inputs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise InvalidArgument(name, REFUSED)
    if request.data_parallel_rank:
        raise InvalidArgument("data_parallel_rank", "must be 0: there is one engine")
    params = request.sampling_params
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(name):  # type: ignore[arg-type]
            raise InvalidArgument(f"sampling_params.{name}", REFUSED)
    kind = params.WhichOneof("constraint")
    if kind == "structural_tag":
        raise InvalidArgument(f"sampling_params.{kind}", REFUSED)
    constraint = None if kind is None else constraints.named(kind, params)
    if params.n > CHOICES_MAX:
        raise InvalidArgument("sampling_params.n", f"is at most {CHOICES_MAX}")
    numbers = range(max(params.n, 1))
    priority = min(0, priority_max)
    choices = tuple(
        TurnOptions(_sampling(params, context_max, each), priority, constraint=constraint)
        for each in numbers
    )
    room = context_max - len(request.tokenized.input_ids)
    if not request.stream and params.HasField("max_tokens"):
        _check_size(choices[0].sampling, min(params.max_tokens, room))
    return Requested(request.request_id, request.tokenized.input_ids, choices, request.stream)


def _check_size(sampling: Sampling, num_tokens: int) -> None:
    """Refuse a whole reply that would be larger than a message may be."""
    most = WHOLE_BYTES_MAX // _token_bytes(sampling)
    if sampling.logprobs is not None and num_tokens > most:
        raise InvalidArgument(
            "sampling_params.logprobs",
            f"of {num_tokens:,} tokens are more than one message holds ({most:,} with"
            f" {sampling.logprobs} alternatives); stream them, or ask for fewer",
        )


def _token_bytes(sampling: Sampling) -> int:
    """The most that a token of a reply takes on the wire: its id, logprob, and alternatives."""
    return 24 + 8 * ((sampling.logprobs or 0) + 1)


def _sampling(params: pb.SamplingParams, context_max: int, choice: int) -> Sampling:
    if params.HasField("seed") and params.seed < 0:
        raise InvalidArgument("sampling_params.seed", "must not be negative")
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed + 1 + choice if params.HasField("seed") else 0,  # ours: 0 draws one
        max_tokens=params.max_tokens if params.HasField("max_tokens") else context_max,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )


# -- out --


def chunks(live: LiveTurn, start: int, stop: int, index: int) -> Iterator[pb.GenerateResponse]:
    """Tokens [start, stop) of a choice."""
    for first in range(start, stop, PIECE_TOKENS):
        last = min(first + PIECE_TOKENS, stop)
        chunk = pb.GenerateStreamChunk(
            token_ids=live.token_ids[first:last],
            prompt_tokens=live.prompt_tokens,
            completion_tokens=last - first,
            cached_tokens=live.cached_tokens,
            output_logprobs=_logprobs(live, first, last),
            index=index,
        )
        yield pb.GenerateResponse(chunk=chunk)


def complete(
    live: LiveTurn, first: int, index: int, options: TurnOptions, tokenizer: Tokenizer
) -> pb.GenerateResponse:
    """The end of a choice, with its tokens from `first` on."""
    assert live.finish is not None
    last = live.num_tokens
    _check_size(options.sampling, last - first)  # where no length was given
    given = pb.GenerateComplete(
        output_ids=live.token_ids[first:last],
        finish_reason=FINISH_WORDS[live.finish],
        prompt_tokens=live.prompt_tokens,
        completion_tokens=last,
        cached_tokens=live.cached_tokens,
        output_logprobs=_logprobs(live, first, last),
        index=index,
    )
    if live.finish is FinishReason.STOP:
        _name_the_stop(given, live.token_ids[:last], options.sampling, tokenizer)
    return pb.GenerateResponse(complete=given)


def _name_the_stop(
    given: pb.GenerateComplete, token_ids: list[int], sampling: Sampling, tokenizer: Tokenizer
) -> None:
    """Which of the request's own stops it was; an end of turn is none of them."""
    if token_ids[-1] in sampling.stop_token_ids:
        given.matched_token_id = token_ids[-1]
    elif sampling.ignore_eos or token_ids[-1] not in tokenizer.eos_token_ids:
        text = tokenizer.decode(token_ids[-STOP_WINDOW_TOKENS:])
        found = [(text.find(each) + len(each), each) for each in sampling.stop if each in text]
        if found:
            given.matched_stop_str = min(found)[1]


def _logprobs(live: LiveTurn, first: int, last: int) -> pb.OutputLogProbs | None:
    if not live.logprobs:
        return None
    given = pb.OutputLogProbs(token_ids=live.token_ids[first:last])
    for logprob, top in (live.logprobs[each] for each in range(first, last)):
        given.token_logprobs.append(logprob)
        given.top_logprobs.add(
            values=[each.logprob for each in top], token_ids=[each.token_id for each in top]
        )
    return given


def load(
    figures: dict[str, float], lives: Iterable[LiveTurn], chunk_tokens: int
) -> pb.SchedulerLoad:
    """What the engine has to do, of whoever's; the tokens are those of turns that run."""
    running = figures["turns_running"]
    waiting = figures["turns_queued"] + figures["turns_suspended"] + figures["turns_ready"]
    num_tokens = int(figures["device_pages"]) * chunk_tokens
    used = sum(
        live.history_tokens + live.prompt_tokens + live.num_tokens
        for live in lives
        if live.admitted
    )
    used = min(used, num_tokens)
    found = figures["device_tokens"] + figures["host_tokens"]
    prompts = found + figures["new_tokens"] + figures["recomputed_tokens"]
    return pb.SchedulerLoad(
        num_running_reqs=int(running),
        num_waiting_reqs=int(waiting),
        num_total_reqs=int(running + waiting),
        num_used_tokens=used,
        max_total_num_tokens=num_tokens,
        token_usage=used / num_tokens if num_tokens else 0.0,
        cache_hit_rate=found / prompts if prompts else 0.0,
    )


class Numbered:
    """The batches of one stream of KV events."""

    def __init__(self, sequence_number: int, block_size: int) -> None:
        self._sequence_number, self._block_size = sequence_number, block_size
        self._num_events = 0

    def batch(self, batch: Batch, timestamp: float) -> common.KvEventBatch:
        self._sequence_number += 1
        result = common.KvEventBatch(
            sequence_number=self._sequence_number, timestamp=timestamp, dp_rank=0
        )
        if batch.cleared:
            self._event(result).cleared.SetInParent()
        if batch.removed:
            self._event(result).removed.block_hashes.extend(batch.removed)
        stored = None
        last = 0
        for block in batch.stored:
            if stored is None or not block.parent or block.parent != last:
                stored = self._event(result).stored
                if block.parent:
                    stored.parent_block_hash = block.parent
            stored.blocks.add(
                block_hash=block.number, token_ids=block.tokens, block_size=self._block_size
            )
            last = block.number
        return result

    def _event(self, batch: common.KvEventBatch) -> common.KvCacheEvent:
        self._num_events += 1
        return batch.events.add(event_id=self._num_events)
