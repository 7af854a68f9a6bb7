"""A conversation moves to another daemon with its KV: the replies are the same, and nothing is recomputed.

Daemon A has run all conversations. B has a copy of A's history, and no KV. Each test uses its own
conversation. B's reply with KV from A is compared with two other replies: A's own reply, and B's reply in a
fork of the conversation. The fork's turn has another cache_salt, so B recomputes all its KV.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc.replica import KvFetcher
from pensieve.conversations import hand_over
from pensieve.conversations.hand_over import KvHeader, KvPart, KvReceiver, Parts, PullResult
from pensieve.errors import Unavailable
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import replica_pb2, replica_pb2_grpc
from tests.conversations.proxy import Proxy
from tests.conversations.rig_daemon import DaemonRig

ENGINE = (sys.executable, "-m", "pensieve.launch.engine_process")
ENGINE_SETTINGS = {
    "device_cache": "4000t",
    "host_cache": "4000t",
    "threads": "1",
    "check_kv": "true",
}
GREEDY = pb.Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
NAMES = [f"c{number}" for number in range(20)]
SIZE = 32


def rig(data: Path, **written: str) -> DaemonRig:
    listening = Listening("127.0.0.1:0", data / "admin.sock", hand_over=True)
    return DaemonRig(
        data, program=ENGINE, written={**ENGINE_SETTINGS, **written}, listening=listening
    )


@dataclass
class TwoDaemons:
    """A, B, and the conversations that no test has used yet."""

    a: DaemonRig
    b: DaemonRig
    unused: list[str] = field(default_factory=lambda: list(NAMES))

    def next_unused(self) -> str:
        return self.unused.pop()

    def log_of(self, name: str) -> list[int]:
        store = self.b.daemon.store
        return list(self.b.call(self.b.daemon.threads.in_store("", store.log, name)))

    def pull(
        self, name: str, fetch: hand_over.Fetch | None = None, address: str = "", **options: Any
    ) -> PullResult:
        async def pull() -> PullResult:
            options.setdefault("always", True)
            receiver = KvReceiver(self.b.daemon, fetch or KvFetcher().fetch, **options)
            return await receiver.pull(address or self.a.server.address, "", name)

        pulled = self.b.call(pull())
        assert isinstance(pulled, PullResult)
        return pulled

    def check_replies(self, name: str, recomputed: int | None = None) -> None:
        """Compare the three replies. `recomputed`: the number of tokens that B must have recomputed."""
        text = f"And what did you say of {name}?"
        moved = self.b.ask(name, text, sampling=GREEDY)
        anew = self.b.ask(f"{name}-anew", text, sampling=GREEDY, cache_salt="anew")
        stayed = self.a.ask(name, text, sampling=GREEDY)
        assert moved.token_ids == anew.token_ids == stayed.token_ids
        assert len(moved.token_ids) == 8
        history = len(self.log_of(name)) - 8 - moved.completed.usage.new_tokens
        assert anew.completed.usage.recomputed_tokens == history
        if recomputed is not None:
            assert moved.completed.usage.recomputed_tokens == recomputed


def run_conversations(one: DaemonRig) -> None:
    """Run two turns in each conversation, and fork it."""
    for number, name in enumerate(NAMES):
        words = (
            f" {name} is one of {number + 2}." * 12
        )  # no two begin alike: they would share chunks
        one.ask(name, f"{name}, {number}: tell me about it." + words, sampling=GREEDY)
        one.ask(name, f"And of {number}?" + " Say more." * (number % 5), sampling=GREEDY)
        fork = pb.ForkConversationRequest(conversation_id=name, new_conversation_id=f"{name}-anew")
        one.stub.ForkConversation(fork)


def copy_of_data(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.sock", "*lock*")))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoDaemons]:
    folder = tmp_path_factory.mktemp("two")
    with rig(folder / "a") as a:
        run_conversations(a)
        with rig(copy_of_data(folder / "a", folder / "b")) as b:
            yield TwoDaemons(a, b)


def fetch_with_changes(change: Callable[[int, KvPart], KvPart | None]) -> hand_over.Fetch:
    """Return a Fetch from A that changes each part. If `change` returns None, the connection breaks there."""

    async def fetch(address: str, tenant: str, conversation_id: str, num_tokens: int) -> Parts:
        number = 0
        async for each in KvFetcher().fetch(address, tenant, conversation_id, num_tokens):
            if isinstance(each, KvHeader):
                yield each
                continue
            number += 1
            part = change(number, each)
            if part is None:
                raise Unavailable("the connection is broken")
            yield part

    return fetch


def with_flipped_bit(part: KvPart, at: int) -> KvPart:
    body = bytearray(part.body)
    body[at] ^= 4
    return part._replace(body=bytes(body))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each part have only one chunk."""
    monkeypatch.setattr(hand_over, "PART_BYTES", 1)


