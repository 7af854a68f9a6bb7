"""Faults around a daemon: dead connections, floods, failing disks and devices, clock jumps."""

from __future__ import annotations

import asyncio
import collections
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pensieve.client import Client
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.text.tokenizer import Encoded, Tokenizer
from pensieve.v1 import admin_pb2, conversation_pb2, conversation_pb2_grpc, status_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.proxy import Proxy
from tests.conversations.rig_daemon import ECHO, DaemonRig, ServeProcess, read_turn, wait_for
from tests.store.faulty import FaultyDriver, writer_of

SLOW = (*ECHO, "--seconds=0.01")
LONG = pb.Sampling(max_tokens=3000, ignore_eos=True)
SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
PACKAGE = Path(__file__).resolve().parents[3] / "pensieve"
FROZEN = Path(__file__).with_name("frozen") / "v1.binpb"
IO_ERROR, READ_ONLY, DISK_FULL = 10, 8, 13


def running(rig: DaemonRig) -> int:
    return rig.num_live


# -- connections --


def test_a_dead_connection_is_detected_and_its_turn_is_released(tmp_path: Path) -> None:
    """Half-open TCP: neither side learns that the other side is gone."""
    listening = Listening(
        "127.0.0.1:0",
        tmp_path / "data" / "admin.sock",
        keepalive_seconds=1.0,
        ping_timeout_seconds=3.0,  # a busy test must answer the pings on its own connection
    )
    config = DaemonConfig(grace_seconds=0.1)
    with DaemonRig(tmp_path / "data", listening=listening, program=SLOW, config=config) as rig:
        proxy = Proxy(rig.server.address)
        with grpc.insecure_channel(proxy.address) as channel:
            stub = type(rig.stub)(channel)
            message = pb.NewMessage(content="hello")
            request = pb.SendMessageRequest(
                conversation_id="dead",
                request_id="r",
                messages=[message],
                create_if_missing=True,
                sampling=pb.Sampling(max_tokens=1_000_000, ignore_eos=True),
            )
            events = stub.SendMessage(request)
            next(events)
            assert running(rig) == 1
            proxy.freeze()
            wait_for(lambda: running(rig) == 0)
            proxy.close()
            events.cancel()
        assert rig.messages("dead") == []
        assert rig.ask("dead", "hello", sampling=SHORT).completed.revision == 1


def test_a_connection_reset_during_a_reply_loses_no_text(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=10.0)
    with DaemonRig(tmp_path / "data", program=SLOW, config=config) as rig:
        proxy = Proxy(rig.server.address)
        with Client(proxy.address) as client:
            turn = client.conversation("reset").send("hello", max_tokens=60, ignore_eos=True)
            texts = []
            for number, delta in enumerate(turn):
                texts.append(str(delta))
                if number in (2, 8):
                    proxy.reset()
            assert turn.reply.usage.output_tokens == 60
        proxy.close()
        (_, reply) = rig.messages("reset")
        assert "".join(texts) == turn.reply.text == reply.content
        assert rig.num_live == 0


def test_a_flood_of_connections_and_headers_does_not_affect_running_turns(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", program=SLOW) as rig:
        host, port = rig.server.address.rsplit(":", 1)
        admitted = rig.send(
            "admitted", "hello", sampling=pb.Sampling(max_tokens=100, ignore_eos=True)
        )
        next(admitted)
        flood = [socket.create_connection((host, int(port))) for _ in range(500)]
        for sock in flood[::2]:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[:10])  # the rest never follows
        codes = set()
        for size in (10_000, 100_000, 1_000_000):
            try:
                request = pb.GetConversationRequest(conversation_id="admitted")
                rig.stub.GetConversation(request, metadata=(("x-bomb", "a" * size),))
            except grpc.RpcError as error:
                codes.add(error.code().name)
        assert "RESOURCE_EXHAUSTED" in codes
        assert not codes & {"INTERNAL", "UNKNOWN"}
        assert len(read_turn(admitted).token_ids) == 100
        assert rig.ask("later", "hello", sampling=SHORT).completed.revision == 1
        for sock in flood:
            sock.close()


