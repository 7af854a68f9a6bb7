"""Clients that send their whole history find their conversation again, and only new tokens are computed."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.conversations.binding.binder import Binder, BindingKind, BoundTurn
from pensieve.conversations.binding.chain import ChainEnd, Piece, session_digest
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.heads import ConversationSettings
from pensieve.conversations.live_turn import ReplyTokens
from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.core.turn import TurnOptions
from pensieve.errors import InvalidArgument, PensieveError, QueueFull, TurnInterrupted
from pensieve.sampling import Sampling
from pensieve.store import ConversationStore
from pensieve.text import Message, Part, ToolCall
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for
from tests.store.faulty import writer_of

SHORT = TurnOptions(Sampling(max_tokens=4, ignore_eos=True))
SLOW = (*ECHO, "--seconds=0.02")


async def take_nothing(tokens: ReplyTokens) -> None:
    """Read nothing, like a client that waits only for the end."""


def stateless(
    messages: tuple[Message, ...], options: TurnOptions = SHORT, **more: Any
) -> TurnRequest:
    """Return a request with the client's whole history."""
    return TurnRequest("", messages, options, **more)


class Bindings:
    """A daemon with a binder, and the calls of its stateless clients."""

    def __init__(self, data: Path, **options: Any) -> None:
        self.rig = DaemonRig(data, **options)

    def __enter__(self) -> Bindings:
        self.rig.__enter__()

        async def make() -> Binder:
            return Binder(self.rig.daemon)

        self.binder: Binder = self.rig.call(make())
        return self

    def __exit__(self, *error: Any) -> None:
        self.rig.__exit__(*error)

    def begin(
        self, chat: TurnRequest, num_choices: int = 1, seconds_left: float | None = None
    ) -> list[BoundTurn]:
        """Begin turns. Each has a reader until it has ended."""

        async def begin() -> list[BoundTurn]:
            found = await self.binder.begin(
                chat, chat.chain or ChainEnd(), num_choices, seconds_left
            )
            for each in found:
                self.rig.daemon.threads.spawn(self._follow(each))
            return found

        bound: list[BoundTurn] = self.rig.call(begin())
        return bound

    async def _follow(self, bound: BoundTurn) -> None:
        try:
            await self.rig.daemon.conversations.followers.follow(bound.live, take_nothing)
        except PensieveError:
            assert bound.live.failure is not None

    def run_all(self, chat: TurnRequest, num_choices: int = 1) -> list[BoundTurn]:
        found = self.begin(chat, num_choices)
        for each in found:
            wait_for(lambda live=each.live: live.finish is not None)
        return found

    def run_one(self, chat: TurnRequest) -> BoundTurn:
        (found,) = self.run_all(chat)
        assert found.live.failure is None
        return found

    def disconnect(self, bound: BoundTurn) -> None:
        async def drop() -> None:
            self.rig.daemon.conversations.ends.give_up(bound.live)
            await self.rig.daemon.conversations.followers.until_ended(bound.live)

        self.rig.call(drop())

    def stop(self, bound: BoundTurn, keep_tokens: int) -> None:
        async def stop() -> None:
            self.rig.daemon.conversations.ends.stop(bound.live, keep_tokens)
            await self.rig.daemon.conversations.followers.until_ended(bound.live)

        self.rig.call(stop())

    @property
    def ids(self) -> list[str]:
        request = pb.ListConversationsRequest(page_size=1000)
        listed = self.rig.stub.ListConversations(request).conversations
        return sorted(each.conversation_id for each in listed)

    def texts(self, conversation_id: str) -> list[str]:
        return [each.content for each in self.rig.messages(conversation_id)]

    def token_ids(self, conversation_id: str) -> list[int]:
        return [token for each in self.rig.messages(conversation_id) for token in each.token_ids]

    def check(self) -> None:
        assert self.rig.call(self.rig.daemon.check()) == []


