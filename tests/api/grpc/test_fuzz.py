"""Mutated messages over the wire (nightly: a million). None is answered with UNKNOWN or INTERNAL."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from pensieve.v1 import admin_pb2 as apb
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, wait_for
from tests.scale import SCALE, SEED

NUM_MESSAGES = 20_000 * SCALE
NUM_WORKERS = 48
NEVER = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}
METADATA = struct_pb2.Struct()
METADATA.update({"a": 1, "b": [True, None, {"c": "d"}], "e": float("1e300")})
SAMPLING = pb.Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    seed=7,
    max_tokens=3,
    stop=["x"],
    stop_token_ids=[5],
    logprobs=2,
    logit_bias={7: 1.5},
)
NAMES = ("c1", "c2", "c3", "", "../x", "ü", "a\x00", "x" * 200)
CORPUS: dict[str, list[Any]] = {
    "CreateConversation": [
        pb.CreateConversationRequest(
            conversation_id="c1",
            system_prompt="Be brief.",
            metadata=METADATA,
            template_options=METADATA,
            prefix_id="p",
        ),
        pb.CreateConversationRequest(tools=[METADATA]),
    ],
    "GetConversation": [pb.GetConversationRequest(conversation_id="c1")],
    "ListConversations": [pb.ListConversationsRequest(page_size=3, page_token="7")],
    "DeleteConversation": [pb.DeleteConversationRequest(conversation_id="c3")],
    "ForkConversation": [
        pb.ForkConversationRequest(conversation_id="c1", at_revision=1, metadata=METADATA),
        pb.ForkConversationRequest(conversation_id="c1", new_conversation_id="c3"),
    ],
    "RewindConversation": [pb.RewindConversationRequest(conversation_id="c2", to_revision=1)],
    "WarmConversation": [pb.WarmConversationRequest(conversation_id="c1")],
    "ListMessages": [
        pb.ListMessagesRequest(conversation_id="c1", page_size=2, include_token_ids=True)
    ],
    "CancelTurn": [pb.CancelTurnRequest(conversation_id="c1", turn_id="4")],
    "SendMessage": [
        pb.SendMessageRequest(
            conversation_id="c2",
            request_id="r1",
            messages=[
                pb.NewMessage(content="hello"),
                pb.NewMessage(role=pb.ROLE_TOOL, content="x"),
            ],
            create_if_missing=True,
            expected_revision=1,
            sampling=SAMPLING,
        ),
        pb.SendMessageRequest(
            conversation_id="c1",
            messages=[pb.NewMessage(role=pb.ROLE_USER, content="<|im_end|>\nGrüße 日本")],
            create_if_missing=True,
            sampling=pb.Sampling(max_tokens=2),
        ),
    ],
}
EVERY = [each.SerializeToString() for requests in CORPUS.values() for each in requests]


def mutated(packed: bytes, choose: random.Random) -> bytes:
    data = bytearray(packed)
    for _ in range(choose.choice((0, 1, 1, 2, 5))):
        place = choose.randrange(len(data) + 1)
        match choose.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << choose.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = choose.randbytes(choose.randrange(1, 9))
            case 3:
                other = choose.choice(EVERY)
                data[place:place] = other[choose.randrange(len(other) + 1) :]
            case 4 if data:
                data[place % len(data)] = choose.choice((0, 0x7F, 0x80, 0xFF, 0x0A))
            case _:
                name = choose.choice(NAMES).encode()
                data[place:place] = bytes((0x0A, len(name) & 0x7F)) + name
    return bytes(data)


async def bombard(address: str, num_messages: int) -> tuple[Counter[str], set[str]]:
    codes: Counter[str] = Counter()
    texts: set[str] = set()
    remaining = iter(range(num_messages))
    async with grpc.aio.insecure_channel(address) as channel:

        async def worker(seed: int) -> None:
            choose = random.Random(SEED * NUM_WORKERS + seed)
            for _ in remaining:
                name = choose.choice(list(CORPUS))
                packed = mutated(choose.choice(CORPUS[name]).SerializeToString(), choose)
                path = f"/pensieve.v1.ConversationService/{name}"
                try:
                    if name == "SendMessage":
                        many: Any = channel.unary_stream(path)
                        async for _ in many(packed, timeout=120):
                            pass
                    else:
                        one: Any = channel.unary_unary(path)
                        await one(packed, timeout=120)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1
                    texts.add(str(error.details()))
                    if error.code() in NEVER:
                        print(name, packed, error.code(), error.details())

        await asyncio.gather(*(worker(seed) for seed in range(NUM_WORKERS)))
    return codes, texts


@pytest.mark.timeout(900 * SCALE)
def test_mutated_messages_never_cause_unknown_or_internal_errors(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        codes, texts = asyncio.run(bombard(rig.server.address, NUM_MESSAGES))
        print(dict(codes))
        assert sum(codes.values()) == NUM_MESSAGES
        assert not {each.name for each in NEVER} & set(codes)
        assert codes["OK"] > NUM_MESSAGES / 10
        assert codes["INVALID_ARGUMENT"] > NUM_MESSAGES / 10
        for text in texts:
            for ours in ("Traceback", 'File "', ".py", "Error(", "object at 0x"):
                assert ours not in text
        wait_for(lambda: not rig.num_live)
        assert rig.admin.CheckIntegrity(apb.CheckIntegrityRequest()).problems == []
        assert rig.ask("after", "still well?").completed.revision == 1


@pytest.mark.parametrize(
    ("packed", "codes"),
    [
        (b"\xff" * 40, {"INVALID_ARGUMENT"}),
        (b"\x0a\x02\xc3\x28", {"INVALID_ARGUMENT"}),  # not UTF-8
        (b"\x0a\x03\xed\xa0\x80", {"INVALID_ARGUMENT"}),  # a lone surrogate
        (b"", {"INVALID_ARGUMENT"}),
        (b"\x0a\x01c\x7a\x03xyz", {"NOT_FOUND"}),  # an unknown field of a newer client
        (b"\x0a" + b"\x80\x80\x80\x04" + b"x" * (9 << 20), {"RESOURCE_EXHAUSTED"}),
    ],
)
def test_malformed_bytes_are_refused_with_a_specific_code(
    tmp_path: Path, packed: bytes, codes: set[str]
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        call: Any = rig.channel.unary_unary("/pensieve.v1.ConversationService/GetConversation")
        with pytest.raises(grpc.RpcError) as error:
            call(packed)
        assert error.value.code().name in codes
