"""Three scripted daemons with one history, and a sync or async client with all their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pensieve.client import AddressState, AsyncClient, Client, Reply, Retry
from tests.client.scripted import ScriptedServer

QUICK = Retry(retries=3, first_seconds=0.001, most_seconds=0.002)


class Fleet:
    """Servers that share a history. A stopped server can be started again at its address."""

    def __init__(self, num_servers: int = 3) -> None:
        first = ScriptedServer()
        self.servers = [first, *(ScriptedServer(history_of=first) for _ in range(num_servers - 1))]
        self.addresses = [server.address for server in self.servers]
        self.all_servers = [*self.servers]  # also the stopped servers

    def __enter__(self) -> Self:
        for server in self.servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.__exit__()

    def server_at(self, address: str) -> ScriptedServer:
        return self.servers[self.addresses.index(address)]

    def stop(self, address: str) -> None:
        """Cut the server's connections and stop listening."""
        self.server_at(address).__exit__()

    def start(self, address: str) -> ScriptedServer:
        """Start the server again, with the shared history."""
        server = ScriptedServer(address, history_of=self.servers[0])
        assert server.address == address
        self.all_servers.append(server)
        self.servers[self.addresses.index(address)] = server.__enter__()
        return server

    def addresses_called(self, conversation_id: str, name: str = "SendMessage") -> list[str]:
        """Return the addresses that received such calls about this conversation, in address order."""
        return [
            server.address
            for server in self.servers
            for called, request, _ in server.calls
            if called == name and request.conversation_id == conversation_id
        ]

    def forget_calls(self) -> None:
        for server in self.servers:
            server.calls.clear()


class SyncCaller:
    """The sync client."""

    def __init__(self, addresses: list[str], retry: Retry = QUICK, **options: Any) -> None:
        self.slept: list[float] = []
        options.setdefault("sleep", self.slept.append)
        self.client = Client(addresses, retry=retry, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()

    def do(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of a call of the client."""
        return call(self.client)

    def ask(self, conversation_id: str, text: str, **options: Any) -> Reply:
        return self.client.conversation(conversation_id).ask(text, **options)

    def events(
        self,
        conversation_id: str,
        text: str,
        after: Callable[[int], None] = lambda n: None,
        **options: Any,
    ) -> list[Any]:
        """Read a turn and return its events. `after` is called after each event with its number."""
        seen: list[Any] = []
        for event in self.client.conversation(conversation_id).send(text, **options):
            seen.append(event)
            after(len(seen))
        return seen

    def collect(self, call: Callable[[Any], Any]) -> list[Any]:
        return list(call(self.client))

    @property
    def states(self) -> dict[str, AddressState]:
        return {each.address: each for each in self.client.addresses}


class AsyncCaller(SyncCaller):
    """The async client, in an event loop that runs only during calls."""

    def __init__(self, addresses: list[str], retry: Retry = QUICK, **options: Any) -> None:
        self.slept = []
        self._runner = asyncio.Runner()

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        options.setdefault("sleep", sleep)
        self.client: Any = AsyncClient(addresses, retry=replace(retry), **options)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self.client.close())
        self._runner.close()

    def do(self, call: Callable[[Any], Any]) -> Any:
        async def main() -> Any:
            return await call(self.client)

        return self._runner.run(main())

    def ask(self, conversation_id: str, text: str, **options: Any) -> Reply:
        talk = self.client.conversation(conversation_id)
        return self._runner.run(talk.ask(text, **options))

    def events(
        self,
        conversation_id: str,
        text: str,
        after: Callable[[int], None] = lambda n: None,
        **options: Any,
    ) -> list[Any]:
        async def main() -> list[Any]:
            seen: list[Any] = []
            async for event in self.client.conversation(conversation_id).send(text, **options):
                seen.append(event)
                after(len(seen))
            return seen

        return self._runner.run(main())

    def collect(self, call: Callable[[Any], Any]) -> list[Any]:
        async def main() -> list[Any]:
            return [each async for each in call(self.client)]

        return self._runner.run(main())
