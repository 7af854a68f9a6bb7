"""Several daemons with one history: a conversation uses its home, or a fallback while its home is down."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pensieve import errors
from pensieve.api.grpc.translate import status
from pensieve.client import AsyncClient, Client, Restarted, Retry
from pensieve.client.addresses import ranked
from pensieve.client.admin import Admin
from pensieve.client.grpc_errors import error_of
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import status_pb2
from tests.client.scripted import AWAY, Mishap, Refusal
from tests.client.several_rig import AsyncCaller, Fleet, SyncCaller

SAFETY_SECONDS = 60.0
LOADING = Refusal("UNAVAILABLE", "LOADING", retry_seconds=1.0)
DRAINING = Refusal("UNAVAILABLE", "UNAVAILABLE")
KINDS = [pytest.param(SyncCaller, id="threads"), pytest.param(AsyncCaller, id="tasks")]
FIVE = ["one", "two", "three", "four", "five"]
IDS = [f"talk-{number}" for number in range(40)]
NOT_SERVING = status_pb2.HealthCheckResponse.SERVING_STATUS_NOT_SERVING
SERVING = status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[SyncCaller]:
    with request.param(fleet.addresses) as client:
        yield client


def wait_until(condition: Any) -> None:
    end = time.monotonic() + SAFETY_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.002)


def homes(fleet: Fleet) -> dict[str, str]:
    return {each: ranked(each, fleet.addresses)[0] for each in IDS}


# -- where calls go --


def test_only_conversations_of_a_stopped_daemon_move_and_none_is_split(
    fleet: Fleet, client: SyncCaller
) -> None:
    for text in ("one", "two", "three"):
        for each in IDS:
            assert client.ask(each, text).text == f"{text} "
    home = homes(fleet)
    assert {each: {*fleet.addresses_called(each)} for each in IDS} == {
        each: {home[each]} for each in IDS
    }
    gone = home[IDS[0]]
    fleet.forget_calls()
    fleet.stop(gone)
    for each in IDS:
        assert client.ask(each, "four").text == "four "
    moved = {each: ranked(each, fleet.addresses)[1] for each in IDS if home[each] == gone}
    assert {each: fleet.addresses_called(each) for each in IDS} == {
        each: [moved.get(each, home[each])] for each in IDS
    }
    assert client.states[gone].state == "avoided"
    assert client.states[gone].error == f"nothing listens at {gone}"
    fleet.start(gone)
    fleet.forget_calls()

    def comes_home() -> bool:
        client.ask(IDS[0], "and back")
        return gone in fleet.addresses_called(IDS[0])

    wait_until(comes_home)
    fleet.forget_calls()
    for each in IDS:
        client.ask(each, "five")
    assert {each: fleet.addresses_called(each) for each in IDS} == {
        each: [home[each]] for each in IDS
    }
    assert client.states[gone] == type(client.states[gone])(gone, "works")
    for each in IDS:
        messages = fleet.servers[0].conversations[each].messages
        texts = [message.content for message in messages if message.role == pb.ROLE_USER]
        assert [text for text in texts if text != "and back"] == FIVE
    assert client.slept == []


def test_a_channel_is_opened_at_its_first_use(fleet: Fleet, client: SyncCaller) -> None:
    assert {each.state for each in client.states.values()} == {"not used yet"}
    client.ask("talk-0", "hello")
    home = ranked("talk-0", fleet.addresses)[0]
    assert client.states[home].state == "works"
    assert [each.state for name, each in client.states.items() if name != home] == [
        "not used yet"
    ] * 2
    assert repr(client.states[home]) == f"AddressState(address='{home}', state='works')"


def test_calls_about_a_conversation_go_to_the_address_of_its_turns(
    fleet: Fleet, client: SyncCaller
) -> None:
    client.ask("talk-0", "hello")
    client.do(lambda c: c.conversation("talk-0").get())
    client.do(lambda c: c.conversation("talk-0").warm())
    client.do(lambda c: c.conversation("talk-0").rewind(0))
    client.collect(lambda c: c.conversation("talk-0").messages())
    home = fleet.server_at(ranked("talk-0", fleet.addresses)[0])
    assert sorted(home.names()) == [
        "GetConversation",
        "ListMessages",
        "RewindConversation",
        "SendMessage",
        "WarmConversation",
    ]


def test_calls_about_no_conversation_use_the_first_working_address(
    fleet: Fleet, client: SyncCaller
) -> None:
    for each in IDS[:5]:
        client.ask(each, "hello")
    fleet.stop(fleet.addresses[0])
    fleet.forget_calls()
    ids = [each.conversation_id for each in client.collect(lambda c: c.conversations())]
    assert sorted(ids) == IDS[:5]
    assert fleet.servers[1].names() == ["ListConversations"] * 3
    fleet.start(fleet.addresses[0])
    client.collect(lambda c: c.prefixes())
    assert fleet.servers[1].names()[3:] == ["ListPrefixes"]


def test_the_home_of_a_job_follows_from_its_id(fleet: Fleet, client: SyncCaller) -> None:
    home = fleet.server_at(ranked("nightly", fleet.addresses)[0])
    client.do(lambda c: c.jobs.create(b'{"custom_id": "a"}\n', job_id="nightly"))
    assert client.do(lambda c: c.jobs.get("nightly")).num_lines == 1
    assert [name for name, _ in home.jobs.calls] == ["CreateJob", "GetJob"]


def test_a_job_of_an_unreachable_home_runs_and_is_read_at_the_next_daemon(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("nightly", fleet.addresses)
    jobs = fleet.server_at(order[1]).jobs
    fleet.stop(order[0])
    text = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
    client.do(lambda c: c.jobs.create(text, job_id="nightly"))
    jobs.breaks.append(1)
    read = client.collect(lambda c: c.jobs.results("nightly"))
    assert len(read) == len({*read}) == 2
    assert [name for name, _ in jobs.calls] == ["CreateJob", "GetResults", "GetResults"]


def test_an_upload_whose_answer_was_lost_is_not_sent_to_another_daemon(
    fleet: Fleet, client: SyncCaller
) -> None:
    """The answer was lost, so the job may exist there. A second daemon must not run it, too."""
    order = ranked("nightly", fleet.addresses)
    home = fleet.server_at(order[0]).jobs
    home.lost_answers = 1
    client.do(lambda c: c.jobs.create(b'{"custom_id": "a"}\n', job_id="nightly"))
    assert [name for name, _ in home.calls] == ["CreateJob", "CreateJob", "GetJob"]
    assert [fleet.server_at(each).jobs.calls for each in order[1:]] == [[], []]


def test_a_fork_without_an_id_has_the_home_of_its_parent(fleet: Fleet, client: SyncCaller) -> None:
    home = ranked("talk-0", fleet.addresses)[0]
    client.ask("talk-0", "hello")
    for _ in range(10):
        fork = client.do(lambda c: c.conversation("talk-0").fork())
        assert ranked(fork.conversation_id, fleet.addresses)[0] == home


def test_the_client_sends_turns_of_a_named_fork_to_the_parents_home(
    fleet: Fleet, client: SyncCaller
) -> None:
    home = ranked("talk-0", fleet.addresses)[0]
    client.ask("talk-0", "hello")
    name = next(each for each in IDS if ranked(each, fleet.addresses)[0] != home)
    client.do(lambda c: c.conversation("talk-0").fork(conversation_id=name))
    client.ask(name, "and on")
    assert fleet.addresses_called(name) == [home]


# -- streams that break --


def test_a_broken_stream_attaches_again_at_the_daemon_of_its_turn(
    fleet: Fleet, client: SyncCaller
) -> None:
    home = ranked("talk-0", fleet.addresses)[0]
    fleet.server_at(home).mishaps.append(Mishap(after=2))
    events = client.events("talk-0", "a b c d")
    assert [str(each) for each in events] == ["a ", "b ", "c ", "d "]
    assert fleet.addresses_called("talk-0") == [home] * 2
    assert fleet.server_at(home).names() == ["SendMessage", "Check", "SendMessage"]
    assert len(client.slept) == 1


@pytest.mark.parametrize("lost", [False, True], ids=["same attempt", "attempt lost"])
def test_a_turn_continues_at_the_next_daemon_when_its_own_dies(
    lost: bool, fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).mishaps.append(Mishap(after=2, stalls=True))

    def after(number: int) -> None:
        if number == 2:
            if lost:
                for turn in fleet.servers[0].conversations["talk-0"].turns.values():
                    turn.interrupted = True
            fleet.stop(order[0])

    events = client.events("talk-0", "a b c d", after)
    if lost:
        assert [str(each) for each in events] == ["a ", "b ", "", "A ", "B ", "C ", "D "]
        assert events[2] == Restarted(2)
    else:
        assert [str(each) for each in events] == ["a ", "b ", "c ", "d "]
    assert fleet.addresses_called("talk-0") == sorted(order[:2], key=fleet.addresses.index)
    sent = [
        call for address in order[:2] for call in fleet.server_at(address).requests("SendMessage")
    ]
    assert sent[0] == sent[1]
    kept = fleet.servers[0].conversations["talk-0"].messages
    assert [message.content for message in kept if message.role == pb.ROLE_USER] == ["a b c d"]


def test_the_next_daemon_replays_a_turn_that_completed_before_its_daemon_died(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).mishaps.append(Mishap(after=3, stalls=True))

    def after(number: int) -> None:
        if number == 3:
            fleet.servers[0].complete("talk-0")
            fleet.stop(order[0])

    events = client.events("talk-0", "a b c d", after)
    assert [str(each) for each in events] == ["a ", "b ", "c ", "d "]
    kept = fleet.servers[0].conversations["talk-0"]
    assert kept.conversation.revision == 1
    assert [message.content for message in kept.messages] == ["a b c d", "a b c d"]


def test_a_home_that_returns_is_used_from_the_next_turn_on(fleet: Fleet) -> None:
    order = ranked("talk-0", fleet.addresses)
    same_home_id = next(each for each in IDS[1:] if ranked(each, fleet.addresses)[0] == order[0])
    with SyncCaller(fleet.addresses) as client:
        fleet.stop(order[0])
        fleet.server_at(order[1]).mishaps.append(Mishap(after=2))

        def is_home() -> bool:
            client.ask(same_home_id, "hello")
            return order[0] in fleet.addresses_called(same_home_id)

        def after(number: int) -> None:
            if number == 1:
                fleet.start(order[0])
                wait_until(is_home)

        events = client.events("talk-0", "a b c d", after)
        assert [str(each) for each in events] == ["a ", "b ", "c ", "d "]
        assert (
            fleet.addresses_called("talk-0") == [order[1]] * 2
        )  # the daemon where the turn had begun
        client.ask("talk-0", "e")
        assert fleet.addresses_called("talk-0").count(order[0]) == 1


def test_cancel_goes_to_the_daemon_that_runs_the_turn(fleet: Fleet, client: SyncCaller) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.stop(order[0])
    fleet.server_at(order[1]).mishaps.append(Mishap(after=1, stalls=True))
    if isinstance(client, AsyncCaller):

        async def main(given: AsyncClient) -> str:
            turn = given.conversation("talk-0").send("a b c")
            await anext(turn)
            fleet.start(order[0])
            assert await given.conversation("talk-0").cancel()
            return (await turn.reply()).finish_reason

        finish_reason = client.do(main)
    else:
        turn = client.client.conversation("talk-0").send("a b c")
        next(turn)
        fleet.start(order[0])
        assert client.client.conversation("talk-0").cancel()
        finish_reason = turn.reply.finish_reason
    assert finish_reason == "cancelled"
    assert fleet.addresses_called("talk-0", "CancelTurn") == [order[1]]


@pytest.mark.parametrize("dies", [False, True], ids=["home is back", "fallback dies"])
def test_closing_a_turn_ends_it_at_its_daemon_or_else_at_the_next(dies: bool, fleet: Fleet) -> None:
    order = ranked("talk-0", fleet.addresses)
    with SyncCaller(fleet.addresses) as client:
        fleet.stop(order[0])
        fleet.server_at(order[1]).mishaps.append(Mishap(after=1, stalls=True))
        turn = client.client.conversation("talk-0").send("a b c")
        next(turn)
        if dies:
            fleet.stop(order[1])
        else:
            fleet.start(order[0])
        turn.close()
        assert fleet.addresses_called("talk-0", "CancelTurn") == [order[2 if dies else 1]]
        assert fleet.servers[0].conversations["talk-0"].running is None


# -- what a failure means --


@pytest.mark.parametrize("refusal", [AWAY, LOADING, DRAINING], ids=["away", "loading", "draining"])
def test_a_daemon_that_refuses_a_turn_is_avoided_until_it_serves(
    refusal: Refusal, fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    first = fleet.server_at(order[0])
    first.mishaps.append(Mishap(refusal=refusal))
    first.health = NOT_SERVING
    assert client.ask("talk-0", "hello").text == "hello "
    assert client.slept == []
    assert fleet.addresses_called("talk-0") == sorted(order[:2], key=fleet.addresses.index)

    def was_checked_again() -> bool:
        client.ask("talk-0", "again")
        return first.names().count("Check") >= 3

    wait_until(was_checked_again)
    assert first.names().count("SendMessage") == 1  # since then it has only been checked
    assert client.states[order[0]].error == "the daemon is not serving at present"
    first.health = SERVING

    def is_home() -> bool:
        client.ask("talk-0", "home")
        return first.names().count("SendMessage") == 2

    wait_until(is_home)
    assert client.states[order[0]].state == "works"


def test_if_all_daemons_are_unreachable_the_error_gives_each_reason(fleet: Fleet) -> None:
    for address in fleet.addresses:
        fleet.stop(address)
    with SyncCaller(fleet.addresses, Retry(retries=2, first_seconds=0.001)) as client:
        with pytest.raises(errors.Unavailable) as caught:
            client.ask("talk-0", "hello")
        reasons = "; ".join(f"{each}: nothing listens at {each}" for each in fleet.addresses)
        assert str(caught.value) == f"all 3 addresses failed ({reasons})"
        assert len(client.slept) == 2
        with pytest.raises(errors.Unavailable, match="nothing listens"):
            client.client.conversation("talk-0").create()
        assert not client.client.healthy()


def test_the_client_waits_for_a_loading_daemon_if_the_others_are_unreachable(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.stop(order[0])
    fleet.stop(order[2])
    second = fleet.server_at(order[1])
    second.health = NOT_SERVING
    second.mishaps.extend([Mishap(refusal=LOADING)] * 20)  # many more than the retries
    assert client.ask("talk-0", "hello").text == "hello "
    assert len(client.slept) == 20
    assert min(client.slept) >= 1.0


def test_a_create_that_may_have_happened_is_not_sent_to_another_daemon(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).refusals.append(AWAY)
    with pytest.raises(errors.Unavailable, match=rf"(?=.*not tried).*{order[0]}: because"):
        client.do(lambda c: c.conversation("talk-0").create())
    assert fleet.server_at(order[1]).names() == fleet.server_at(order[2]).names() == []


@pytest.mark.parametrize("refusal", [None, LOADING], ids=["out of reach", "loading"])
def test_a_create_that_has_certainly_not_happened_is_sent_to_the_next_daemon(
    refusal: Refusal | None, fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    if refusal is None:
        fleet.stop(order[0])
    else:
        fleet.server_at(order[0]).refusals.append(refusal)
    client.do(lambda c: c.conversation("talk-0").create(system_prompt="Be brief."))
    assert fleet.server_at(order[1]).names() == ["CreateConversation"]
    assert client.slept == []


def test_not_found_at_a_fallback_daemon_explains_the_possible_reason(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.stop(order[0])
    with pytest.raises(errors.NotFound) as caught:
        client.do(lambda c: c.conversation("talk-0").get())
    assert str(caught.value) == (
        f"because (asked {order[1]}, because {order[0]} is unreachable; "
        "this works only if the daemons share one history)"
    )
    home = next(each for each in IDS if ranked(each, fleet.addresses)[0] == order[1])
    with pytest.raises(errors.NotFound, match=r"^because$"):
        client.do(lambda c: c.conversation(home).get())


def test_after_a_timeout_the_daemon_is_checked_before_the_next_call(
    fleet: Fleet, client: SyncCaller
) -> None:
    home = fleet.server_at(ranked("talk-0", fleet.addresses)[0])
    client.ask("talk-0", "hello")  # connects, so that the timeout covers only the next call
    fleet.forget_calls()
    home.hold(threading.Event())
    with pytest.raises(errors.DeadlineExceeded):
        client.do(lambda c: c.conversation("talk-0").get(timeout=1.0))
    assert client.states[home.address].state == "in doubt"
    client.ask("talk-0", "hello")
    assert home.names() == ["GetConversation", "Check", "SendMessage"]
    assert client.states[home.address].state == "works"


def test_healthy_is_true_while_one_daemon_serves(fleet: Fleet, client: SyncCaller) -> None:
    fleet.stop(fleet.addresses[0])
    fleet.servers[1].health = NOT_SERVING
    assert client.do(lambda c: c.healthy())
    fleet.servers[2].health = NOT_SERVING
    assert not client.do(lambda c: c.healthy())


def test_a_hanging_host_delays_only_the_first_call(fleet: Fleet) -> None:
    with contextlib.closing(socket.socket()) as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(50)  # accepts connections, but does not answer
        address = f"127.0.0.1:{hole.getsockname()[1]}"
        addresses = [address, *fleet.addresses]
        mine = [each for each in IDS if ranked(each, addresses)[0] == address][:5]
        with SyncCaller(addresses, Retry(first_seconds=600.0, most_seconds=600.0)) as client:
            for each in mine:
                assert client.ask(each, "hello").text == "hello "
            state = client.states[address]
            assert (state.state, state.num_failures) == ("avoided", 1)
            assert state.seconds_left > 100
            assert client.slept == []


def test_each_turn_is_stored_once_while_daemons_stop_and_start(fleet: Fleet) -> None:
    texts = [f"one two three {number}" for number in range(30)]
    over = threading.Event()

    def restart_daemons() -> None:
        for address in itertools.cycle(fleet.addresses):
            fleet.stop(address)
            time.sleep(0.02)
            fleet.start(address)
            if over.wait(0.03):
                return

    async def talk(client: AsyncClient, name: str) -> None:
        for text in texts:
            seen = ""
            async for event in client.conversation(name).send(text):
                seen = "" if isinstance(event, Restarted) else seen + str(event)
                await asyncio.sleep(0.002)
            assert seen == f"{text} "

    async def main() -> None:
        retry = Retry(retries=20, first_seconds=0.005, most_seconds=0.1)
        async with (
            AsyncClient(fleet.addresses, retry=retry) as client,
            asyncio.TaskGroup() as group,
        ):
            for name in IDS[:20]:
                group.create_task(talk(client, name))

    thread = threading.Thread(target=restart_daemons)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
    num_sent = sum(server.names().count("SendMessage") for server in fleet.all_servers)
    assert len(fleet.all_servers) > 5
    assert num_sent > 20 * len(texts)  # some messages were sent again
    for name in IDS[:20]:
        kept = fleet.servers[0].conversations[name]
        assert [message.content for message in kept.messages] == [
            text for text in texts for _ in range(2)
        ]


# -- homes that daemons name --


def owned_at(address: str) -> Refusal:
    return Refusal("UNAVAILABLE", "OWNED_ELSEWHERE", {"address": address})


def test_the_client_learns_the_home_that_a_daemon_names(fleet: Fleet, client: SyncCaller) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).mishaps.append(Mishap(refusal=owned_at(order[2])))
    assert client.ask("talk-0", "hello").text == "hello "
    client.ask("talk-0", "again")
    assert fleet.addresses_called("talk-0").count(order[2]) == 2
    assert fleet.addresses_called("talk-0").count(order[0]) == 1
    assert client.slept == []
    assert client.states[order[0]].state == "works"
    fleet.stop(order[2])  # then the learned home is given up
    client.ask("talk-0", "on")
    assert fleet.addresses_called("talk-0").count(order[0]) == 2


def test_a_turn_whose_conversation_moves_continues_at_the_new_home(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).mishaps.append(Mishap(after=2, refusal=owned_at(order[2])))
    fleet.server_at(order[2]).mishaps.append(Mishap(after=2, refusal=owned_at(order[0])))
    events = client.events("talk-0", "a b c d")
    assert [str(each) for each in events] == ["a ", "b ", "c ", "d "]
    assert fleet.addresses_called("talk-0").count(order[0]) == 2
    assert fleet.addresses_called("talk-0").count(order[2]) == 1
    assert len(client.slept) == 2  # daemons that disagree cannot keep the client in a busy loop


def test_owned_elsewhere_carries_the_address_of_the_home() -> None:
    trailing = [
        (
            "grpc-status-details-bin",
            status(errors.OwnedElsewhere("tea", "two", "gpu2:1")).SerializeToString(),
        )
    ]
    error = error_of(grpc.StatusCode.UNAVAILABLE, "elsewhere", trailing)
    assert isinstance(error, errors.OwnedElsewhere)
    assert error.address == "gpu2:1"
    assert str(error) == "conversation 'tea' is served by two at gpu2:1"


def test_a_create_refused_by_a_daemon_that_names_the_home_is_sent_there(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    fleet.server_at(order[0]).refusals.append(owned_at(order[1]))
    client.do(lambda c: c.conversation("talk-0").create())
    assert fleet.server_at(order[1]).names() == ["CreateConversation"]


def test_the_client_waits_if_the_named_home_is_not_one_of_its_addresses(
    fleet: Fleet, client: SyncCaller
) -> None:
    """The owner has died. The remaining daemons must wait until its lease ends."""
    for server in fleet.servers:
        server.mishaps.extend([Mishap(refusal=owned_at("10.9.9.9:50051"))] * 2)
    assert client.ask("talk-0", "hello").text == "hello "
    assert len(client.slept) == 2
    for server in fleet.servers:
        server.mishaps.extend([Mishap(refusal=owned_at("10.9.9.9:50051"))] * 9)
    with pytest.raises(errors.Unavailable, match=r"served by .* at 10\.9\.9\.9:50051"):
        client.ask("talk-0", "hello")


def test_two_daemons_that_name_each_other_cause_no_extra_tries(
    fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    for address, other in ((order[0], order[1]), (order[1], order[0])):
        fleet.server_at(address).mishaps.extend([Mishap(refusal=owned_at(other))] * 50)
    fleet.stop(order[2])
    with pytest.raises(errors.Unavailable, match="served by"):
        client.ask("talk-0", "hello")
    assert len(client.slept) == 3
    assert len(fleet.addresses_called("talk-0")) <= 2 * 4


@pytest.mark.parametrize("call", ["ask", "get"])
def test_the_client_learns_the_home_of_a_forwarded_call(
    call: str, fleet: Fleet, client: SyncCaller
) -> None:
    order = ranked("talk-0", fleet.addresses)
    client.ask("talk-0", "hello")
    fleet.server_at(order[0]).homes["talk-0"] = order[1]
    if call == "ask":
        client.ask("talk-0", "forwarded")
    else:
        client.do(lambda c: c.conversation("talk-0").get())
    fleet.forget_calls()
    client.ask("talk-0", "on")
    assert fleet.addresses_called("talk-0") == [order[1]]


# -- one daemon, and addresses --


def test_admin_accepts_only_one_address() -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Admin("gpu1:50051,gpu2:50051")
    assert str(caught.value) == (
        "address: Admin connects to one daemon; pass one of gpu1:50051, gpu2:50051"
    )


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("gpu1:50051", ["gpu1:50051"]),
        ("grpc://gpu1:1, gpu2:2 ,unix:/run/p.sock", ["gpu1:1", "gpu2:2", "unix:/run/p.sock"]),
        (["gpu1:1", "grpc://gpu2:2"], ["gpu1:1", "gpu2:2"]),
        (None, ["127.0.0.1:50051"]),
    ],
)
def test_addresses_are_a_list_or_a_comma_separated_string(address: Any, names: list[str]) -> None:
    for kind in (Client, AsyncClient):
        assert [each.address for each in kind(address).addresses] == names


def test_addresses_default_to_the_variable_pensieve_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSIEVE_DAEMON", "gpu1:1,gpu2:2")
    client = Client()
    assert [each.address for each in client.addresses] == ["gpu1:1", "gpu2:2"]
    assert repr(client) == "<Client of gpu1:1,gpu2:2>"
    assert [each.address for each in Client("gpu3:3").addresses] == ["gpu3:3"]


@pytest.mark.parametrize("address", ["gpu1:1,", ",", "", [], "gpu1:1,grpc://gpu1:1", "a:1\nb:1"])
def test_invalid_addresses_are_refused(address: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"^address: "):
        Client(address)