@dataclass
class Talk:
    """A stateless client with its history."""

    bindings: Bindings
    chat: TurnRequest = field(default_factory=lambda: stateless(()))
    messages: list[Message] = field(default_factory=list)

    def say(self, text: str, **options: Any) -> BoundTurn:
        self.messages.append(Message("user", text))
        chat = replace(self.chat, messages=tuple(self.messages), **options)
        bound = self.bindings.run_one(chat)
        self.messages.append(Message("assistant", f" {bound.live.text}\n"))
        return bound


@contextmanager
def bindings_over(data: Path, **options: Any) -> Iterator[Bindings]:
    with Bindings(data, **options) as bindings:
        yield bindings
        bindings.check()


@pytest.fixture
def bindings(tmp_path: Path) -> Iterator[Bindings]:
    with bindings_over(tmp_path / "data") as bindings:
        yield bindings


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Bindings]:
    with bindings_over(tmp_path / "data", program=SLOW) as bindings:
        yield bindings


def test_twenty_stateless_turns_use_one_conversation_and_recompute_nothing(
    bindings: Bindings,
) -> None:
    talk = Talk(bindings)
    talk.messages.append(Message("system", "Be brief."))
    history = 0
    for number in range(20):
        bound = talk.say(f"Question {number}")
        usage = bound.live.usage
        assert usage is not None
        assert usage.recomputed_tokens == usage.host_tokens == 0
        assert usage.device_tokens == max(history - 1, 0)
        assert bound.how is (BindingKind.APPENDED if number else BindingKind.NEW)
        assert bound.num_known_messages == (2 * number + 1 if number else 0)
        history = len(bindings.token_ids(bound.conversation_id))
    assert bindings.ids == [bound.conversation_id]
    assert bindings.binder.num_bound == {BindingKind.NEW: 1, BindingKind.APPENDED: 19}
    assert bindings.texts(bound.conversation_id)[:2] == ["Be brief.", "Question 0"]


def test_stateless_turns_have_the_same_log_as_turns_by_conversation_id(bindings: Bindings) -> None:
    """Compare every token. The echo engine's replies depend on all tokens before them."""
    bindings.rig.stub.CreateConversation(
        pb.CreateConversationRequest(conversation_id="named", system_prompt="Be brief.")
    )
    talk = Talk(bindings, messages=[Message("system", "Be brief.")])
    for number in range(6):
        bound = talk.say(f"Question {number}")
        sampling = pb.Sampling(max_tokens=4, ignore_eos=True)
        said = bindings.rig.ask("named", f"Question {number}", sampling=sampling)
        assert list(bound.live.reply.token_ids) == said.token_ids
    assert bindings.token_ids(bound.conversation_id) == bindings.token_ids("named")


def test_an_edited_message_makes_a_fork_that_shares_the_messages_before_it(
    bindings: Bindings,
) -> None:
    talk = Talk(bindings)
    first = talk.say("One")
    talk.say("Two")
    third = talk.say("Three")
    assert third.conversation_id == first.conversation_id
    edited = Talk(bindings, messages=talk.messages[:2])
    bound = edited.say("Another two")
    assert (bound.how, bound.num_known_messages) == (BindingKind.FORKED, 2)
    assert bound.conversation_id != first.conversation_id
    assert bound.live.usage is not None
    assert bound.live.usage.recomputed_tokens == 0
    texts = bindings.texts(first.conversation_id)
    assert bindings.texts(bound.conversation_id)[:2] == texts[:2]
    assert texts[2] == "Two"
    assert edited.say("Go on").how is BindingKind.APPENDED
    assert talk.say("Four").how is BindingKind.APPENDED
    assert len(bindings.ids) == 2


def test_a_regenerated_reply_makes_a_fork(bindings: Bindings) -> None:
    talk = Talk(bindings)
    talk.say("One")
    talk.say("Two")
    again = Talk(bindings, messages=talk.messages[:2])
    bound = again.say("Two")
    assert (bound.how, bound.num_known_messages) == (BindingKind.FORKED, 2)
    assert again.messages == talk.messages  # replies are greedy
    assert talk.say("Three").how is BindingKind.APPENDED
    assert again.say("Three").how is BindingKind.APPENDED
    first_again = Talk(bindings).say("One")
    assert (first_again.how, first_again.num_known_messages) == (BindingKind.NEW, 0)


