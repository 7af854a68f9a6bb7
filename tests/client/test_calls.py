"""All unary methods: requests, results, retries and errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import pensieve.client
from pensieve import errors
from pensieve.client import Client, Conversation, Retry
from pensieve.client.grpc_errors import error_of
from pensieve.client.requests import create_request, import_requests
from pensieve.client.retry import Deadline
from pensieve.v1 import status_pb2
from tests.client.scripted import AWAY, Mishap, Refusal, ScriptedServer

NOT_SERVING = status_pb2.HealthCheckResponse.SERVING_STATUS_NOT_SERVING
HALF = "half \ud83d"  # half of a surrogate pair
Act = Callable[[Conversation], object]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, retry=Retry(retries=3), sleep=lambda seconds: None) as client:
        yield client


def test_a_long_history_is_split_into_messages_of_allowed_size() -> None:
    def sizes(*texts: str) -> list[int] | None:
        given = [{"content": each} for each in texts]
        request = create_request("c", "Rules.", (), None, {"a": 1}, "", given)
        make = import_requests(request)
        if make is None:
            return None
        first, *pieces, last = make()
        assert (first.conversation.system_prompt, len(first.conversation.messages)) == ("Rules.", 0)
        assert [*make()] == [first, *pieces, last]  # can be sent again
        sent = [message for each in pieces for message in each.messages]
        assert sent == [*request.messages]
        assert [each.complete for each in (first, *pieces, last)] == [False] * (len(pieces) + 1) + [
            True
        ]
        return [len(each.messages) for each in pieces]

    assert sizes(*"x" * 127) is None
    assert sizes(*"x" * 300) == [127, 127, 46]
    large = "x" * (100 << 10)
    assert sizes(large, large) is None
    assert sizes(large, large, large, 9 * large, "x") == [2, 1, 1, 1]


# -- conversations --


def test_methods_of_a_conversation_from_create_to_delete(client: Client) -> None:
    talk = client.conversation("trip-42")
    created = talk.create(system_prompt="Be brief.", metadata={"user": "ada", "n": 3})
    assert (created.conversation_id, created.revision) == ("trip-42", 0)
    assert created.metadata == {"user": "ada", "n": 3}
    talk.ask("one two")
    talk.ask("three")
    assert [(m.index, m.role, m.text) for m in talk.messages()] == [
        (0, "system", "Be brief."),
        (1, "user", "one two"),
        (2, "assistant", "one two"),
        (3, "user", "three"),
        (4, "assistant", "three"),
    ]
    branch = talk.fork(1, conversation_id="branch", metadata={"why": "try"})
    assert [message.text for message in branch.messages()] == ["Be brief.", "one two", "one two"]
    assert (branch.get().revision, branch.get().metadata) == (1, {"why": "try"})
    assert talk.fork().get().revision == 2
    assert talk.rewind(1).revision == 3
    assert len(list(talk.messages())) == 3
    talk.warm()
    talk.delete()
    with pytest.raises(errors.NotFound):
        talk.get()
    with pytest.raises(errors.AlreadyExists):
        branch.create()


def test_integers_in_metadata_stay_integers(server: ScriptedServer) -> None:
    """Protobuf structs have only doubles."""
    given = {
        "whole": 7,
        "deep": [{"n": -3}],
        "half": 0.5,
        "yes": True,
        "exact": 2**53 - 1,
        "huge": 1e300,
    }
    with Client(server.address) as client:
        created = client.conversation("talk").create(metadata=given)
    assert created.metadata == given
    assert repr(created.metadata["whole"]) == "7"
    assert repr(created.metadata["deep"][0]["n"]) == "-3"
    assert repr(created.metadata["exact"]) == "9007199254740991"
    assert repr(created.metadata["huge"]) == "1e+300"
    assert created.metadata["yes"] is True


def test_lists_read_all_pages(client: Client, server: ScriptedServer) -> None:
    for number in range(5):
        client.conversation(f"c{number}").ask("a b")
    ids = [state.conversation_id for state in client.conversations()]
    assert ids == ["c4", "c3", "c2", "c1", "c0"]
    tokens = [page.page_token for page in server.requests("ListConversations")]
    assert tokens == ["", "2", "4"]
    talk = client.conversation("c0")
    talk.ask("c")
    assert [message.token_ids for message in talk.messages(True)] == [(1, 1), (1, 1), (1,), (1,)]
    assert {message.token_ids for message in talk.messages()} == {()}


def test_only_calls_without_side_effects_are_retried(
    client: Client, server: ScriptedServer
) -> None:
    talk = client.conversation("c")
    talk.ask("a b")
    retried: dict[str, Act] = {
        "GetConversation": lambda c: c.get(),
        "ListMessages": lambda c: list(c.messages()),
        "ListConversations": lambda c: list(c.client.conversations()),
        "WarmConversation": lambda c: c.warm(),
        "CancelTurn": lambda c: c.cancel(),
    }
    for name, act in retried.items():
        server.calls.clear()
        server.refusals.extend([AWAY, AWAY])
        act(talk)
        assert server.names() == [name] * 3
        server.calls.clear()
        server.refusals.extend([AWAY] * 4)
        with pytest.raises(errors.Unavailable):
            act(talk)
        assert server.names() == [name] * 4
    not_retried: dict[str, Act] = {
        "CreateConversation": lambda c: c.create(),
        "ForkConversation": lambda c: c.fork(),
        "RewindConversation": lambda c: c.rewind(0),
        "DeleteConversation": lambda c: c.delete(),
        "Check": lambda c: c.client.healthy(),
    }
    for name, act in not_retried.items():
        server.calls.clear()
        server.refusals.append(AWAY)
        if name == "Check":
            assert act(talk) is False
        else:
            with pytest.raises(errors.Unavailable):
                act(talk)
        assert server.names() == [name]


def test_healthy_returns_false_on_any_error(server: ScriptedServer, client: Client) -> None:
    assert client.healthy() is True
    server.health = NOT_SERVING
    assert client.healthy() is False
    server.refusals.append(Refusal("DEADLINE_EXCEEDED"))
    assert client.healthy() is False
    with Client("127.0.0.1:1") as other:
        assert other.healthy() is False


def test_the_token_is_sent_with_every_call_and_appears_in_no_error(server: ScriptedServer) -> None:
    with Client(server.address, token=" s3cret\n") as client:  # as read from a file
        talk = client.conversation("c")
        talk.ask("a")
        talk.get()
        client.healthy()
        list(talk.messages())
    assert [metadata["authorization"] for _, _, metadata in server.calls] == ["Bearer s3cret"] * 4
    with pytest.raises(errors.InvalidArgument, match="token") as odd:
        Client(server.address, token="schlüssel")
    assert "schl" not in str(odd.value)
    with Client(server.address) as other:
        other.conversation("c").get()
    assert "authorization" not in server.calls[-1][2]


def test_addresses_may_be_grpc_urls_or_unix_sockets(tmp_path: Path, server: ScriptedServer) -> None:
    with Client(f"grpc://{server.address}") as client:
        assert client.conversation("c").ask("hello").text == "hello "
    listen = f"unix:{tmp_path / 's.sock'}"
    with ScriptedServer(listen), Client(listen) as client:
        assert client.conversation("c").ask("hello").text == "hello "


def test_the_error_names_an_unreadable_certificate() -> None:
    with pytest.raises(errors.ConfigError, match="/no/such"):
        Client(tls="/no/such")


# -- what is refused before it is sent --


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda c: c.send(HALF), "content"),
        (lambda c: c.send([{"content": HALF}]), "content"),
        (lambda c: c.send([{"content": "x", "tool_call_id": HALF}]), "tool_call_id"),
        (lambda c: c.send("x", request_id=HALF), "request_id"),
        (lambda c: c.send("x", stop=[HALF]), "stop"),
        (lambda c: c.create(system_prompt=HALF), "system_prompt"),
        (lambda c: c.create(prefix_id=HALF), "prefix_id"),
        (lambda c: c.create(metadata={"a": HALF}), "metadata"),
        (lambda c: c.create(metadata={HALF: 1}), "metadata"),
        (lambda c: c.create(tools=[{"name": HALF}]), "tools"),
        (lambda c: c.cancel(HALF), "turn_id"),
        (lambda c: c.fork(conversation_id=HALF), "conversation_id"),
        (lambda c: c.client.conversation(HALF), "conversation_id"),
        (lambda c: c.client.conversation("my trip"), "conversation_id"),
        (lambda c: c.client.conversation(""), "conversation_id"),
        (lambda c: c.client.conversation("x" * 129), "conversation_id"),
        (lambda c: c.client.conversation("c\n"), "conversation_id"),
        (lambda c: c.send(b"x"), "messages"),
        (lambda c: c.send({"content": "x"}), "messages"),
        (lambda c: c.send(5), "messages"),
        (lambda c: c.send(["x"]), "messages"),
        (lambda c: c.send([{"role": "user"}]), "messages"),
        (lambda c: c.send([{"content": "x", "colour": "red"}]), "messages"),
        (lambda c: c.send([{"content": "x", "name": HALF}]), "name"),
        (lambda c: c.create(messages=[{"role": "assistant", "tool_calls": [{}]}]), "tool_calls"),
        (lambda c: c.send([{"content": 5}]), "content"),
        (lambda c: c.send([{"role": "robot", "content": "x"}]), "role"),
        (lambda c: c.send("x", temprature=1), "temprature"),
        (lambda c: c.send("x", max_tokens=2**70), "max_tokens"),
        (lambda c: c.send("x", stop_token_ids=5), "stop_token_ids"),
        (lambda c: c.send("x", logit_bias={-1: 1}), "logit_bias"),
        (lambda c: c.send("x", logit_bias=[1]), "logit_bias"),
    ],
)
def test_invalid_arguments_are_refused_before_sending(
    client: Client, server: ScriptedServer, act: Callable[[Any], object], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as wrong:
        act(client.conversation("c"))
    assert wrong.value.field == field
    assert server.calls == []


def test_any_valid_utf8_text_is_sent_unchanged(client: Client, server: ScriptedServer) -> None:
    text = "\x00 \u202e א e\u0301\u0301 🙂 \ufffe"
    client.conversation("A.z_~-9").ask(text)
    assert server.requests("SendMessage")[0].messages[0].content == text


def test_an_oversized_message_raises_invalid_argument_and_not_queue_full(
    client: Client, server: ScriptedServer
) -> None:
    with pytest.raises(errors.InvalidArgument, match="too large"):
        client.conversation("c").ask("x" * (9 << 20))
    server.calls.clear()
    with pytest.raises(errors.InvalidArgument, match="too large"):
        client.conversation("c").ask("x" * (5 << 20))  # the server's limit is 4 MiB
    assert server.calls == []


# -- errors --


@pytest.mark.parametrize(
    ("refusal", "kind", "attributes"),
    [
        (
            Refusal("ABORTED", "TURN_RUNNING", {"conversation_id": "c", "turn_id": "7"}),
            errors.TurnRunning,
            {"conversation_id": "c", "turn_id": "7"},
        ),
        (
            Refusal("FAILED_PRECONDITION", "STALE_REVISION", {"expected": "3", "actual": "4"}),
            errors.StaleRevision,
            {"expected": 3, "actual": 4},
        ),
        (
            Refusal("OUT_OF_RANGE", "CONTEXT_FULL", {"tokens": "9", "tokens_max": "8"}),
            errors.ContextFull,
            {"tokens": 9, "tokens_max": 8},
        ),
        (
            Refusal("INVALID_ARGUMENT", "INVALID_ARGUMENT", violation=("sampling.top_p", "no")),
            errors.InvalidArgument,
            {"field": "sampling.top_p", "problem": "no"},
        ),
        (
            Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", retry_seconds=1.5),
            errors.QueueFull,
            {"retry_after_seconds": 1.5},
        ),
        (
            Refusal("UNAVAILABLE", "STORE_UNAVAILABLE"),
            errors.StoreUnavailable,
            {"retry_after_seconds": None},
        ),
        (Refusal("INTERNAL", "NAN_LOGITS"), errors.TurnFailed, {"reason": "NAN_LOGITS"}),
        (Refusal("ABORTED", "TURN_INTERRUPTED"), errors.TurnInterrupted, {}),
        (Refusal("UNAUTHENTICATED", "UNAUTHENTICATED"), errors.Unauthenticated, {}),
        (Refusal("PERMISSION_DENIED", "PERMISSION_DENIED"), errors.PermissionDenied, {}),
        (Refusal("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"), errors.DeadlineExceeded, {}),
        (Refusal("INTERNAL", text="internal error 5f"), errors.ServerFault, {}),
        (Refusal("UNIMPLEMENTED"), errors.ServerFault, {}),
        (Refusal("UNKNOWN"), errors.ServerFault, {}),
        # A newer server may send an unknown reason. The code then decides the class.
        (Refusal("NOT_FOUND", "BRANCH_NOT_FOUND"), errors.NotFound, {}),
        (Refusal("ABORTED", "TURN_RUNNING"), errors.TurnRunning, {"turn_id": ""}),
        (Refusal("OUT_OF_RANGE", "CONTEXT_FULL", {"tokens": "many"}), errors.ContextFull, {}),
    ],
    ids=lambda value: value.reason or value.code if isinstance(value, Refusal) else "",
)
def test_an_error_is_raised_with_its_class_and_details(
    server: ScriptedServer,
    refusal: Refusal,
    kind: type[errors.PensieveError],
    attributes: dict[str, object],
) -> None:
    with Client(server.address, retry=Retry(retries=0)) as client:
        server.refusals.append(refusal)
        with pytest.raises(errors.PensieveError) as got:
            client.conversation("c").get()
        assert type(got.value) is kind
        for name, value in attributes.items():
            assert getattr(got.value, name) == value
        server.mishaps.append(Mishap(after=1, refusal=refusal))
        with pytest.raises(kind):
            client.conversation("c").ask("a b")


def test_every_error_class_is_found_by_its_reason() -> None:
    def tree(root: type[errors.PensieveError]) -> Iterator[type[errors.PensieveError]]:
        for each in root.__subclasses__():
            if each.__module__ == errors.__name__:
                yield each
                yield from tree(each)

    for kind in tree(errors.PensieveError):
        # The reasons of these errors vary, and are not class attributes.
        if kind in (errors.TurnFailed, errors.ServerFault):
            continue
        refusal = Refusal(kind.grpc_status, kind.reason)
        code = getattr(grpc.StatusCode, kind.grpc_status)
        assert type(error_of(code, "text", refusal.trailing())) is kind


@pytest.mark.parametrize(
    "trailing",
    [
        (("grpc-status-details-bin", b"\xff\xff\xff"),),
        (("grpc-status-details-bin", "text"),),
        (("x-other", b"\xff"),),
        (("grpc-status-details-bin", b"\x1a\x04\x0a\x02\xff\xff"),),
    ],
)
def test_malformed_error_details_are_ignored_and_the_status_code_decides(trailing: Any) -> None:
    error = error_of(grpc.StatusCode.NOT_FOUND, None, trailing)
    assert (type(error), str(error)) == (errors.NotFound, "NOT_FOUND")


def test_a_reason_of_another_domain_is_ignored() -> None:
    status = status_pb2.Status()
    info = status_pb2.ErrorInfo(reason="NOT_FOUND", domain="proxy.example")
    name = "type.googleapis.com/google.rpc.ErrorInfo"
    status.details.add(type_url=name, value=info.SerializeToString())
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    assert type(error_of(grpc.StatusCode.UNAVAILABLE, "x", trailing)) is errors.Unavailable


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("CANCELLED", "CANCELLED", errors.Unavailable),
        ("INTERNAL", "Received RST_STREAM with error code 2", errors.Unavailable),
        ("INTERNAL", "internal error 5f", errors.ServerFault),
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max", errors.ServerFault),
        ("RESOURCE_EXHAUSTED", "Received message larger than max", errors.InvalidArgument),
        ("RESOURCE_EXHAUSTED", "too many", errors.QueueFull),
    ],
)
def test_connection_errors_differ_from_errors_of_the_server(
    code: str, text: str, kind: type[errors.PensieveError]
) -> None:
    assert type(error_of(getattr(grpc.StatusCode, code), text, ())) is kind


def test_a_deadline_starts_at_its_first_use() -> None:
    now = [100.0]
    deadline = Deadline(5.0, clock=lambda: now[0])
    now[0] = 200.0
    assert deadline.left() == 5.0
    now[0] = 203.0
    assert deadline.left() == 2.0
    now[0] = 300.0
    assert deadline.left() == 0.0
    assert Deadline(None).left() is None


def test_a_call_ends_at_its_timeout(client: Client, server: ScriptedServer) -> None:
    server.hold(threading.Event())
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.05 s"):
        client.conversation("c").get(timeout=0.05)


def test_a_deadline_error_of_the_server_also_names_the_clients_timeout() -> None:
    refusal = Refusal("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    error = error_of(
        grpc.StatusCode.DEADLINE_EXCEEDED, "turns wait 9 s", refusal.trailing(), timeout=2.5
    )
    assert str(error) == "turns wait 9 s; the timeout was 2.5 s"


# -- the package --


def test_the_public_names() -> None:
    assert sorted(pensieve.client.__all__) == pensieve.client.__all__
    for name in pensieve.client.__all__:
        assert getattr(pensieve.client, name).__module__.startswith(
            ("pensieve.client.", "pensieve.sampling")
        )


def test_importing_the_client_loads_no_heavy_modules() -> None:
    allowed = {"client", "errors", "sampling", "v1"}
    program = (
        "import sys, pensieve.client, pensieve.client.admin\n"
        "heavy = {'torch', 'transformers', 'numpy', 'sqlite3', 'sqlite_utils', 'tokenizers'}\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('pensieve.')}\n"
        f"print(sorted(heavy & set(sys.modules)), sorted(ours - {allowed}))"
    )
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[] []\n"


def test_threads_that_share_a_client_each_read_all_pages(
    client: Client, server: ScriptedServer
) -> None:
    for number in range(5):
        client.conversation(f"c{number}").ask("a")
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(len(list(client.conversations()))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [5] * 8


def test_error_subclasses_of_other_modules_are_not_used_for_a_reason() -> None:
    """A program may contain both a daemon and a client."""
    program = (
        "import pensieve.api.json_fields\n"
        "from pensieve.client.grpc_errors import BY_REASON\n"
        "print(BY_REASON['INVALID_ARGUMENT'].__name__)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout.decode().strip() == "InvalidArgument"
