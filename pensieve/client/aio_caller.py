"""What an `AsyncClient` calls a daemon with: a connection, timeouts, and when to try again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import grpc

from pensieve.client.aio_connection import AsyncConnection, Sleep
from pensieve.client.channel import DEFAULT_ADDRESS, Tls
from pensieve.client.requests import PagedRequest, PagedResponse
from pensieve.client.retry import Deadline, Retry, Tries
from pensieve.errors import Loading, PensieveError

PAGE_SIZE = 500  # items of a list that one call brings
Request = TypeVar("Request")
Response = TypeVar("Response")
PageRequest = TypeVar("PageRequest", bound=PagedRequest)
Page = TypeVar("Page", bound=PagedResponse)


class AsyncCaller:
    """The calls of a client."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls = False,
        timeout: float | None = None,
        retry: Retry | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._sleep = sleep
        self._connection = AsyncConnection(address, token, tls)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.address}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection: calls under way end, and later ones raise InvalidArgument.

        Turns that are being read are left, as by their own `close`.
        """
        await self._connection.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout: float | None = None,
        *,
        repeat: bool = False,
    ) -> Response:
        """Call one method of a gRPC stub, with this client's token, timeout and errors.

        With `repeat` the request may be sent more than once, as `retry` says; pass it only for methods
        whose second call does no harm.  A server that loads its model has done nothing, so that is waited for
        with any method.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        tries = Tries(self.retry, deadline)
        await self._connection.wait_for_endings(getattr(request, "conversation_id", ""), deadline)
        while True:
            try:
                return await self._connection.unary(method, request, deadline)
            except PensieveError as error:
                if not repeat and not isinstance(error, Loading):
                    raise
                pause = tries.pause(error)
            await self._sleep(pause)

    async def pages(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[PageRequest, Page],
        request: PageRequest,
        timeout: float | None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[Page]:
        """The pages of a list, each fetched by a call with this `timeout` when the iteration comes to it."""
        request.page_size = page_size
        while True:
            page = await self.call(method, request, timeout, repeat=True)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
