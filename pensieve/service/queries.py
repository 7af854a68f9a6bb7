"""Questions to the engine, and the answers that come back among its events; the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pensieve.engine.messages import Answer, KvExported, Message, Reply
from pensieve.errors import PensieveError, Unavailable

R = TypeVar("R", Answer, KvExported)


class Queries:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[Message], None],
        answer_seconds: float,
    ) -> None:
        self._loop = loop
        self._put = put
        self._answer_seconds = answer_seconds
        self._waiting: dict[int, asyncio.Future[Reply]] = {}  # by query id
        self._num_queries = 0

    async def ask(self, message_for: Callable[[int], Message]) -> Answer:
        """Put the message made for a query's id, and wait for its answer."""
        return await self._reply(message_for, Answer)

    async def export(self, message_for: Callable[[int], Message]) -> KvExported:
        """The same of KV."""
        return await self._reply(message_for, KvExported)

    async def _reply(self, message_for: Callable[[int], Message], kind: type[R]) -> R:
        self._num_queries += 1
        query_id = self._num_queries
        future = self._waiting[query_id] = self._loop.create_future()
        try:
            self._put(message_for(query_id))
            reply = await asyncio.wait_for(future, self._answer_seconds)
            assert isinstance(reply, kind), f"{reply} answers something else"
            return reply
        except TimeoutError:
            raise Unavailable("the engine does not answer") from None
        finally:
            self._waiting.pop(query_id, None)

    def answered(self, answer: Reply) -> None:
        future = self._waiting.pop(answer.query_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail_all(self, failure: PensieveError) -> None:
        """The engine that they were for is gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)
        self._waiting.clear()