def test_calls_that_arrive_while_the_daemon_is_busy_are_all_answered(tmp_path: Path) -> None:
    """Calls that the daemon has not accepted wait in gRPC, or in the client."""
    process = ServeProcess(tmp_path / "data", engine="echo")
    with grpc.insecure_channel(process.start()) as channel:
        grpc.channel_ready_future(channel).result(30)
        stub: Any = conversation_pb2_grpc.ConversationServiceStub(channel)
        request = pb.GetConversationRequest(conversation_id="c")
        process.process.send_signal(signal.SIGSTOP)
        calls = [stub.GetConversation.future(request) for _ in range(3000)]
        process.process.send_signal(signal.SIGCONT)
        codes = collections.Counter(call.code() for call in calls)
    assert codes == {grpc.StatusCode.NOT_FOUND: 3000}
    assert process.stop() == 0


def test_a_very_long_message_is_tokenised_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, encode = "x" * 1_500_000, Tokenizer.encode
    num_beats, num_beats_meanwhile = 0, 0  # of the event loop

    def watched_encode(tokenizer: Tokenizer, rendering: str, **options: bool) -> Encoded:
        nonlocal num_beats_meanwhile
        before = num_beats
        try:
            return encode(tokenizer, rendering, **options)
        finally:
            if text in rendering:
                num_beats_meanwhile += num_beats - before

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(0.005)

    monkeypatch.setattr(Tokenizer, "encode", watched_encode)
    with DaemonRig(tmp_path / "data") as rig:
        task = asyncio.run_coroutine_threadsafe(beat(), rig._loop)
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("long", text)
        assert error.value.code() is grpc.StatusCode.OUT_OF_RANGE
        task.cancel()
        assert num_beats_meanwhile > 10


# -- the disk --


