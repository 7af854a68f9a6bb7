"""A declared prefix, for threads: `Prefix`.

Generated from aio_prefix.py by scripts/generate_sync_client; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pensieve.client.requests import prefix_request
from pensieve.client.values import PrefixState, prefix_of, whole_prefix_of
from pensieve.v1 import conversation_pb2 as pb


class Call(Protocol):
    """Calls a method of ConversationService by its name."""

    def __call__(
        self, method: str, request: Any, timeout: float | None, *, repeat: bool = False
    ) -> Any: ...


class Prefix:
    """A prefix on the server, named by its id: what conversations may begin with.

    Made by `Client.prefix`.  It is tokenized once and its KV is computed once, for all conversations
    that are created with its id as their `prefix_id`:

        rules = client.prefix("rules")
        rules.create(system_prompt="Answer in one sentence.", keep_warm=True)
        client.conversation("trip-42").create(prefix_id="rules")

    It holds no state of its own.  `get`, which may safely be repeated, is retried when the server is
    unavailable; `create` and `delete` are not.
    """

    def __init__(self, call: Call, prefix_id: str) -> None:
        self._call = call
        self.prefix_id = prefix_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix_id!r}>"

    def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        keep_warm: bool = False,
        timeout: float | None = None,
    ) -> PrefixState:
        """Declare the prefix: a system prompt, tools or messages at least.

        Args:
            system_prompt: the first message, with the role "system".
            tools: tools that the model may call, each as the JSON schema its chat template expects.
            template_options: variables for the model's chat template.
            messages: few-shot turns, in the form of OpenAI's API (see `send` of a conversation), that a
                user's message may follow.
            keep_warm: have the daemon compute its KV now, and again when it was lost.
            timeout: seconds for the call; None is the client's.

        Raises:
            AlreadyExists: there is a prefix with this id.
        """
        request = prefix_request(
            self.prefix_id, system_prompt, tools, template_options, messages, keep_warm
        )
        answer = self._call("CreatePrefix", request, timeout)
        return prefix_of(answer.prefix)

    def get(self, timeout: float | None = None) -> PrefixState:
        """The prefix as it is now, with its messages, tools and options.

        `timeout` is in seconds, retries included; None is the client's.

        Raises:
            NotFound: there is no such prefix.
        """
        request = pb.GetPrefixRequest(prefix_id=self.prefix_id)
        return whole_prefix_of(self._call("GetPrefix", request, timeout, repeat=True))

    def delete(self, timeout: float | None = None) -> None:
        """Delete the prefix.  Conversations that began under it stay whole.

        `timeout` is in seconds; None is the client's.

        Raises:
            NotFound: there is no such prefix.
        """
        self._call("DeletePrefix", pb.DeletePrefixRequest(prefix_id=self.prefix_id), timeout)
