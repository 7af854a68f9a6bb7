"""The base of the clients: sends calls over a connection, with timeouts and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import grpc

from pensieve.client.addresses import Addresses, AddressState, Route, is_temporary_refusal
from pensieve.client.aio_connection import AsyncConnection, AsyncLink, Sleep
from pensieve.client.channel import Address, Tls, key_of, names_of
from pensieve.client.requests import PagedRequest, PagedResponse
from pensieve.client.retry import Deadline, Retry, Tries
from pensieve.errors import InvalidArgument, PensieveError

PAGE_SIZE = 500  # items per page of a list
Request = TypeVar("Request")
Response = TypeVar("Response")
PageRequest = TypeVar("PageRequest", bound=PagedRequest)
Page = TypeVar("Page", bound=PagedResponse)


class AsyncBaseClient:
    """Sends calls with a client's token, timeout and retries."""

    _is_for_one_daemon: ClassVar[bool] = False

    def __init__(
        self,
        address: Address | None = None,
        *,
        token: str | None = None,
        tls: Tls = False,
        timeout: float | None = None,
        retry: Retry | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        names = names_of(address)
        if self._is_for_one_daemon and len(names) > 1:
            raise InvalidArgument(
                "address",
                f"{type(self).__name__} connects to one daemon; pass one of {', '.join(names)}",
            )
        self.address = address if isinstance(address, str) else ",".join(names)
        self.timeout = timeout
        self.retry = retry or Retry()
        self._sleep = sleep
        self._connection = AsyncConnection(Addresses(names, self.retry), token, tls)

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

    @property
    def addresses(self) -> tuple[AddressState, ...]:
        """The client's addresses and the state of each address. Sends nothing."""
        return self._connection.addresses.states()

    def address_of(self, conversation_id: str) -> str:
        """Return the address to which this client first sends requests about `conversation_id`."""
        return self._connection.addresses.order(conversation_id)[0]

    async def close(self) -> None:
        """Close the connection. Running calls end, and later calls raise InvalidArgument.

        Turns that are being read are stopped, as if each of them was closed.
        """
        await self._connection.close()

    async def call(
        self,
        method: Callable[[AsyncLink], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        timeout: float | None = None,
        *,
        repeat: bool = False,
    ) -> Response:
        """Call a gRPC method with this client's token and timeout. Failures raise a PensieveError.

        `method` gets a link (the channel to one address) and returns the stub's method to call. `request`
        names a conversation or job. Its home, the address that is asked first (addresses.py), gets the
        request. While the home is unreachable, the next address gets it.

        With `repeat`, the request may be sent more than once, as `retry` allows. Pass it only for methods
        that are safe to call twice. Without `repeat`, the client still waits for a server that is loading its
        model, because such a server has not acted on the request.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        route = self._connection.route(key_of(request))
        await self._connection.wait_for_endings(getattr(request, "conversation_id", ""), deadline)
        return await self._send_with_retries(
            lambda: self._connection.unary(method, request, deadline, route),
            deadline,
            route,
            repeat,
        )

    async def send_all(
        self,
        method: Callable[[AsyncLink], grpc.aio.StreamUnaryMultiCallable[Request, Response]],
        requests: Callable[[], Iterator[Request]],
        key: str,
        timeout: float | None = None,
    ) -> Response:
        """Like `call`, for a method that takes a stream of requests about the conversation `key`.

        `requests` is called for each try and returns a new stream.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        route = self._connection.route(key)
        return await self._send_with_retries(
            lambda: self._connection.send_all(method, requests(), deadline, route),
            deadline,
            route,
            repeat=False,
        )

    async def _send_with_retries(
        self,
        send: Callable[[], Awaitable[Response]],
        deadline: Deadline,
        route: Route,
        repeat: bool,
    ) -> Response:
        tries = Tries(self.retry, deadline)
        while True:
            try:
                return await send()
            except PensieveError as error:
                failure = error
            if route.try_next_address(failure, repeat):
                continue
            explained = route.explained(failure)
            if not repeat and not is_temporary_refusal(failure):
                raise explained
            await self._sleep(tries.pause(explained))
            route.begin_round()

    async def pages(
        self,
        method: Callable[[AsyncLink], grpc.aio.UnaryUnaryMultiCallable[PageRequest, Page]],
        request: PageRequest,
        timeout: float | None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[Page]:
        """Iterate over the pages of a list. Each page is one call with this `timeout`."""
        request.page_size = page_size
        while True:
            page = await self.call(method, request, timeout, repeat=True)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