def test_an_edited_reply_makes_a_fork_at_the_last_known_message(bindings: Bindings) -> None:
    talk = Talk(bindings)
    talk.say("One")
    talk.say("Two")
    talk.messages[3] = Message("assistant", "What I never wrote")
    bound = talk.say("Three")
    assert (bound.how, bound.num_known_messages) == (BindingKind.FORKED, 2)
    assert bindings.texts(bound.conversation_id)[2:5] == ["Two", "What I never wrote", "Three"]
    assert talk.say("Four").how is BindingKind.APPENDED


def test_two_clients_with_the_same_history_get_separate_conversations(slow: Bindings) -> None:
    talk = Talk(slow)
    talk.say("One")
    chat = replace(talk.chat, messages=(*talk.messages, Message("user", "Two")))
    one, other = slow.begin(chat)[0], slow.begin(chat)[0]
    assert [one.how, other.how] == [BindingKind.APPENDED, BindingKind.FORKED]
    wait_for(lambda: one.live.finish and other.live.finish)
    assert one.live.text == other.live.text
    assert one.conversation_id != other.conversation_id


def test_client_sessions_with_the_same_history_get_separate_conversations(
    bindings: Bindings,
) -> None:
    tabs = [
        Talk(
            bindings, stateless((), chain=ChainEnd(client_session=session_digest(f"tab {number}")))
        )
        for number in (1, 2)
    ]
    for round_number, text in enumerate(("One", "Two", "Three")):
        bounds = [tab.say(text) for tab in tabs]
        expected = BindingKind.APPENDED if round_number else BindingKind.NEW
        assert [each.how for each in bounds] == [expected, expected]
        assert bounds[0].conversation_id != bounds[1].conversation_id
    assert len(bindings.ids) == 2
    moved = Talk(bindings, messages=list(tabs[0].messages)).say("Four")  # has no session
    assert (moved.how, moved.num_known_messages) == (BindingKind.FORKED, 6)


def test_a_history_of_another_tenant_is_not_found(bindings: Bindings) -> None:
    talk = Talk(bindings)
    talk.say("One")
    other = Talk(bindings, replace(talk.chat, tenant="another"), list(talk.messages))
    assert other.say("Two").how is BindingKind.NEW
    assert talk.say("Two").how is BindingKind.APPENDED


def test_choices_are_forks_and_each_can_be_continued(slow: Bindings) -> None:
    talk = Talk(slow)
    talk.say("One")
    sampling = replace(SHORT.sampling, temperature=1.0, seed=7)
    messages = (*talk.messages, Message("user", "Two"))
    bounds = slow.run_all(stateless(messages, TurnOptions(sampling)), 3)
    assert [each.how for each in bounds] == [
        BindingKind.APPENDED,
        BindingKind.FORKED,
        BindingKind.FORKED,
    ]
    assert len({each.conversation_id for each in bounds}) == 3
    assert {each.num_known_messages for each in bounds} == {2}
    seeds = [each.live.request.options.sampling.seed for each in bounds if each.live.request]
    assert seeds[0] == 7
    assert len({*seeds}) == 3
    last = Message("assistant", bounds[2].live.text)
    go_on = slow.run_one(stateless((*messages, last, Message("user", "Three"))))
    assert go_on.how is BindingKind.APPENDED
    assert go_on.conversation_id in {each.conversation_id for each in bounds}
    fresh = slow.run_all(stateless((Message("user", "New"),)), 2)
    assert [each.how for each in fresh] == [BindingKind.NEW, BindingKind.NEW]


def test_choices_of_a_new_history_share_the_prompt(slow: Bindings) -> None:
    """The first choice computes the prompt. The others start after the prompt, as forks."""
    sampling = replace(SHORT.sampling, temperature=1.0, seed=7)
    messages = (Message("system", "Be brief."), Message("user", "word " * 300))
    bounds = slow.run_all(stateless(messages, TurnOptions(sampling)), 4)
    usages = [each.live.figures for each in bounds]
    prompt = usages[0]["prompt_tokens"]
    assert (usages[0]["new_tokens"], usages[0]["device_tokens"]) == (prompt, 0)
    for each in usages[1:]:
        assert each["prompt_tokens"] == prompt == each["device_tokens"] + each["new_tokens"]
        assert 1 <= each["new_tokens"] <= 32, "at most a partly filled chunk"
    logs = [slow.token_ids(each.conversation_id)[:prompt] for each in bounds]
    assert logs == [logs[0]] * 4
    slow.check()


