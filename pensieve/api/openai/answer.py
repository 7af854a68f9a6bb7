"""Render replies as bodies of OpenAI's API: a chat completion, a text completion, a response.

Thinking becomes `reasoning_content`, without its control tokens and the white space around it. Tool calls
become `tool_calls`, if the request has tools and the model's format of calls is known. In a response,
thinking and calls become items. Everything else is text, as it was sampled.

Ids of calls are derived from the answer's id, so a repeated answer has the same ids. An incomplete call has
the part of its arguments that was sampled. The finish reason is `tool_calls` only if the answer ends with a
complete call.

Only tokens of the text have logprobs. Tokens without text (such as the end of a turn) are left out, but may
be among the alternatives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.api.openai.request import ParsedRequest, RequestKind
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import HAS_REPLY, FinishReason
from pensieve.text.parts import Part
from pensieve.text.reply_pieces import ReplyPieces, Text, Thinking
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.tool_calls import CallArguments, CallBegan, CallStyle

LOGPROB_MIN = -9999.0  # the API's value for an impossible token; JSON has no infinity
ID_PREFIXES = {
    RequestKind.CHAT: "chatcmpl-",
    RequestKind.COMPLETION: "cmpl-",
    RequestKind.RESPONSE: "resp_",
}


class Heading(NamedTuple):
    answer_id: str  # without its prefix (ID_PREFIXES)
    created: int  # seconds since 1970
    model: str


def answer(
    request: ParsedRequest,
    replies: Sequence[ReplyTokens],
    prompt: PromptTokens,
    heading: Heading,
    tokenizer: Tokenizer | None = None,
    style: CallStyle | None = None,
) -> dict[str, Any]:
    """Return the body. `replies`: one for each choice.

    `tokenizer` is required with logprobs. `style`: the format of the model's calls. None: calls are text.
    """
    assert len(replies) == request.num_choices, (len(replies), request.num_choices)
    assert all(each.finish in HAS_REPLY for each in replies)
    assert tokenizer is not None or request.sampling.logprobs is None
    if request.kind is RequestKind.RESPONSE:
        output = _output(request, replies[0], heading, tokenizer, style)
        return response_body(request, replies[0], prompt, heading, output)
    is_chat = request.kind is RequestKind.CHAT
    return {
        "id": ID_PREFIXES[request.kind] + heading.answer_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": heading.created,
        "model": heading.model,
        "choices": [
            {
                "index": n,
                **(
                    _chat_choice(n, each, request, heading, tokenizer, style)
                    if is_chat
                    else _text_choice(each, request, tokenizer)
                ),
            }
            for n, each in enumerate(replies)
        ],
        "usage": usage_of(replies, prompt),
        "system_fingerprint": None,
    }


def _chat_choice(
    index: int,
    reply: ReplyTokens,
    request: ParsedRequest,
    heading: Heading,
    tokenizer: Tokenizer | None,
    style: CallStyle | None,
) -> dict[str, Any]:
    cut = cut_reply(reply.texts, reply.parts, style, request.tools)
    message: dict[str, Any] = {"role": "assistant", "content": cut.content, "refusal": None}
    if cut.thinking:
        message["reasoning_content"] = cut.thinking
    if cut.calls:
        message["content"] = cut.content or None
        message["tool_calls"] = message_calls(cut.calls, heading.answer_id, index)
    logprobs = None
    if request.sampling.logprobs is not None and tokenizer is not None:
        logprobs = {
            "content": logprob_rows(reply, tokenizer, is_first=not request.continues_text),
            "refusal": None,
        }
    ending = finish_fields(reply.finish, cut.ends_with_call)
    return {"message": message, "logprobs": logprobs, **ending}


def _text_choice(
    reply: ReplyTokens, request: ParsedRequest, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a choice of a text completion. The whole reply is text."""
    reply = ReplyTokens(reply.token_ids, reply.texts, reply.finish, logprobs=reply.logprobs)
    logprobs = None
    if request.sampling.logprobs is not None and tokenizer is not None:
        logprobs = logprob_columns(
            logprob_rows(reply, tokenizer, is_first=not request.continues_text)
        )
    text = "".join(reply.texts)
    return {"text": text, "logprobs": logprobs, **finish_fields(reply.finish)}


