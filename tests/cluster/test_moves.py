"""Exact tokens while conversations move: a real model, and three daemons with one history.

Each request goes to any of the daemons. If that daemon does not own the conversation, the owner answers. If
the owner is unreachable, the called daemon takes the conversation. It then recomputes the KV, or fetches the
KV from the previous owner. It must not use older KV of its own, from an earlier epoch. Every sampled token
must equal the token that plain transformers gives after the same tokens.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pensieve.api.grpc import forwarding
from pensieve.api.grpc.replica import KvFetcher
from pensieve.client import Client
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.hand_over import KvReceiver
from tests.api.http.rig_http import HttpRig
from tests.cluster import owner_log
from tests.cluster.sharing import needs_sqlite, sharing
from tests.conversations.exactness import RandomHttpClient, assert_exact, run_clients
from tests.conversations.rig import Reference, write_model
from tests.conversations.rig_daemon import DaemonRig
from tests.scale import SCALE, SEED
from tests.text.families import QWEN_2_5

ENGINE = (sys.executable, "-m", "pensieve.launch.engine_process")
TINY = {"device_cache": "480t", "host_cache": "480t", "chunk_tokens": "8"}
TINY |= {"token_budget": "48", "turns_max": "12", "threads": "1"}


async def receive_kv(rig: DaemonRig, always: bool) -> KvReceiver:
    receiver = KvReceiver(rig.daemon, KvFetcher().fetch, always=always)
    rig.daemon.events.begun.subscribe(receiver.turn_begun)
    return receiver


def lose_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two thirds of the forwarded calls fail, so that the called daemon takes the conversation."""
    sent, choose = forwarding.Forwarder._send, random.Random(SEED)

    async def may_send(self: Any, *given: Any) -> None:
        if choose.randrange(3):
            raise forwarding.Unreachable
        await sent(self, *given)

    monkeypatch.setattr(forwarding.Forwarder, "_send", may_send)


@needs_sqlite
@pytest.mark.timeout(600 * SCALE)
@pytest.mark.parametrize("moves_kv", [True, False], ids=["with_kv", "without"])
def test_replies_equal_plain_transformers_wherever_conversations_move(
    tmp_path: Path, moves_kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_owners(monkeypatch)
    folder = write_model(tmp_path / "model", QWEN_2_5, "llama-gqa")
    done: Counter[str] = Counter()
    shape: dict[str, Any] = {"program": ENGINE, "written": TINY, "model_folder": folder}
    listening = {"hand_over": moves_kv, "http": "127.0.0.1:0"}
    config = DaemonConfig()
    with sharing(tmp_path, "abc", listening, config=config, **shape) as rigs:
        http = [HttpRig(rig).address for rig in rigs]
        receivers = [rig.call(receive_kv(rig, True)) for rig in rigs] if moves_kv else []
        for life in range(SCALE):
            crowd = [
                RandomHttpClient(http, (SEED + life) * 100 + number, 14, "is served by")
                for number in range(12)
            ]
            done += run_clients(crowd)
        claims = owner_log.events(f"sqlite://{tmp_path / 'history.db'}", "claimed")
        num_moves = sum(each["previous"] > 0 for each in claims)
        moved = sum(each.num_tokens for each in receivers)
        reference = Reference(folder)
        counts = []
        with Client(rigs[0].server.address) as client:
            for state in client.conversations():
                conversation = client.conversation(state.conversation_id)
                counts.append(
                    reference.wrong_of(list(conversation.messages(include_token_ids=True)))
                )
    print(f"moved {num_moves} times with KV of {moved} tokens; {dict(done)}")
    assert_exact(counts, 1000)
    assert num_moves > 30
    assert (moved > 500) == moves_kv