def test_a_disconnect_before_the_prompt_is_computed_leaves_no_choices(
    tmp_path: Path,
) -> None:
    with Bindings(tmp_path / "data", program=(*ECHO, "--seconds=0.2")) as found:
        sampling = Sampling(max_tokens=1000, ignore_eos=True)
        chat = stateless((Message("user", "word " * 300),), TurnOptions(sampling))

        async def leave() -> None:
            waiting = asyncio.ensure_future(found.binder.begin(chat, num_choices=4))
            while not found.rig.daemon.conversations.turns.num_live:
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

        found.rig.call(leave())
        wait_for(lambda: found.rig.num_live == 0)
        wait_for(lambda: found.ids == [])
        found.check()


def test_a_refused_request_creates_no_conversation(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    create = ConversationStore.create_conversation

    def note(store: ConversationStore, new: Any) -> Any:
        created.append(new.conversation_id)
        return create(store, new)

    monkeypatch.setattr(ConversationStore, "create_conversation", note)
    nothing = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "nothing"}')
    long = "word " * 20_000
    system = Message("system", "Be brief.")
    for messages, options in (
        ((system, Message("user", "Hello")), TurnOptions(SHORT.sampling, constraint=nothing)),
        ((system, Message("user", long)), TurnOptions(SHORT.sampling, constraint=nothing)),
        ((Message("user", "word " * 200_000),), SHORT),
        ((Message("user", ""),), SHORT),
    ):
        with pytest.raises(PensieveError):
            bindings.begin(stateless(messages, options))
    assert created == []
    assert bindings.ids == []
    assert bindings.run_one(stateless((system, Message("user", "Hello")))).how is BindingKind.NEW
    assert len(created) == 1


def calls_reader(pieces: Sequence[Piece]) -> Message:
    """Read each reply as a tool call whose argument is the length of its text."""
    text = "".join(text for _, text in pieces)
    return Message("assistant", text, tool_calls=(ToolCall("f", {"n": len(text)}, "server-id"),))


def test_tool_calls_are_matched_even_if_the_client_rewrites_them(bindings: Bindings) -> None:
    chat = stateless((), chain=ChainEnd(reply_reader=calls_reader))
    messages = [Message("system", "Act."), Message("user", "Go")]
    for number in range(5):
        bound = bindings.run_one(replace(chat, messages=tuple(messages)))
        assert bound.how is (BindingKind.APPENDED if number else BindingKind.NEW)
        assert bound.num_known_messages == (len(messages) - 1 if number else 0)
        made = ToolCall("f", {"n": float(len(bound.live.text))}, f"own-{number}")
        messages.append(Message("assistant", "", "dropped", (made,)))
        messages.append(Message("tool", "", tool_call_id=f"own-{number}"))
    assert bindings.ids == [bound.conversation_id]