def finish_fields(finish: FinishReason, ends_with_call: bool = False) -> dict[str, str]:
    """Return the finish reason of a choice, as one of the reasons that OpenAI's clients know.

    For a reply that was stopped because it repeats itself, the finish reason is "length", because the reply
    is incomplete. As in vLLM, `stop_reason` has the actual reason.
    """
    if finish is FinishReason.REPETITION:
        return {"finish_reason": "length", "stop_reason": finish.value}
    ends_in_call = ends_with_call and finish is FinishReason.STOP
    return {"finish_reason": "tool_calls" if ends_in_call else finish.value}


def usage_of(replies: Sequence[ReplyTokens], prompt: PromptTokens) -> dict[str, Any]:
    """Return the usage. All choices share one prompt."""
    num_output = sum(len(each.token_ids) for each in replies)
    return {
        "prompt_tokens": prompt.num_tokens,
        "completion_tokens": num_output,
        "total_tokens": prompt.num_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": prompt.num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.num_thinking for each in replies)
        },
    }


# -- logprobs --


def logprob_rows(
    reply: ReplyTokens, tokenizer: Tokenizer, *, is_first: bool = True
) -> list[dict[str, Any]]:
    """Return the logprobs of the text's tokens. `is_first`: there is no text before."""
    found = []
    rows = zip(reply.token_ids, reply.logprobs, reply.is_of(Part.TEXT, Part.TOOL_CALL), strict=True)
    for token_id, (logprob, alternatives), is_text in rows:
        if not is_text or tokenizer.is_silent(token_id):
            continue
        top = [_token(tokenizer, each.token_id, each.logprob, is_first) for each in alternatives]
        found.append({**_token(tokenizer, token_id, logprob, is_first), "top_logprobs": top})
        is_first = False
    return found


def _token(tokenizer: Tokenizer, token_id: int, logprob: float, is_first: bool) -> dict[str, Any]:
    piece = b""
    if 0 <= token_id < tokenizer.vocab_size:  # larger ids only pad the model's vocabulary
        piece = tokenizer.piece(token_id, first=is_first)
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": logprob if math.isfinite(logprob) else LOGPROB_MIN,
        "bytes": list(piece),
    }


def logprob_columns(tokens: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, Any]:
    """Return logprobs as columns. Of alternatives with the same text, only the likeliest is returned."""
    top_logprobs, offsets = [], []
    for each in tokens:
        column: dict[str, float] = {}
        for token in (*each["top_logprobs"], each):
            column.setdefault(token["token"], token["logprob"])
        top_logprobs.append(column)
        offsets.append(offset)
        offset += len(each["token"])
    return {
        "tokens": [each["token"] for each in tokens],
        "token_logprobs": [each["logprob"] for each in tokens],
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


# -- a response --


def response_body(
    request: ParsedRequest,
    reply: ReplyTokens,
    prompt: PromptTokens,
    heading: Heading,
    output: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    is_whole = reply.finish is FinishReason.STOP
    status = "completed" if is_whole else "incomplete"
    echoed, sampling = request.echoed, request.sampling
    given = request.turn.given_sampling or {}
    conversation = {"conversation": {"id": request.conversation}} if request.conversation else {}
    return {
        "id": ID_PREFIXES[request.kind] + heading.answer_id,
        "object": "response",
        "created_at": heading.created,
        "status": status,
        "background": request.background,
        "error": None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "instructions": echoed.get("instructions"),
        "max_output_tokens": given.get("max_tokens"),
        "max_tool_calls": None,
        "model": heading.model,
        "output": output,
        "parallel_tool_calls": echoed.get("parallel_tool_calls", True),
        "previous_response_id": echoed.get("previous_response_id"),
        "prompt_cache_key": echoed.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **echoed.get("reasoning", {})},
        "safety_identifier": echoed.get("safety_identifier"),
        "service_tier": "default",
        "store": echoed.get("store", True),
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **echoed.get("text", {})},
        "tool_choice": echoed.get("tool_choice", "auto"),
        "tools": [
            {"description": None, "parameters": None, "strict": False, **each}
            for each in echoed.get("tools", ())
        ],
        "top_logprobs": sampling.logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt.num_tokens,
            "input_tokens_details": {"cached_tokens": prompt.num_cached, "cache_write_tokens": 0},
            "output_tokens": len(reply.token_ids),
            "output_tokens_details": {"reasoning_tokens": reply.num_thinking},
            "total_tokens": prompt.num_tokens + len(reply.token_ids),
        },
        "user": echoed.get("user"),
        "metadata": echoed.get("metadata", {}),
        **conversation,
    }


