"""`POST /tokenize` and `/detokenize`, as in vLLM. No turn runs, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pensieve.api.http.exchange import Exchange
from pensieve.api.http.requests import ApiRequests, template_time
from pensieve.api.json_fields import Fields, Refusal, checked_fields
from pensieve.api.openai.messages import take_messages, take_tools
from pensieve.api.openai.request import is_token_id, served_name, take_template_options
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.heads import check_length
from pensieve.guard.callers import Caller
from pensieve.text import ChatTemplate, Message, TemplateSetting

TOKENS_MAX = 1 << 20  # token limit of a request to /detokenize


class TextToTokenize(NamedTuple):
    """The request: a prompt, or messages for the chat template."""

    prompt: str | None
    has_start: bool = True  # begin the prompt with the model's start tokens
    messages: tuple[Message, ...] = ()
    setting: TemplateSetting = TemplateSetting()
    reply_follows: bool = True
    with_strings: bool = False  # the answer has the text of each token

    @property
    def num_characters(self) -> int:
        messages = sum(each.num_characters for each in self.messages)
        return len(self.prompt or "") + messages + len(self.setting.reply_begins)

    def tokens(self, template: ChatTemplate) -> list[int]:
        """Return the token ids. Any thread may call this."""
        tokenizer = template.tokenizer
        if self.prompt is not None:
            tokenizer.check_text(self.prompt, "prompt")
            encode = tokenizer.encode_prompt if self.has_start else tokenizer.encode_text
            return list(encode(self.prompt))
        text = template.render(self.messages, self.setting, reply_follows=self.reply_follows)
        return tokenizer.encode(text, at_start=True).ids


def parse_tokenize(
    body: Any,
    options: set[str] | None = None,
    fields_of: Callable[[Any], Fields] = checked_fields,
) -> TextToTokenize:
    """Read a body. `options`: names of the chat template's options."""
    fields = fields_of(body)
    fields.text("model")
    with_strings = fields.flag("return_token_strs")
    prompt = fields.text("prompt")
    if prompt is not None:
        has_start = fields.flag("add_special_tokens", True)
        fields.end()
        return TextToTokenize(prompt, has_start, with_strings=with_strings)
    if "messages" not in fields:
        raise Refusal("prompt", "or messages are required", "missing_required_parameter")
    reply_follows = (
        fields.peek("continue_final_message") is True
        or fields.peek("add_generation_prompt") is not False
    )
    if not reply_follows:
        fields.flag("add_generation_prompt")
    fields.only("add_special_tokens", False)
    messages, begins = take_messages(fields)
    tools = take_tools(fields, is_nested=True).tools
    template_options = take_template_options(fields, options)
    fields.end()
    setting = TemplateSetting(tools, template_options, template_time(), begins)
    return TextToTokenize(None, True, messages, setting, reply_follows, with_strings)


def parse_detokenize(body: Any, fields_of: Callable[[Any], Fields] = checked_fields) -> list[int]:
    fields = fields_of(body)
    fields.text("model")
    tokens = fields.items("tokens")
    fields.end()
    if tokens is None:
        raise Refusal("tokens", "is required", "missing_required_parameter")
    if len(tokens) > TOKENS_MAX:
        raise Refusal("tokens", f"holds more than {TOKENS_MAX:,} token ids")
    if not all(is_token_id(each) for each in tokens):
        raise Refusal("tokens", "must be a list of token ids", "invalid_type")
    return list(tokens)


class TokenEndpoints:
    def __init__(self, daemon: Daemon, requests: ApiRequests) -> None:
        self._daemon, self._requests = daemon, requests

    async def tokenize(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        body = await self._body(exchange, by)
        template, context_max = self._requests.template, self._daemon.context_max
        request = parse_tokenize(body, template.options)
        name = "messages" if request.prompt is None else "prompt"
        check_length(name, request.num_characters, context_max)

        def work() -> Mapping[str, Any]:
            tokens, tokenizer = request.tokens(template), template.tokenizer
            strings = list(map(tokenizer.token_text, tokens)) if request.with_strings else None
            return {
                "count": len(tokens),
                "max_model_len": context_max,
                "tokens": tokens,
                "token_strs": strings,
            }

        return await self._daemon.threads.in_text_pool(by.tenant, work)

    async def detokenize(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        tokens = parse_detokenize(await self._body(exchange, by))
        tokenizer = self._requests.template.tokenizer

        def work() -> Mapping[str, Any]:
            return {"prompt": tokenizer.decode(tokens, with_special=True)}

        return await self._daemon.threads.in_text_pool(by.tenant, work)

    async def _body(self, exchange: Exchange, by: Caller) -> Any:
        body = await self._requests.json(exchange, by)
        if isinstance(body, dict) and isinstance(name := body.get("model"), str):
            served_name(name, self._requests.models)
        return body