def test_a_moved_conversation_takes_its_kv_along(two: TwoDaemons) -> None:
    name = two.next_unused()
    pulled = two.pull(name)
    history = len(two.log_of(name)) - 1
    assert (pulled.tokens, pulled.why_no_more) == (history, "")
    ready = two.b.daemon.engine.ready
    assert ready is not None
    assert pulled.num_bytes == history * ready.page_bytes // SIZE
    two.check_replies(name, recomputed=0)


@pytest.mark.usefixtures("small_parts")
def test_kv_arrives_in_parts_of_one_chunk_if_parts_are_small(two: TwoDaemons) -> None:
    name = two.next_unused()
    parts: list[KvPart] = []
    two.pull(name, fetch_with_changes(lambda number, part: parts.append(part) or part))
    num_chunks = -(-(len(two.log_of(name)) - 1) // SIZE)
    assert [part.first_chunk for part in parts] == list(range(num_chunks - 1, -1, -1))
    two.check_replies(name, recomputed=0)


@pytest.mark.usefixtures("small_parts")
def test_after_a_broken_connection_the_received_last_chunks_are_used(two: TwoDaemons) -> None:
    name = two.next_unused()
    pulled = two.pull(name, fetch_with_changes(lambda number, part: part if number < 4 else None))
    history = len(two.log_of(name)) - 1
    num_chunks = -(-history // SIZE)
    assert pulled.tokens == history - (num_chunks - 3) * SIZE
    assert "broken" in pulled.why_no_more
    two.check_replies(name, recomputed=(num_chunks - 3) * SIZE)


def test_after_a_connection_reset_within_a_part_only_missing_kv_is_recomputed(
    two: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, proxy = two.next_unused(), Proxy(two.a.server.address)
    monkeypatch.setattr("pensieve.api.grpc.replica.PIECE_BYTES", 4096)
    num_seen = 0
    check_identity = hand_over._check_identity

    def reset_then(*arguments: Any) -> None:
        nonlocal num_seen
        num_seen += 1
        check_identity(*arguments)
        proxy.freeze()
        proxy.reset()

    monkeypatch.setattr(hand_over, "_check_identity", reset_then)
    pulled = two.pull(name, address=proxy.address)
    assert num_seen == 1
    assert "cannot fetch KV" in pulled.why_no_more
    two.check_replies(name, len(two.log_of(name)) - 1 - pulled.tokens)
    proxy.close()


def test_only_the_chunk_with_changed_bytes_is_recomputed(two: TwoDaemons) -> None:
    name = two.next_unused()
    pulled = two.pull(name, fetch_with_changes(lambda number, part: with_flipped_bit(part, 0)))
    history = len(two.log_of(name)) - 1
    assert pulled.tokens == history - SIZE
    assert pulled.why_no_more
    two.check_replies(name, recomputed=SIZE)


@pytest.mark.usefixtures("small_parts")
def test_the_parts_after_a_damaged_first_part_are_used(two: TwoDaemons) -> None:
    name = two.next_unused()
    pulled = two.pull(
        name, fetch_with_changes(lambda n, part: with_flipped_bit(part, 9) if n == 1 else part)
    )
    history = len(two.log_of(name)) - 1
    last = (history - 1) % SIZE + 1
    assert pulled.tokens == history - last
    two.check_replies(name, recomputed=last)


def test_kv_of_other_tokens_is_not_adopted(two: TwoDaemons) -> None:
    """A was rewound and has generated another reply since."""
    name = two.next_unused()
    rewind = pb.RewindConversationRequest(conversation_id=name, to_revision=1)
    two.a.stub.RewindConversation(rewind)
    two.a.ask(name, "Something else." + " And again." * 9, sampling=GREEDY)
    pulled = two.pull(name)
    assert pulled.tokens == 0
    assert pulled.why_no_more == "the other daemon has KV of other tokens"
    said = two.b.ask(name, "Well?", sampling=GREEDY)
    assert said.token_ids == two.b.ask(f"{name}-anew", "Well?", sampling=GREEDY).token_ids
    assert said.completed.usage.host_tokens == 0


@pytest.mark.parametrize("what", ["weights", "kv_heads", "chunk_tokens", "fingerprint", "new"])
def test_kv_of_an_incompatible_engine_is_refused(two: TwoDaemons, what: str) -> None:
    async def fetch(*arguments: Any) -> Parts:
        async for each in KvFetcher().fetch(*arguments):
            yield KvHeader({**each.identity, what: "x"}) if isinstance(each, KvHeader) else each

    pulled = two.pull(NAMES[0], fetch)
    assert pulled.tokens == 0
    assert pulled.why_no_more.startswith(f"the engines differ in {what}: 'x' there")


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part._replace(slots=()),
        lambda part: part._replace(slots=(*part.slots[:-1], 33)),
        lambda part: part._replace(slots=(0, *part.slots[1:])),
        lambda part: part._replace(first_chunk=part.first_chunk + 1),
        lambda part: part._replace(first_chunk=-1),
        lambda part: part._replace(crcs=part.crcs[1:]),
        lambda part: part._replace(num_tokens=part.num_tokens - 1),
        lambda part: part._replace(body=part.body[:-1]),
        lambda part: part._replace(digest=""),
    ],
)
def test_a_part_that_does_not_match_the_log_is_refused(
    two: TwoDaemons, change: Callable[[KvPart], KvPart]
) -> None:
    pulled = two.pull(NAMES[0], fetch_with_changes(lambda number, part: change(part)))
    assert pulled.tokens == 0
    assert pulled.why_no_more


def test_a_pull_without_available_kv_reports_why(two: TwoDaemons) -> None:
    two.b.ask("only-b", "Hello.", sampling=GREEDY)
    assert two.pull("only-b").why_no_more == "the other daemon had no more"
    assert two.pull("nowhere").why_no_more == "the conversation is not in the store"


def test_a_pull_from_an_unreachable_address_reports_unavailable(two: TwoDaemons) -> None:
    pulled = two.pull(NAMES[0], address="127.0.0.1:1")
    assert pulled.tokens == 0
    assert "UNAVAILABLE" in pulled.why_no_more


def test_a_slow_pull_is_stopped_and_keeps_the_received_parts(
    two: TwoDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = two.next_unused()
    monkeypatch.setattr(hand_over, "PART_BYTES", 1)
    monkeypatch.setattr(hand_over, "ALWAYS_FETCH_SECONDS", 10.0)
    fetch_unchanged = fetch_with_changes(lambda number, part: part)

    async def fetch(*arguments: Any) -> Parts:
        number = 0
        async for each in fetch_unchanged(*arguments):
            yield each
            number += 1
            if number == 3:
                await asyncio.sleep(60.0)

    pulled = two.pull(name, fetch)
    assert pulled.why_no_more == "it took as long as computing would"
    assert 0 < pulled.tokens <= 2 * SIZE
    two.check_replies(name, len(two.log_of(name)) - 1 - pulled.tokens)


def test_kv_is_not_pulled_if_computing_it_is_faster(two: TwoDaemons) -> None:
    pulled = two.pull(NAMES[0], always=False)
    assert (pulled.tokens, pulled.why_no_more) == (0, "computing it is faster")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("action", ["send", "rewind", "delete"])
def test_a_client_action_during_the_import_ends_it(two: TwoDaemons, action: str) -> None:
    name = two.next_unused()
    acted = False

    async def fetch(*arguments: Any) -> Parts:
        nonlocal acted
        number = 0
        async for each in KvFetcher().fetch(*arguments):
            number += 1
            if number == 4:
                acted = True
                await asyncio.to_thread(act)
            yield each

    def act() -> None:
        if action == "send":
            two.b.ask(name, "Quick!", sampling=GREEDY)
        elif action == "rewind":
            request = pb.RewindConversationRequest(conversation_id=name, to_revision=1)
            two.b.stub.RewindConversation(request)
        else:
            two.b.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=name))

    pulled = two.pull(name, fetch)
    assert acted
    assert "in use" in pulled.why_no_more
    if action == "rewind":  # then compare with a fork that is rewound, too
        two.b.stub.RewindConversation(
            pb.RewindConversationRequest(conversation_id=f"{name}-anew", to_revision=1)
        )
    if action == "send":
        assert two.b.ask(f"{name}-anew", "Quick!", sampling=GREEDY).completed
    if action == "delete":
        said = two.b.ask(name, "Who?", sampling=GREEDY)
        assert said.token_ids == two.b.ask("new-one", "Who?", sampling=GREEDY).token_ids
        return
    said = two.b.ask(name, "What then?", sampling=GREEDY)
    anew = two.b.ask(f"{name}-anew", "What then?", sampling=GREEDY)
    assert said.token_ids == anew.token_ids


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(4))
def test_replies_are_right_with_damaged_duplicated_and_reordered_parts(
    two: TwoDaemons, seed: int
) -> None:
    name, choose = two.next_unused(), random.Random(seed)

    async def fetch(*arguments: Any) -> Parts:
        late: list[KvPart] = []
        async for each in KvFetcher().fetch(*arguments):
            roll = choose.random()
            if isinstance(each, KvHeader) or roll < 0.5:
                yield each
            elif roll < 0.65:
                yield with_flipped_bit(each, choose.randrange(len(each.body)))
            elif roll < 0.75:
                yield each
                yield each
            elif roll < 0.9:
                late.append(each)  # later parts overtake this one
            elif roll < 0.95:
                return
            while late and choose.random() < 0.4:
                yield late.pop()

    pulled = two.pull(name, fetch)
    two.check_replies(name, len(two.log_of(name)) - 1 - pulled.tokens)


