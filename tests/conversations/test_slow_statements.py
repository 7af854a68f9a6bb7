"""A database statement that runs for too long, as clients see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.store import conversation_rows, turn_rows
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig
from tests.store.faulty import writer_of

LONG = """
    WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 30000000)
    SELECT count(*) FROM n
"""  # runs for seconds unless it is interrupted


def takes_long(conn: Any, *arguments: object) -> Any:
    return conn.execute(LONG).fetchone()


def test_a_slow_statement_ends_with_unavailable_and_the_next_call_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement runs in the store thread, and another statement in the read thread."""
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("tea", "hello")
        reader: Any = rig.daemon.reader
        writer_of(rig.daemon.store).limit.seconds = reader._snapshots._limit.seconds = 0.05
        with monkeypatch.context() as patch:
            patch.setattr(turn_rows, "insert_turn", takes_long)
            patch.setattr(conversation_rows, "conversations_before", takes_long)
            calls = (
                lambda: rig.ask("tea", "more"),
                lambda: rig.stub.ListConversations(pb.ListConversationsRequest(), timeout=60),
            )
            for call in calls:
                with pytest.raises(grpc.RpcError) as failed:
                    call()
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(rig.stub.ListConversations(pb.ListConversationsRequest()).conversations) == 1
        assert rig.ask("tea", "more").completed.revision == 2
