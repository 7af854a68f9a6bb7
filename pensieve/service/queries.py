"""Questions to the engine, and the answers that come back among its events; the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pensieve.engine.messages import Answer, Message
from pensieve.errors import PensieveError, Unavailable


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
        self._waiting: dict[int, asyncio.Future[Answer]] = {}  # by query id
        self._num_queries = 0

    async def ask(self, message_for: Callable[[int], Message]) -> Answer:
        """Put the message made for a query's id, and wait for its answer."""
        self._num_queries += 1
        query_id = self._num_queries
        future = self._waiting[query_id] = self._loop.create_future()
        try:
            self._put(message_for(query_id))
            return await asyncio.wait_for(future, self._answer_seconds)
        except TimeoutError:
            raise Unavailable("the engine does not answer") from None
        finally:
            self._waiting.pop(query_id, None)

    def answered(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.query_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail_all(self, failure: PensieveError) -> None:
        """The engine that they were for is gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)
        self._waiting.clear()