def test_a_small_host_tier_takes_the_last_chunks_and_the_rest_is_recomputed(
    two: TwoDaemons, tmp_path: Path
) -> None:
    name = two.next_unused()
    data = copy_of_data(Path(two.a.daemon.store.folder.path), tmp_path / "small")
    with rig(data, host_cache="96t") as small:
        pair = TwoDaemons(two.a, small)
        pulled = pair.pull(name)
        history = len(pair.log_of(name)) - 1
        assert pulled.tokens == 2 * SIZE + (history - 1) % SIZE + 1
        assert "the host tier is full" in pulled.why_no_more
        pair.check_replies(name, history - pulled.tokens)


# -- who may fetch KV --


def fetch_kv(address: str, token: str = "") -> list[Any]:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        request = replica_pb2.FetchKvRequest(conversation_id="a", num_tokens=9)
        return list(stub.FetchKv(request, metadata=metadata, timeout=30))


def code_of(address: str, token: str = "") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        fetch_kv(address, token)
    code = refused.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_kv_is_not_offered_unless_hand_over_is_enabled(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as one:
        assert code_of(one.server.address) is grpc.StatusCode.UNIMPLEMENTED


def test_fetching_kv_needs_an_admin_token_if_tokens_are_required(tmp_path: Path) -> None:
    made = {admin: callers.new_token("", admin=admin) for admin in (False, True)}
    file = tmp_path / "tokens.toml"
    file.write_text("\n".join(entry for _, entry in made.values()))
    data = tmp_path / "data"
    listening = Listening(
        "127.0.0.1:0", data / "admin.sock", tokens=callers.read_tokens(file), hand_over=True
    )
    with DaemonRig(data, listening=listening) as one:
        address = one.server.address
        assert code_of(address) is grpc.StatusCode.UNAUTHENTICATED
        assert code_of(address, made[False][0]) is grpc.StatusCode.PERMISSION_DENIED
        # This caller may fetch KV, but an engine without a model has none.
        assert code_of(address, made[True][0]) is grpc.StatusCode.UNAVAILABLE


def test_an_invalid_fetch_request_is_refused_with_its_field_name(two: TwoDaemons) -> None:
    with grpc.insecure_channel(two.a.server.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        for fields, name in (
            ({"num_tokens": 3}, "conversation_id"),
            ({"conversation_id": "a/b", "num_tokens": 3}, "conversation_id"),
            ({"conversation_id": "a", "tenant": "x/y", "num_tokens": 3}, "tenant"),
            ({"conversation_id": "a"}, "num_tokens"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.FetchKv(replica_pb2.FetchKvRequest(**fields), timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert name in str(refused.value.details())