@pytest.mark.parametrize("code", [IO_ERROR, READ_ONLY, DISK_FULL])
def test_a_failing_disk_refuses_turns_but_serves_reads_and_recovers(
    tmp_path: Path, code: int
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        before = rig.ask("kept", "hello", sampling=SHORT)
        writer = writer_of(rig.daemon.store)
        faults = FaultyDriver(writer.driver, code, False, True)

        async def plant(driver: Any) -> None:
            def swap() -> None:
                writer.driver = driver
                writer._discard()

            await rig.daemon.threads.in_store("", swap)

        driver = writer.driver
        rig.call(plant(faults))
        assert [each.content for each in rig.messages("kept")] == ["hello", before.text]
        faults.arm(1)
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("kept", "more", request_id="r", sampling=SHORT)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "planted" not in str(error.value.details())
        faults.heal()
        wait_for(lambda: rig.daemon.serving)  # after a full disk, the daemon checks again by itself
        again = rig.ask("kept", "more", request_id="r", sampling=SHORT)
        assert again.completed.revision == 2
        rig.call(plant(driver))
        assert rig.daemon.store.verify() == []


# -- the device --


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path / "faults"


def faulty(faults: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.conversations.faulty_engine", str(faults))


def test_running_turns_are_retried_after_the_device_runs_out_of_memory(
    tmp_path: Path, faults: Path
) -> None:
    """The SDK retries these turns, and no history is lost."""
    with (
        DaemonRig(tmp_path / "data", program=faulty(faults)) as rig,
        Client(rig.server.address) as client,
    ):
        first = client.conversation("c").ask("hello", max_tokens=20, ignore_eos=True)
        faults.write_text("memory start")
        second = client.conversation("c").ask("go on", max_tokens=20, ignore_eos=True)
        assert faults.read_text() == ""
        assert rig.daemon.engine.num_restarts == 1
        assert second.usage.recomputed_tokens == first.usage.prompt_tokens + 19
        assert second.usage.recompute_reason == "engine_restarted"
        assert [each.text for each in client.conversation("c").messages()][::2] == [
            "hello",
            "go on",
        ]


def test_a_failed_copy_restarts_the_engine_and_loses_no_conversation(
    tmp_path: Path, faults: Path
) -> None:
    with (
        DaemonRig(tmp_path / "data", program=faulty(faults)) as rig,
        Client(rig.server.address) as client,
    ):
        client.conversation("c").ask("hello " * 50, max_tokens=20, ignore_eos=True)
        faults.write_text("copy")
        from pensieve.client.admin import Admin

        with Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}") as admin:
            assert admin.evict("c", to_host=True) > 0
            wait_for(lambda: rig.daemon.engine.num_restarts == 1)
            wait_for(lambda: rig.daemon.serving)
            reply = client.conversation("c").ask("go on", max_tokens=20, ignore_eos=True)
            assert reply.usage.recomputed_tokens > 50
            assert admin.check() == []


def test_nan_logits_fail_only_one_turn_and_its_kv_is_discarded(
    tmp_path: Path, faults: Path
) -> None:
    with DaemonRig(tmp_path / "data", program=faulty(faults)) as rig:
        before = rig.ask("c", "hello", sampling=SHORT)
        faults.write_text("nan")
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("c", "more", request_id="r", sampling=SHORT)
        assert "not numbers" in str(error.value.details())
        assert len(rig.messages("c")) == 2
        again = rig.ask("c", "more", request_id="r", sampling=SHORT)
        assert again.completed.revision == 2
        usage = again.completed.usage
        assert (usage.device_tokens, usage.host_tokens) == (0, 0), (
            "KV of the failed turn was reused"
        )
        assert usage.recomputed_tokens == before.completed.usage.prompt_tokens + 7
        assert rig.daemon.engine.num_restarts == 0


# -- clocks --


def test_wall_clock_jumps_do_not_affect_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonRig(tmp_path / "data", program=SLOW) as rig:
        actual, offset = time.time, [0.0]
        monkeypatch.setattr(time, "time", lambda: actual() + offset[0])
        monkeypatch.setattr(rig.daemon.store, "now", lambda: actual() + offset[0])
        rig.ask("c", "one", sampling=SHORT)
        for jump, text in ((3600.0, "two"), (-3600.0, "three"), (0.0, "four")):
            # Set no gRPC deadline, because gRPC's Python deadlines use the wall clock.
            long = pb.Sampling(max_tokens=60, ignore_eos=True)
            events = rig.send("c", text, sampling=long, seconds=None)
            next(events)
            offset[0] = jump
            reply = read_turn(events)
            assert len(reply.token_ids) == 60
            assert reply.completed.usage.recomputed_tokens == 0
            assert 0 <= reply.completed.usage.total_seconds < 1800, "the clock jump was counted"
        assert [each.content for each in rig.messages("c")][::2] == ["one", "two", "three", "four"]
        listed = rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
        assert [each.conversation_id for each in listed] == ["c"]


def test_the_wall_clock_is_used_only_for_records() -> None:
    """Scheduling, deadlines and grace periods use the monotonic clock."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\btime\.time\b|datetime\.(now|utcnow|today)", path.read_text())
    }
    assert users == {
        "cli/conversation_table.py",  # the age of a conversation
        "guard/audit.py",  # the time of an event
        "conversations/daemon_config.py",  # the engine's start, compared with times of conversations
        "api/http/requests.py",  # the date that a template may use
        "api/http/completions.py",  # the time of an answer
        *("api/http/messages.py", "api/http/responses.py"),
        "api/http/routes.py",
        "store/backup.py",  # the moments of a backup
        "store/conversation_store.py",  # created, updated, finished
        "jobs/job_store.py",  # created, started, ended
    }


def test_an_event_loop_stall_is_logged_and_turns_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.WARNING, "pensieve"):
        rig.ask("c", "one", sampling=SHORT)
        rig._loop.call_soon_threadsafe(time.sleep, 2.5)
        assert rig.ask("c", "two", sampling=SHORT).completed.revision == 2
        wait_for(lambda: "the event loop stalled for" in caplog.text)
        assert rig.daemon.serving


# -- tenants --


@pytest.fixture
def two_tenants(tmp_path: Path) -> Iterator[tuple[DaemonRig, Client, Client]]:
    tokens, entries = [], ""
    for tenant in ("a", "b"):
        token, entry = callers.new_token(tenant, admin=False)
        tokens.append(token)
        entries += entry
    path = tmp_path / "tokens.toml"
    path.write_text(entries)
    path.chmod(0o600)
    data = tmp_path / "data"
    listening = Listening("127.0.0.1:0", data / "admin.sock", tokens=callers.read_tokens(path))
    with (
        DaemonRig(data, listening=listening) as rig,
        Client(rig.server.address, token=tokens[0]) as a,
        Client(rig.server.address, token=tokens[1]) as b,
    ):
        yield rig, a, b


def test_usage_figures_reveal_no_text_of_another_tenant(
    two_tenants: tuple[DaemonRig, Client, Client],
) -> None:
    """These usage figures, which predict the time to first token, are equal for every guess."""
    _, victim, attacker = two_tenants
    secrets = [f"the word of day {number} is {'x' * (number % 7)}" for number in range(12)]
    for number, secret in enumerate(secrets):
        begun = victim.conversation(f"v{number}")
        begun.create(system_prompt=secret * 8, prefix_id=f"p{number}")
        begun.ask(secret, max_tokens=4, ignore_eos=True)
    costs: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for right in (True, False):
        for number, secret in enumerate(secrets):
            guess = secret if right else secret.replace("word", "sign")
            mine = attacker.conversation(f"{right}-{number}")
            mine.create(system_prompt=guess * 8, prefix_id=f"p{number}" if right else "")
            usage = mine.ask(guess, max_tokens=4, ignore_eos=True).usage
            costs[right].append((usage.device_tokens, usage.host_tokens, usage.recomputed_tokens))
    assert costs[True] == costs[False] == [(0, 0, 0)] * len(secrets)
    own = victim.conversation("again")
    own.create(system_prompt=secrets[0] * 8, prefix_id="p0")
    assert own.ask("something else", max_tokens=4).usage.device_tokens > 50


# -- texts --


def test_an_id_with_a_line_break_reaches_no_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.DEBUG, "pensieve"):
        for bad in ("a\nINFO ready", "a\r\nlevel=error", "a\x1b[2J"):
            with pytest.raises(grpc.RpcError) as error:
                rig.ask(bad, "hello")
            assert "\n" not in str(error.value.details())
            assert "\x1b" not in str(error.value.details())
            with pytest.raises(grpc.RpcError):
                rig.ask("c", "hello", request_id=bad)
        assert not any("INFO ready" in record.getMessage() for record in caplog.records)
    assert not any("\n" in line for line in rig.lines)


def test_statistics_names_do_not_depend_on_conversation_ids(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        before = set(rig.call(rig.daemon.stats()).figures)
        for number in range(20):
            rig.ask(f"c{number}", "hello", sampling=SHORT)
        assert set(rig.call(rig.daemon.stats()).figures) == before
        assert before


# -- older and newer clients --


def frozen() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(FROZEN.read_bytes())


def present() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    files = {}
    for module in (conversation_pb2, admin_pb2, status_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files[file.name] = file
    return files


def test_the_wire_format_of_the_first_version_has_not_changed() -> None:
    now = present()
    promised = {"pensieve/v1/conversation.proto", "pensieve/v1/admin.proto"}
    old_files = {file.name: file for file in frozen().file}
    assert promised <= set(old_files)
    compared = 0
    for name in sorted(promised):
        old, new = old_files[name], now[name]
        messages = {message.name: message for message in new.message_type}
        for message in old.message_type:
            fields = {field.number: field for field in messages[message.name].field}
            for field in message.field:
                again = fields[field.number]
                for part in ("name", "type", "type_name", "label"):
                    assert getattr(again, part) == getattr(field, part), (message.name, field.name)
                compared += 1
        enums = {enum.name: enum for enum in new.enum_type}
        for enum in old.enum_type:
            values = {value.number: value.name for value in enums[enum.name].value}
            assert all(values[value.number] == value.name for value in enum.value)
        services = {service.name: service for service in new.service}
        for service in old.service:
            methods = {method.name: method for method in services[service.name].method}
            for method in service.method:
                assert methods[method.name].SerializeToString() == method.SerializeToString()
    assert compared > 100


def test_a_client_with_the_first_versions_stubs_still_works(tmp_path: Path) -> None:
    pool = descriptor_pool.DescriptorPool()
    for file in frozen().file:
        pool.Add(file)

    def kind(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pensieve.v1.{name}"))

    request, response = kind("SendMessageRequest"), kind("SendMessageResponse")
    with DaemonRig(tmp_path / "data") as rig:
        send = rig.channel.unary_stream(
            "/pensieve.v1.ConversationService/SendMessage",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        asked = request(conversation_id="old", create_if_missing=True)
        asked.messages.add(content="hello")
        asked.sampling.max_tokens = 8
        asked.sampling.ignore_eos = True
        events = list(send(asked, timeout=120))
        assert events[-1].completed.revision == 1
        tokens = [each for event in events for each in event.delta.token_ids]
        assert len(tokens) == 8
        # A newer client sends fields and values that this daemon does not know.
        newer = (
            pb.GetConversationRequest(conversation_id="old").SerializeToString() + b"\xfa\x3f\x02hi"
        )
        get = rig.channel.unary_unary(
            "/pensieve.v1.ConversationService/GetConversation",
            request_serializer=bytes,
            response_deserializer=pb.GetConversationResponse.FromString,
        )
        assert get(newer, timeout=120).conversation.revision == 1
