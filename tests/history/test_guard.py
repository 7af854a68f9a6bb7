"""Who has no secret is refused by every method, before anything of the request is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.history.connection import PROTOCOL_VERSION
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import status_pb2
from tests.history.rig_service import ServiceRig

SECRET = "a-secret-of-several-words"
PATH = f"/{pb.DESCRIPTOR.services_by_name['HistoryService'].full_name}/"
METHODS = [each.name for each in pb.DESCRIPTOR.services_by_name["HistoryService"].methods]
KNOWN = (("authorization", f"Bearer {SECRET}"),)
WRONG = (("authorization", f"Bearer {SECRET}x"),)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    with ServiceRig(Path(tmp_path_factory.mktemp("history")), secret=SECRET) as found:
        yield found


class Unsent:
    """A client's request that does not come until the call has ended."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __enter__(self) -> Iterator[bytes]:
        return iter(self)

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def __iter__(self) -> Iterator[bytes]:
        self._ended.wait()
        yield from ()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("metadata", [(), WRONG], ids=["none", "wrong"])
def test_no_method_reads_what_a_stranger_sends(
    rig: ServiceRig, method: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    call: Any = rig.direct.stream_stream(PATH + method)
    with Unsent() as requests, pytest.raises(grpc.RpcError) as caught:
        list(call(requests, metadata=metadata, timeout=20))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "secret" in str(caught.value.details())


def test_a_replica_with_the_secret_is_served(rig: ServiceRig) -> None:
    opening = pb.ServeRequest(open=pb.OpenSession(version=PROTOCOL_VERSION, replica="a"))
    serve = rig.direct.stream_stream(
        PATH + "Serve",
        request_serializer=pb.ServeRequest.SerializeToString,
        response_deserializer=pb.ServeResponse.FromString,
    )
    assert next(serve(iter([opening]), metadata=KNOWN, timeout=20)).HasField("opened")
    listed: Any = rig.direct.unary_unary(
        PATH + "ListReplicas", response_deserializer=pb.ListReplicasResponse.FromString
    )
    assert [each.name for each in listed(b"", metadata=KNOWN, timeout=20).replicas] == ["a"]


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_health_is_told_to_strangers_without_reading_their_request(
    rig: ServiceRig, method: str
) -> None:
    call: Any = rig.direct.stream_stream(
        f"/grpc.health.v1.Health/{method}",
        response_deserializer=status_pb2.HealthCheckResponse.FromString,
    )
    with Unsent() as requests:
        stream = call(requests, timeout=20)
        assert next(stream).status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING
        stream.cancel()
