"""The table of methods that Ray's proxy gets, and the keys of calls whose metadata has none."""

from __future__ import annotations

import pytest

from pensieve.cluster.grpc_edge import key_of
from pensieve.cluster.grpc_methods import Method, methods
from pensieve.v1 import conversation_pb2 as pb

METHODS = {each.name: each for each in methods()}


def test_every_method_has_a_name_of_its_own_because_ray_drops_the_service() -> None:
    names = [each.name for each in methods()]
    assert len(names) == len(set(names)) == 38
    assert METHODS["SendMessage"].gives_stream
    assert METHODS["CreateJob"].takes_stream
    assert METHODS["GetStats"].path == "/pensieve.v1.AdminService/GetStats"


@pytest.mark.parametrize(
    ("method", "request_", "key"),
    [
        ("SendMessage", pb.SendMessageRequest(conversation_id="trip-42"), "trip-42"),
        ("ForkConversation", pb.ForkConversationRequest(conversation_id="a"), "a"),
        ("CreateConversation", pb.CreateConversationRequest(), ""),
        ("ListConversations", pb.ListConversationsRequest(), ""),
    ],
)
def test_a_request_names_its_conversation(method: str, request_: object, key: str) -> None:
    assert key_of(METHODS[method], (), request_.SerializeToString()) == key  # type: ignore[attr-defined]


def test_metadata_goes_before_the_request() -> None:
    request = pb.SendMessageRequest(conversation_id="trip-42").SerializeToString()
    assert key_of(METHODS["SendMessage"], (("session_id", "other"),), request) == ""


def test_a_request_that_is_no_message_goes_on_without_a_key() -> None:
    assert key_of(METHODS["SendMessage"], (), b"\xff\xff") == ""
    create: Method = METHODS["CreateJob"]
    assert key_of(create, (), None) == ""