def _output(
    request: ParsedRequest,
    reply: ReplyTokens,
    heading: Heading,
    tokenizer: Tokenizer | None,
    style: CallStyle | None,
) -> list[dict[str, Any]]:
    """Return items for thinking, text and calls. An empty reply becomes an item with empty text."""
    cut = cut_reply(reply.texts, reply.parts, style, request.tools)
    status = "completed" if reply.finish is FinishReason.STOP else "incomplete"
    items: list[dict[str, Any]] = []
    if cut.thinking:
        items.append(
            {
                "id": f"rs_{heading.answer_id}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": cut.thinking}],
                "encrypted_content": None,
                "status": "completed" if cut.content or cut.calls else status,
            }
        )
    if cut.content or not (cut.thinking or cut.calls):
        wants_logprobs = request.sampling.logprobs is not None and tokenizer is not None
        text = {
            "type": "output_text",
            "text": cut.content,
            "annotations": [],
            "logprobs": logprob_rows(reply, tokenizer) if wants_logprobs and tokenizer else [],
        }
        items.append(
            {
                "id": f"msg_{heading.answer_id}",
                "type": "message",
                "status": "completed" if cut.ends_with_call else status,
                "role": "assistant",
                "content": [text],
            }
        )
    return [*items, *call_items(cut.calls, heading.answer_id)]


class SampledCall(NamedTuple):
    name: str
    arguments: str
    is_whole: bool


class CutReply(NamedTuple):
    thinking: str
    content: str
    calls: Sequence[SampledCall]
    ends_with_call: bool


def cut_reply(
    texts: Sequence[str],
    parts: Sequence[Part],
    style: CallStyle | None,
    tools: Sequence[Mapping[str, Any]],
) -> CutReply:
    """Split a whole reply into thinking, text and calls. Without `parts`, everything is text."""
    cutter = ReplyPieces(style if tools else None, tools)
    pieces = cutter.whole(zip(parts or [Part.TEXT] * len(texts), texts, strict=True))
    arguments: list[list[str]] = [[] for _ in range(cutter.num_calls)]
    for each in pieces:
        if isinstance(each, CallArguments):
            arguments[each.index].append(each.text)
    whole = {each.index for each in cutter.calls}
    calls = [
        SampledCall(each.name, "".join(arguments[each.index]), each.index in whole)
        for each in pieces
        if isinstance(each, CallBegan)
    ]
    thinking = "".join(each.text for each in pieces if isinstance(each, Thinking))
    content = "".join(each.text for each in pieces if isinstance(each, Text))
    return CutReply(thinking, content, calls, cutter.ends_with_call)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """Return the id of a call. It is the same if the answer is repeated."""
    words = f"{answer_id}/{choice}/{index}".encode()
    return f"call_{hashlib.blake2b(words, digest_size=12).hexdigest()}"


def message_calls(
    calls: Sequence[SampledCall], answer_id: str, choice: int
) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id(answer_id, choice, n),
            "type": "function",
            "function": {"name": each.name, "arguments": each.arguments},
        }
        for n, each in enumerate(calls)
    ]


def call_items(calls: Sequence[SampledCall], answer_id: str) -> list[dict[str, Any]]:
    ids = [call_id(answer_id, 0, n) for n in range(len(calls))]
    return [
        {
            "id": f"fc_{each_id.removeprefix('call_')}",
            "type": "function_call",
            "call_id": each_id,
            "name": each.name,
            "arguments": each.arguments,
            "status": "completed" if each.is_whole else "incomplete",
        }
        for each_id, each in zip(ids, calls, strict=True)
    ]
