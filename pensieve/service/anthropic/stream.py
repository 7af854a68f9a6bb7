"""A message as it comes: events that a client puts together to what `answer` writes of the whole reply.

    message_start, ping                       with the length of the prompt
    content_block_start                       then deltas of one kind, and
    content_block_stop                        once for each block; of thinking behind its signature
    message_delta                             why it ended, and what it took: these numbers replace the first
    message_stop

One block is open at a time, and blocks are numbered as they begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pensieve.service.anthropic.answer import SIGNATURE, Ending, message_id, opened, usage_of
from pensieve.service.openai import Heading, PromptTokens, Reply
from pensieve.text.reply_pieces import CallArguments, CallBegan, Piece

DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class MessageStream:
    def __init__(self, heading: Heading, prompt: PromptTokens) -> None:
        """`prompt`: as it is known before anything is computed."""
        self._heading, self._prompt = heading, prompt
        self._begun = False
        self._block = ""  # the type of the one that is open
        self._index = -1  # of the block that began last

    def events(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """For pieces of the reply; the first call also begins the message."""
        found = self._begin()
        for piece in pieces:
            if isinstance(piece, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": piece.text}
                found.append(self._delta(delta))
                continue
            block = opened(piece, self._heading.answer_id)
            kind = block["type"]
            if kind != self._block or isinstance(piece, CallBegan):
                found += self._stop()
                self._index += 1
                self._block = kind
                block |= {"signature": ""} if kind == "thinking" else {}  # it comes at the end
                found.append(self._of_block("content_block_start", content_block=block))
            if not isinstance(piece, CallBegan):
                found.append(self._delta({"type": DELTAS[kind], kind: piece.text}))
        return found

    def end(self, reply: Reply, prompt: PromptTokens, ending: Ending) -> list[dict[str, Any]]:
        """Once all pieces are there; `prompt` with what was cached of it."""
        delta = {"stop_reason": ending.reason, "stop_sequence": ending.stop_sequence}
        return [
            *self._begin(),
            *self._stop(),
            {"type": "message_delta", "delta": delta, "usage": usage_of(prompt, reply)},
            {"type": "message_stop"},
        ]

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        start: dict[str, Any] = {
            "id": message_id(self._heading),
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._prompt),
        }
        return [{"type": "message_start", "message": start}, {"type": "ping"}]

    def _stop(self) -> list[dict[str, Any]]:
        """The open block, if there is one."""
        kind, self._block = self._block, ""
        if not kind:
            return []
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = [self._delta(signature)] if kind == "thinking" else []
        return [*signed, self._of_block("content_block_stop")]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, name: str, **values: Any) -> dict[str, Any]:
        return {"type": name, "index": self._index, **values}
