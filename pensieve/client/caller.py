"""What a `Client` calls a daemon with: a connection, timeouts, and when to try again.

Generated from aio_caller.py by scripts/generate_sync_client; do not edit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

import grpc

from pensieve.client.channel import DEFAULT_ADDRESS, Tls
from pensieve.client.connection import Connection, Sleep
from pensieve.client.requests import PagedRequest, PagedResponse
from pensieve.client.retry import Deadline, Retry, Tries
from pensieve.errors import Loading, PensieveError

PAGE_SIZE = 500  # items of a list that one call brings
Request = TypeVar("Request")
Response = TypeVar("Response")
PageRequest = TypeVar("PageRequest", bound=PagedRequest)
Page = TypeVar("Page", bound=PagedResponse)


class Caller:
    """The calls of a client."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls = False,
        timeout: float | None = None,
        retry: Retry | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._sleep = sleep
        self._connection = Connection(address, token, tls)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection: calls under way end, and later ones raise InvalidArgument.

        Turns that are being read are left, as by their own `close`.
        """
        self._connection.close()

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
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
        self._connection.wait_for_endings(getattr(request, "conversation_id", ""), deadline)
        while True:
            try:
                return self._connection.unary(method, request, deadline)
            except PensieveError as error:
                if not repeat and not isinstance(error, Loading):
                    raise
                pause = tries.pause(error)
            self._sleep(pause)

    def pages(
        self,
        method: grpc.UnaryUnaryMultiCallable[PageRequest, Page],
        request: PageRequest,
        timeout: float | None,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[Page]:
        """The pages of a list, each fetched by a call with this `timeout` when the iteration comes to it."""
        request.page_size = page_size
        while True:
            page = self.call(method, request, timeout, repeat=True)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
