"""Titles of conversations, as clients and the page get them."""

from __future__ import annotations

from pathlib import Path

from pensieve.client import Client
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig


def test_listed_and_fetched_conversations_have_titles(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("tea", "How do I brew tea?\nGreen tea.", sampling=pb.Sampling(max_tokens=2))
        named = pb.CreateConversationRequest(conversation_id="named")
        named.metadata.update({"title": "My talk"})
        rig.stub.CreateConversation(named)
        with Client(rig.server.address) as client:
            found = {each.conversation_id: each.title for each in client.conversations()}
            assert found == {"tea": "How do I brew tea? Green tea.", "named": "My talk"}
            assert client.conversation("tea").get().title == found["tea"]