def test_a_history_is_found_even_if_the_client_drops_thinking(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon takes every second token of a reply for thinking."""
    numbers = iter(range(10**6))
    monkeypatch.setattr(
        "pensieve.text.parts.PartMarker.push",
        lambda self, token_id: Part.THINKING if next(numbers) % 2 else Part.TEXT,
    )
    messages: list[Message] = []
    for number in range(4):
        messages.append(Message("user", f"Question {number}"))
        bound = bindings.run_one(stateless(tuple(messages)))
        assert bound.how is (BindingKind.APPENDED if number else BindingKind.NEW)
        live = bound.live
        shown = [
            text
            for text, part in zip(live.reply.texts, live.reply.parts, strict=True)
            if part == "text"
        ]
        assert "".join(shown) != live.text
        messages.append(Message("assistant", "".join(shown)))


def test_conversations_with_the_same_beginning_share_kv(bindings: Bindings) -> None:
    prompt = Message("system", "Be brief and kind. " * 20)
    bindings.run_one(stateless((prompt, Message("user", "One"))))
    bound = bindings.run_one(stateless((prompt, Message("user", "Another"))))
    assert bound.how is BindingKind.NEW
    assert bound.live.usage is not None
    assert bound.live.usage.shared_tokens > 40
    spaced = replace(prompt, content=prompt.content + " ")
    bindings.run_one(stateless((spaced, Message("user", "Third"))))


def test_a_tenants_prefix_with_a_generated_name_does_not_disturb_the_binder(
    bindings: Bindings,
) -> None:
    from pensieve.conversations.binding.chain import prefix_id

    name = prefix_id("Be brief.", ())
    bindings.rig.stub.CreateConversation(
        pb.CreateConversationRequest(conversation_id="c", system_prompt="Be long.", prefix_id=name)
    )
    messages = (Message("system", "Be brief."), Message("user", "One"))
    assert bindings.run_one(stateless(messages)).how is BindingKind.NEW


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_loses_no_history(tmp_path: Path, is_killed: bool) -> None:
    data = tmp_path / "data"
    with bindings_over(data) as bindings:
        talk = Talk(bindings)
        first = talk.say("One")
        talk.say("Two")
        if is_killed:  # copy the files that a killed process would leave
            sockets = shutil.ignore_patterns("*.sock")
            data = Path(shutil.copytree(data, tmp_path / "left", ignore=sockets))
    with bindings_over(data) as bindings:
        talk.bindings = bindings
        bound = talk.say("Three")
        assert (bound.how, bound.num_known_messages) == (BindingKind.APPENDED, 4)
        assert bound.conversation_id == first.conversation_id


def test_a_turn_that_is_given_up_leaves_no_conversation_behind(slow: Bindings) -> None:
    talk = Talk(slow)
    kept = talk.say("One").conversation_id
    long = TurnOptions(Sampling(max_tokens=1000, ignore_eos=True))
    edited = Message("user", "Two")
    talk.say("Other two")
    for messages in ((edited,), (*talk.messages[:2], edited)):
        (bound,) = slow.begin(stateless(messages, long))
        assert len(slow.ids) == 2
        slow.disconnect(bound)
        wait_for(lambda: slow.ids == [kept])
        assert isinstance(bound.live.failure, TurnInterrupted)
    assert talk.say("Three").conversation_id == kept


def test_an_invalid_request_leaves_no_conversation_or_lookup_behind(bindings: Bindings) -> None:
    talk = Talk(bindings)
    kept = talk.say("One").conversation_id
    unknown = ConversationSettings("", template_options={"no_such": 1})
    refused = [
        stateless(()),
        stateless((Message("user", ""),)),
        stateless((*talk.messages, Message("user", ""))),
        stateless(
            (Message("user", "Hi"),),
            settings=unknown,
        ),
        stateless((Message("user", "Hi"),), TurnOptions(Sampling(top_p=7.0))),
        stateless((Message("user", "x" * 10**7),)),
        stateless((Message("user", "\ud800"),)),
        stateless((Message("system", "\ud800"), Message("user", "Hi"))),
    ]
    for chat in refused:
        with pytest.raises(InvalidArgument):
            bindings.begin(chat)
    wait_for(lambda: bindings.ids == [kept])
    assert not bindings.binder._unused
    assert not bindings.binder._num_lookups[""]


def test_a_full_daemon_refuses_new_requests_and_answers_known_ones(
    tmp_path: Path,
) -> None:
    config = DaemonConfig(live_turns_max=1, grace_seconds=0.2)
    long = TurnOptions(Sampling(max_tokens=100_000, ignore_eos=True))
    with bindings_over(tmp_path / "data", program=SLOW, config=config) as bindings:
        known = stateless((Message("user", "One"),), request_id="again")
        answered = bindings.run_one(known)
        (running,) = bindings.begin(stateless((Message("user", "Long"),), long))
        with pytest.raises(QueueFull):
            bindings.begin(stateless((Message("user", "Two"),)))
        with pytest.raises(QueueFull):
            bindings.begin(stateless((Message("user", "Two"),), request_id="new"))
        again = bindings.run_one(known)
        assert (again.how, again.live.text) == (BindingKind.RETRIED, answered.live.text)
        bindings.disconnect(running)
        wait_for(lambda: bindings.ids == [answered.conversation_id])


def test_a_repeated_request_gets_the_same_turn(slow: Bindings) -> None:
    """Requests that were new, appended or forked are sent again, while they run and after they have ended."""
    long = TurnOptions(Sampling(max_tokens=100_000, ignore_eos=True))
    opening = stateless((Message("user", "One"),), long, request_id="first / ünïcode")
    runs, attached = slow.begin(opening, 2), slow.begin(opening, 2)
    assert [each.how for each in attached] == [BindingKind.RETRIED, BindingKind.RETRIED]
    assert [each.live for each in attached] == [each.live for each in runs]
    wait_for(lambda: all(each.live.num_tokens >= 4 for each in runs))
    for each in runs:
        slow.stop(each, keep_tokens=4)
    history = (*opening.messages, Message("assistant", runs[0].live.text))
    hows = {
        "Two": BindingKind.APPENDED,
        "Other two": BindingKind.APPENDED,
        "Third two": BindingKind.FORKED,
    }
    for text, how in hows.items():  # both choices gave the same reply
        chat = stateless((*history, Message("user", text)), request_id=f"r {text}")
        first = slow.run_one(chat)
        ids = slow.ids
        again = slow.run_one(chat)
        assert (first.how, again.how) == (how, BindingKind.RETRIED)
        assert again.live.replayed
        assert again.live.reply.token_ids == first.live.reply.token_ids
        assert again.conversation_id == first.conversation_id
        assert again.num_known_messages == first.num_known_messages == 2
        assert slow.ids == ids
    replayed = slow.run_all(opening, 2)
    assert [each.live.text for each in replayed] == [each.live.text for each in runs]
    with pytest.raises(InvalidArgument):
        slow.begin(replace(opening, messages=(Message("user", "Something else"),)))


@pytest.mark.parametrize("how", [BindingKind.NEW, BindingKind.APPENDED, BindingKind.FORKED])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_idempotency_key_with_another_body_is_refused(
    slow: Bindings, how: BindingKind, is_running: bool
) -> None:
    talk = Talk(slow)
    if how is not BindingKind.NEW:
        talk.say("One")
    if how is BindingKind.FORKED:
        before = list(talk.messages)
        talk.say("Two")
        talk.messages = before
    options = TurnOptions(Sampling(max_tokens=100_000 if is_running else 4, ignore_eos=True))
    last = Message("user", "Go on")
    keyed = stateless((*talk.messages, last), options, request_id="key")
    (first,) = slow.begin(keyed) if is_running else slow.run_all(keyed)
    assert first.how is how
    ids = slow.ids
    beginnings = ((), (Message("user", "Other"), Message("assistant", "other")), talk.messages)
    for beginning in beginnings:
        for message in (Message("user", "Else"), last):
            other = replace(keyed, messages=(*beginning, message))
            if other == keyed:
                continue
            with pytest.raises(InvalidArgument, match="already used with different content"):
                slow.begin(other)
    assert slow.ids == ids
    (again,) = slow.begin(keyed)
    assert (again.how, again.live.turn_id) == (BindingKind.RETRIED, first.live.turn_id)
    if is_running:
        slow.disconnect(first)


def test_concurrent_identical_requests_are_one_turn(slow: Bindings) -> None:
    chat = stateless((Message("user", "One"),), request_id="r")

    async def both() -> list[list[BoundTurn]]:
        return list(await asyncio.gather(*(slow.binder.begin(chat) for _ in range(3))))

    found = slow.rig.call(both())
    assert len({each.live.attempt_id for (each,) in found}) == 1
    assert sorted(each.how for (each,) in found) == [
        BindingKind.RETRIED,
        BindingKind.RETRIED,
        BindingKind.NEW,
    ]
    assert len(slow.ids) == 1
    assert not slow.rig.daemon.conversations.arriving._beginning


def test_an_interrupted_request_can_run_again(slow: Bindings) -> None:
    talk = Talk(slow)
    talk.say("One")
    long = TurnOptions(Sampling(max_tokens=30, ignore_eos=True))
    for messages in ((Message("user", "New"),), (*talk.messages, Message("user", "Two"))):
        chat = stateless(messages, long, request_id=f"r{len(messages)}")
        (bound,) = slow.begin(chat)
        slow.disconnect(bound)
        again = slow.run_one(chat)
        assert again.how is bound.how
        assert again.live.num_tokens == 30


def test_a_forgotten_idempotency_key_begins_a_new_turn_with_the_same_history(
    slow: Bindings,
) -> None:
    one = (Message("user", "One"),)
    first = slow.run_one(stateless(one, request_id="first"))
    two = (*one, Message("assistant", first.live.text), Message("user", "Two"))
    chats = [stateless(one, request_id="first")]
    chats += [stateless(two, request_id=key) for key in ("appended", "forked")]
    before = [first, *(slow.run_one(each) for each in chats[1:])]
    assert [each.how for each in before] == ["new", "appended", "forked"]
    daemon = slow.rig.daemon

    async def forget() -> None:
        await daemon.threads.in_store("", daemon.store.forgetting.step, 1e12)

    slow.rig.call(forget())
    for chat in chats:
        again = slow.run_one(chat)
        assert again.how is not BindingKind.RETRIED
        said = [each.content for each in chat.messages]
        assert slow.texts(again.conversation_id) == [*said, again.live.text]
        assert again.conversation_id not in {each.conversation_id for each in before}


def test_many_concurrent_clients_with_one_history_get_separate_conversations(
    bindings: Bindings,
) -> None:
    """The first request is appended, the others fork. Each history has its own question."""
    talk = Talk(bindings)
    talk.say("One")

    async def everybody() -> list[BoundTurn]:
        chats = [
            stateless((*talk.messages, Message("user", f"Two {number}"))) for number in range(20)
        ]
        found = await asyncio.gather(*(bindings.binder.begin(chat) for chat in chats))
        lives = [each for (each,) in found]
        follow = bindings.rig.daemon.conversations.followers.follow
        await asyncio.gather(*(follow(each.live, take_nothing) for each in lives))
        return lives

    found = bindings.rig.call(everybody())
    assert [each.how for each in found].count(BindingKind.APPENDED) == 1
    assert [each.how for each in found].count(BindingKind.FORKED) == 19
    for number, each in enumerate(found):
        assert bindings.texts(each.conversation_id)[2] == f"Two {number}"


def test_a_conversation_deleted_between_lookup_and_begin_is_looked_up_again(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The binder then looks again. Here it finds nothing, so the whole history is new."""
    talk = Talk(bindings)
    first = talk.say("One").conversation_id
    begin = bindings.rig.daemon.begin
    deletions: list[Any] = []

    async def begin_late(ask: Any, seconds_left: float | None = None) -> Any:
        if not deletions:
            deletions.append(first)
            await bindings.rig.daemon.conversations.delete(first)
        return await begin(ask, seconds_left)

    monkeypatch.setattr(bindings.rig.daemon, "begin", begin_late)
    bound = talk.say("Two")
    assert deletions == [first]
    assert (bound.how, bound.num_known_messages) == (BindingKind.NEW, 0)
    assert bindings.texts(bound.conversation_id)[0] == "One"


def test_another_turn_between_lookup_and_begin_causes_a_fork(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(bindings)
    first = talk.say("One").conversation_id
    begin = bindings.rig.daemon.begin
    other_began = threading.Event()

    async def begin_late(ask: Any, seconds_left: float | None = None) -> Any:
        if not other_began.is_set():
            other_began.set()
            other = replace(ask, messages=(Message("user", "By gRPC"),), chain=None)
            live = await begin(other, seconds_left)
            await bindings.rig.daemon.conversations.followers.follow(live, take_nothing)
        return await begin(ask, seconds_left)

    monkeypatch.setattr(bindings.rig.daemon, "begin", begin_late)
    bound = talk.say("Two")
    assert (bound.how, bound.num_known_messages) == (BindingKind.FORKED, 2)
    assert bindings.texts(first)[2] == "By gRPC"
    assert bindings.texts(bound.conversation_id)[2] == "Two"


@pytest.mark.parametrize("request_id", ["", "again"])
def test_no_request_appends_to_a_fork_whose_first_turn_is_about_to_begin(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    """Another request with the same history must not find the fork idle and append to it."""
    talk = Talk(bindings)
    talk.say("One")
    shared = tuple(talk.messages)
    talk.say("Two")
    daemon = bindings.rig.daemon
    begin = daemon.begin
    others: list[BoundTurn] = []
    is_first = True

    async def begin_late(ask: Any, seconds_left: float | None = None) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            chat = stateless((*shared, Message("user", "Four")))
            others.extend(await bindings.binder.begin(chat))
            await daemon.conversations.followers.follow(others[0].live, take_nothing)
        return await begin(ask, seconds_left)

    monkeypatch.setattr(daemon, "begin", begin_late)
    chat = stateless((*shared, Message("user", "Three")), request_id=request_id)
    bound = bindings.run_one(chat)
    (other,) = others
    assert (bound.how, other.how) == (BindingKind.FORKED, BindingKind.FORKED)
    assert bindings.texts(bound.conversation_id)[2] == "Three"
    assert bindings.texts(other.conversation_id)[2] == "Four"


def test_a_deleted_conversation_is_no_longer_found(bindings: Bindings) -> None:
    talk = Talk(bindings)
    first = talk.say("One").conversation_id
    bindings.rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=first))
    assert talk.say("Two").how is BindingKind.NEW
    assert bindings.ids == [talk.say("Three").conversation_id]


def test_digests_are_forgotten_after_chain_keep_seconds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with bindings_over(
        data, config=DaemonConfig(grace_seconds=0.2, chain_keep_seconds=3600.0)
    ) as bindings:
        talk = Talk(bindings)
        talk.say("One")
        assert talk.say("Two").how is BindingKind.APPENDED
    with bindings_over(
        data, config=DaemonConfig(grace_seconds=0.2, chain_keep_seconds=0.2)
    ) as bindings:
        wait_for(lambda: not num_chains(bindings.rig.daemon.store))
        talk.bindings = bindings
        assert talk.say("Three").how is BindingKind.NEW


def num_chains(store: ConversationStore) -> int:
    from pensieve.store.connection import read_only

    with read_only(store.folder.database_path, writer_of(store).driver) as conn:
        count: int = conn.execute("SELECT count(*) FROM chains").fetchone()[0]
        return count


def test_an_unreadable_reply_is_stored_but_not_matched_later(bindings: Bindings) -> None:
    def fails(pieces: Sequence[Piece]) -> Message:
        raise ValueError("not like that")

    talk = Talk(bindings, stateless((), chain=ChainEnd(reply_reader=fails)))
    first = talk.say("One")
    assert bindings.texts(first.conversation_id)[1] == first.live.text
    assert talk.say("Two").how is BindingKind.NEW


def test_a_long_history_is_imported(bindings: Bindings) -> None:
    """The messages were not generated here. They include tool calls, tool results and empty texts."""
    made = ToolCall("f", {"a": 1}, "x")
    exchange = [
        Message("user", "Hi"),
        Message("assistant", "Let me see.", tool_calls=(made,)),
        Message("tool", "", tool_call_id="x"),
        Message("assistant", ""),
    ]
    messages = [Message("system", "Act."), *exchange * 300]
    bound = bindings.run_one(stateless((*messages, Message("user", "Now?"))))
    assert bound.how is BindingKind.NEW
    request = pb.GetConversationRequest(conversation_id=bound.conversation_id)
    assert bindings.rig.stub.GetConversation(request).conversation.num_messages == len(messages) + 2
    reply = Message("assistant", bound.live.text)
    longer = (*messages, Message("user", "Now?"), reply, Message("user", "And?"))
    again = bindings.run_one(stateless(longer))
    assert (again.how, again.num_known_messages) == (BindingKind.APPENDED, len(longer) - 1)
    too_many = (Message("user", "Hi"), Message("assistant", "Yes")) * 2049
    with pytest.raises(InvalidArgument):
        bindings.begin(stateless(too_many))
