"""Who `pensieve chat` talks to: an engine in this process, or a daemon.  The terminal cannot tell."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from pensieve.errors import NotFound, PensieveError, Unavailable

if TYPE_CHECKING:
    from pensieve.client import Client, Usage
    from pensieve.client.admin import Admin
    from pensieve.launch.engine import Runtime

LISTED_MAX = 20


@dataclass(frozen=True)
class Listed:
    conversation_id: str
    updated_at: datetime
    num_messages: int
    num_tokens: int


@dataclass(frozen=True)
class Spoken:
    role: str
    text: str
    revision: int


class Partner(Protocol):
    """`say` yields text; Ctrl-C while it does ends the turn and keeps what was said."""

    def say(
        self, conversation_id: str, text: str, system: str, sampling: Mapping[str, Any]
    ) -> Generator[str, None, None]: ...

    def cost(self) -> str: ...

    def latest(self) -> list[Listed]: ...

    def messages(self, conversation_id: str) -> list[Spoken]: ...

    def fork(self, conversation_id: str, target_id: str) -> None: ...

    def rewind(self, conversation_id: str, to_revision: int) -> None: ...

    def delete(self, conversation_id: str) -> None: ...

    def stats(self) -> list[tuple[str, float]]: ...

    def dead(self) -> bool:
        """Nothing will ever be answered again."""


def cost_line(figures: Mapping[str, Any]) -> str:
    seconds = figures["total_seconds"] - figures["first_token_seconds"]
    rate = max(figures["output_tokens"] - 1, 0) / seconds if seconds > 0 else 0.0
    return (
        f"[{figures['prompt_tokens']} tokens: {figures['new_tokens']} new, "
        f"{figures['device_tokens']} device, {figures['host_tokens']} host, "
        f"{figures['recomputed_tokens']} recomputed | "
        f"first token {figures['first_token_seconds'] * 1e3:.0f} ms | "
        f"{figures['output_tokens']} tokens at {rate:.1f}/s]"
    )


class EngineHere:
    """The engine in a thread of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._figures: Mapping[str, Any] = {}

    def say(
        self, conversation_id: str, text: str, system: str, sampling: Mapping[str, Any]
    ) -> Generator[str, None, None]:
        conversations = self.runtime.conversations
        try:
            self.runtime.store.get_conversation(conversation_id)
        except NotFound:
            conversations.create(conversation_id, system_prompt=system)
        chosen = replace(conversations.defaults, **sampling)
        live = conversations.send(conversation_id, text, sampling=chosen)
        shown = 0
        while live.finish is None:
            try:
                event = self.runtime.outbox.get(0.5)
                if event is None:
                    self._raise_if_dead()
                    continue
                conversations.handle(event)
                new, shown = live.texts[shown:], live.num_tokens
                yield "".join(new)
            except KeyboardInterrupt:
                conversations.cancel(live)
        if live.failure is not None:
            self._raise_if_dead()
            raise live.failure
        if live.tail:
            yield live.tail
        self._figures = live.figures

    def cost(self) -> str:
        return cost_line(self._figures)

    def latest(self) -> list[Listed]:
        page = self.runtime.store.list_conversations(LISTED_MAX)
        return [
            Listed(
                each.conversation_id,
                datetime.fromtimestamp(each.updated_at),
                each.num_messages,
                each.num_tokens,
            )
            for each in page.conversations
        ]

    def messages(self, conversation_id: str) -> list[Spoken]:
        found = self.runtime.store.messages(conversation_id)
        return [Spoken(each.role, each.content, each.revision) for each in found]

    def fork(self, conversation_id: str, target_id: str) -> None:
        self.runtime.conversations.fork(conversation_id, target_id)

    def rewind(self, conversation_id: str, to_revision: int) -> None:
        self.runtime.conversations.rewind(conversation_id, to_revision)

    def delete(self, conversation_id: str) -> None:
        self.runtime.conversations.delete(conversation_id)

    def stats(self) -> list[tuple[str, float]]:
        from pensieve.engine.messages import Answer, GetStats

        query_id = secrets.randbits(32)
        self.runtime.mailbox.put(GetStats(query_id))
        while (event := self.runtime.outbox.get(10.0)) is not None:
            if isinstance(event, Answer) and event.query_id == query_id:
                return list(event.figures.items())
            self.runtime.conversations.handle(event)
        self._raise_if_dead()
        raise Unavailable("the engine does not answer")

    def dead(self) -> bool:
        return self.runtime.failure is not None

    def _raise_if_dead(self) -> None:
        failure = self.runtime.failure
        if isinstance(failure, PensieveError):
            raise failure
        if failure is not None:
            raise Unavailable(f"the engine stopped: {type(failure).__name__}: {failure}")


class Daemon:
    """A daemon at an address; a turn outlives its connection."""

    def __init__(self, client: Client, admin: Callable[[], Admin]) -> None:
        self.client = client
        self._admin = admin
        self._usage: Usage | None = None

    def say(
        self, conversation_id: str, text: str, system: str, sampling: Mapping[str, Any]
    ) -> Generator[str, None, None]:
        from pensieve.client import Restarted

        conversation = self.client.conversation(conversation_id)
        if system:
            try:
                conversation.get()
            except NotFound:
                conversation.create(system_prompt=system)
        turn = conversation.send(text, **sampling)

        # An exception in the middle of grpc's own code could leave its locks held, so Ctrl-C asks the
        # server to end the turn, and the loop ends with it.
        def cancel(number: int, frame: object) -> None:
            threading.Thread(target=turn.cancel, daemon=True).start()

        before = signal.signal(signal.SIGINT, cancel)
        try:
            for event in turn:
                if isinstance(event, Restarted):
                    yield "\n[the engine was started again]\n"
                yield str(event)
        finally:
            signal.signal(signal.SIGINT, before)
        self._usage = turn.reply.usage

    def cost(self) -> str:
        from dataclasses import asdict

        assert self._usage is not None
        return cost_line(asdict(self._usage))

    def latest(self) -> list[Listed]:
        listed = []
        for each in self.client.conversations():
            when = each.updated_at.astimezone()
            listed.append(Listed(each.conversation_id, when, each.num_messages, each.num_tokens))
            if len(listed) == LISTED_MAX:
                break
        return listed

    def messages(self, conversation_id: str) -> list[Spoken]:
        found = self.client.conversation(conversation_id).messages()
        return [Spoken(each.role, each.text, each.revision) for each in found]

    def fork(self, conversation_id: str, target_id: str) -> None:
        self.client.conversation(conversation_id).fork(conversation_id=target_id)

    def rewind(self, conversation_id: str, to_revision: int) -> None:
        self.client.conversation(conversation_id).rewind(to_revision)

    def delete(self, conversation_id: str) -> None:
        self.client.conversation(conversation_id).delete()

    def stats(self) -> list[tuple[str, float]]:
        with self._admin() as admin:
            return sorted(admin.stats().more.items())

    def dead(self) -> bool:
        return False
