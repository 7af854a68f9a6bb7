"""The simulated clients, and the checks of their answers.

A `Request` is a message to be answered. Clients send it again under the same id until it is answered. A
`Call` is one attempt. Each answer is compared with earlier answers to the request. Each read of the store is
compared with the possible histories (histories.py), and with the replies that follow from the ledger's
arithmetic.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pensieve.conversations.cancelling import CancelRequest
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.followers import CUT
from pensieve.conversations.heads import ConversationSettings
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.messages import EvictConversation
from pensieve.errors import (
    ContextFull,
    InvalidArgument,
    NotFound,
    PensieveError,
    QueueFull,
    StoreError,
    StoreUnavailable,
    TurnRunning,
    Unavailable,
)
from pensieve.sampling import Sampling
from pensieve.store import conversation_rows, message_rows
from pensieve.text import Message
from tests.fakes import ends_turn, extend_prefix, next_token
from tests.faults.histories import Histories, Operation, Seen
from tests.faults.kinds import Shape
from tests.faults.process import Process
from tests.faults.texts import text_of, word

WORDS = [number for number in range(5, 997) if not ends_turn(number)]
PRIORITIES = (0, 0, 1, -1, 0, 2)
OPERATIONS_MAX = 4  # running operations of one conversation: the checks try all their orders
Reply = tuple[list[int], str, FinishReason, int | None]


@dataclass(eq=False)
class Request:
    """A message that is sent until it is answered."""

    operation: int
    conversation: str
    words: str
    request_id: str
    max_tokens: int
    is_open: bool = True  # a client would send it again
    num_calls: int = 0  # running calls
    cancelled_at: set[int] = field(default_factory=set)  # delivered tokens at each cancellation
    is_cut: bool = False  # a client ended it, and may have kept less text than others received
    received: dict[int, list[int]] = field(default_factory=dict)  # received tokens, by attempt
    reply: Reply | None = None  # the acknowledged reply

    @property
    def priority(self) -> int:
        return PRIORITIES[self.operation % len(PRIORITIES)]

    def ask(self, words: str) -> TurnRequest:
        return TurnRequest(
            self.conversation,
            (Message("user", words),),
            TurnOptions(Sampling(max_tokens=self.max_tokens), self.priority),
            request_id=self.request_id,
        )


@dataclass(eq=False)
class Call:
    """A call that is not answered yet."""

    what: str
    request: Request | None = None
    task: asyncio.Task[None] | None = None
    stalled: asyncio.Event | None = None  # the client reads nothing until this event is set


class People:
    def __init__(
        self,
        choose: random.Random,
        shape: Shape,
        happened: Counter[str],
        note: Callable[[str, str], None],
    ) -> None:
        self.random = choose
        self.shape = shape
        self.histories = Histories()
        self.requests: list[Request] = []
        self.calls: list[Call] = []
        self.process: Process | None = None  # the process that clients reach
        self.full: set[str] = set()  # conversations with a full context
        self._happened = happened
        self._note = note
        self._by_operation: dict[int, Request] = {}
        self._by_words: dict[str, Request] = {}
        self._busy: set[str] = set()  # conversations with a running call that is not a turn
        self._deletions_begun = Counter[str]()  # conversation -> number
        self._deletions_ended = Counter[str]()
        self._num_names = 0

    @property
    def daemon(self) -> Daemon | None:
        return self.process.daemon if self.process is not None else None

    @property
    def names(self) -> list[str]:
        """Return the conversations that may exist."""
        return [name for name in self.histories.names() if self.histories.exists(name)]

    @property
    def turns_under_way(self) -> list[Call]:
        return [call for call in self.calls if call.request is not None]

    # -- conversations --

    def create(self, name: str = "", system: str | None = None, prefix_id: str = "") -> None:
        """Create a conversation. Some name a prefix (`prefix_id`); others only begin with the same text."""
        if self.daemon is None:
            return
        daemon = self.daemon
        name = name or self._reuse_name() or self._new_name("c")
        if system is None:
            system = self.random.choice(("", "w5 w6 w7", "w5 w6 w7 w9"))
            prefix_id = f"p{len(system)}" if self.random.random() < 0.5 else ""
        operation = self.histories.note_begun(name, Operation("create"))

        async def create() -> None:
            await daemon.conversations.create(
                ConversationSettings(name, system_prompt=system, prefix_id=prefix_id)
            )
            self.histories.note_acknowledged(name, operation, 0)

        self._call(f"create {name}", create(), name)

    def fork(self, name: str, at: int | None = None, target: str = "") -> bool:
        seen = self.look(name)
        if seen is None or self.daemon is None or name in self._busy:
            return False
        daemon = self.daemon
        if at is None:
            at = self.random.choice([0, *(revision for _, revision in seen.exchanges)])
        target = target or self._new_name("f")
        kept = tuple(each for each in seen.exchanges if each[1] <= at)
        operation = self.histories.note_begun(target, Operation("fork", at, kept))

        async def fork() -> None:
            await daemon.conversations.fork(name, target, at)
            self.histories.note_acknowledged(target, operation, at)

        self._call(f"fork {name} at {at} as {target}", fork(), name, target)
        return True

    def rewind(self, name: str, to: int | None = None) -> bool:
        seen = self.look(name)
        if seen is None or self.daemon is None or name in self._busy:
            return False
        daemon = self.daemon
        if to is None:
            to = self.random.choice([0, *(revision for _, revision in seen.exchanges)])
        operation = self.histories.note_begun(name, Operation("rewind", to))

        async def rewind() -> None:
            rewound = await daemon.conversations.rewind(name, to)
            self.histories.note_acknowledged(name, operation, rewound.revision)

        self.full.discard(name)
        self._call(f"rewind {name} to {to}", rewind(), name)
        return True

    def delete(self, name: str) -> bool:
        if self.daemon is None or name in self._busy:
            return False
        daemon = self.daemon
        operation = self.histories.note_begun(name, Operation("delete"))
        self._deletions_begun[name] += 1

        async def delete() -> None:
            await daemon.conversations.delete(name)
            self.histories.note_acknowledged(name, operation)
            self._deletions_ended[name] += 1

        self._call(f"delete {name}", delete(), name)
        return True

    def evict(self, name: str, to_host: bool) -> bool:
        if self.daemon is None:
            return False
        daemon = self.daemon

        async def evict() -> None:
            await daemon.engine.query(lambda number: EvictConversation(name, to_host, number))

        self._call(f"evict {name}", evict())
        return True

    def warm(self, name: str) -> bool:
        if self.daemon is None:
            return False
        daemon = self.daemon

        async def warm() -> None:
            await daemon.warm(name)

        self._call(f"warm {name}", warm())
        return True

    def check(self, problems: list[str]) -> None:
        """Run the operator's check, and add the reported problems."""
        assert self.daemon is not None
        daemon = self.daemon

        async def check() -> None:
            problems.extend(await daemon.check())

        self._call("check", check())

    # -- turns --

    def say(self, name: str, max_tokens: int | None = None) -> Request:
        """Send a message with new words."""
        num_words = self.random.randint(0, self.shape.prompt_words_max)
        # Many messages begin alike and share prefixes. The last word makes each message unique.
        numbers = [*self.random.choices(WORDS[:2], k=num_words), WORDS[len(self.requests)]]
        words = " ".join(word(number) for number in numbers)
        if max_tokens is None:
            max_tokens = self.random.randint(1, self.shape.reply_max)
        operation = self.histories.register(Operation("turn"))
        request = Request(operation, name, words, f"r{len(self.requests)}", max_tokens)
        self.requests.append(request)
        self._by_operation[operation] = self._by_words[words] = request
        self.say_again(request)
        return request

    def say_again(self, request: Request) -> None:
        """Send the same message under the same id. The turn is attached to, replayed, or begun (again)."""
        name, operation = request.conversation, request.operation
        if self.daemon is None:
            return
        daemon = self.daemon
        if self.histories.num_pending(name) >= OPERATIONS_MAX:
            self.look(name)
            if self.histories.num_pending(name) >= OPERATIONS_MAX:
                return
        was_pending = self.histories.is_pending(name, operation)
        self.histories.note_begun(name, Operation("turn"), operation)
        request.num_calls += 1
        call = Call(f"say {request.request_id}", request)

        async def say() -> None:
            try:
                live = await daemon.begin(request.ask(request.words))
            except PensieveError as error:
                self._note_not_begun(request, error)
                if not was_pending and self._is_last(request, daemon):
                    self.histories.note_withdrawn(name, operation)
                return
            await self._read(daemon, request, call, live)

        self._spawn(call, say(), name)

    def say_all_again(self) -> bool:
        """Send again the first unanswered message of each conversation."""
        waiting = {each.conversation: each for each in reversed(self.requests) if each.is_open}
        for request in waiting.values():
            self.say_again(request)
        return bool(waiting)

    def say_other_words(self) -> bool:
        """Send other words under the id of an answered message. The daemon must refuse them."""
        answered = [
            each
            for each in self.requests
            if each.reply is not None and self.histories.exists(each.conversation)
        ]
        if not answered or self.daemon is None:
            return False
        daemon, request = self.daemon, self.random.choice(answered)
        name = request.conversation
        num_deletions = self._deletions_ended[name]

        async def say() -> None:
            try:
                live = await daemon.begin(request.ask(request.words + " w4"))
            except (InvalidArgument, NotFound, Unavailable, QueueFull, TurnRunning):
                return
            if self._deletions_begun[name] != num_deletions:
                # The conversation may be deleted and created again. `look` does not know these words.
                daemon.conversations.ends.give_up(live)
                return
            raise AssertionError("other words were accepted under the id of an answered message")

        self._call("say other words", say())
        return True

    def cancel(self) -> bool:
        if self.daemon is None or not (lives := self.daemon.conversations.turns.all_live()):
            return False
        live = self.random.choice(lives)
        if not live.stopped:
            (request,) = (each for each in self.requests if each.request_id == live.request_id)
            request.cancelled_at.add(live.num_tokens)
        self.daemon.conversations.ends.stop(live)
        return True

    def leave(self) -> bool:
        """End a turn like a client that keeps some of the delivered text, or none of it."""
        if self.daemon is None or not self.requests:
            return False
        daemon = self.daemon
        lives = daemon.conversations.turns.all_live()
        request, keep = self.random.choice(self.requests), self.random.choice((0, 1, None))
        if lives and self.random.random() < 0.9:
            live = max(lives, key=lambda each: each.num_tokens)
            half = max(1, live.num_tokens // 2)
            keep = self.random.choice((0, half, half, None))
            (request,) = (each for each in self.requests if each.request_id == live.request_id)
        name, request_id = request.conversation, request.request_id
        if name in self._busy or not self.histories.exists(name):
            return False
        by_id = self.random.random() < 0.8

        async def leave() -> None:
            turns, keep_tokens = daemon.conversations.turns, keep
            if daemon.conversations.arriving.has_request("", name, request_id):
                keep_tokens = 0  # the number of delivered tokens is not known yet
            live = turns.of_request_id("", name, request_id)
            if live is not None and keep_tokens != 0:
                most = live.num_tokens if keep_tokens is None else keep_tokens
                request.is_cut |= most < live.num_tokens
                request.cancelled_at.add(min(most, live.num_tokens))
            wanted = CancelRequest(
                name,
                str(live.turn_id) if live is not None and not by_id else "",
                request_id if live is None or by_id else "",
                keep_tokens,
            )
            result = await daemon.cancel_turn(wanted)
            self._note("client", f"{request_id} left: {result}")
            if result.finish_reason:
                request.is_open = False
                self.histories.note_acknowledged(name, request.operation)
                return
            assert request.reply is None, (
                f"{request_id} was answered, but the history has no part of its reply"
            )
            others = request.num_calls or daemon.conversations.arriving.num_turns
            if not others and not self._is_live(request):
                self.histories.note_refused(name, request.operation)

        self._call(f"leave {request_id}, keep {keep}", leave(), name)
        return True

    def hang_up(self, call: Call) -> None:
        assert call.task is not None
        self._note("client", f"hangs up on {call.what}")
        call.task.cancel()

    def drop_connections(self) -> None:
        """Drop all connections."""
        for call in list(self.calls):
            assert call.task is not None
            self._end_call(call)
            call.task.cancel()

    # -- answers --

    async def _read(self, daemon: Daemon, request: Request, call: Call, live: LiveTurn) -> None:
        self._note_begun(request, live)
        received: list[int] = []

        async def write(tokens: ReplyTokens) -> None:
            if call.stalled is not None:
                await call.stalled.wait()
            received.extend(tokens.token_ids)
            assert received == live.reply.token_ids[: len(received)], (
                "tokens were delivered twice or left out"
            )
            before = request.received[live.attempt]
            common = min(len(before), len(received))
            assert received[:common] == before[:common], (
                f"{request}: other tokens were delivered before"
            )
            if len(received) > len(before):
                request.received[live.attempt] = list(received)

        try:
            await daemon.conversations.followers.follow(live, write)
        except (StoreError, StoreUnavailable) as error:
            self._note("client", f"{request.request_id}, in doubt: {error}")
        except PensieveError as error:
            self._note("client", f"{request.request_id} ended: {error}")
            if request.is_cut and str(error) == CUT:
                return  # the history has the shortened reply
            self._happened["the engine's queue is full"] += isinstance(error, QueueFull)
            if self._is_last(request, daemon) and live.attempt == max(request.received):
                self.histories.note_refused(request.conversation, request.operation)
        else:
            self._note_answered(request, live, received)

    def _note_begun(self, request: Request, live: LiveTurn) -> None:
        if live.replayed:
            self._happened["an answer is replayed"] += 1
        elif live.attempt in request.received:
            self._happened["a turn is attached to again"] += 1
        elif live.attempt > 1:
            self._happened["a turn begins again"] += 1
        request.received.setdefault(live.attempt, [])
        self._note("client", f"{request.request_id} begun, attempt {live.attempt}")

    def _note_not_begun(self, request: Request, error: PensieveError) -> None:
        self._note("client", f"{request.request_id} not begun: {type(error).__name__}: {error}")
        if isinstance(error, ContextFull):
            self._happened["the context is full"] += 1
            self.full.add(request.conversation)
            request.is_open = False
        elif isinstance(error, NotFound):
            request.is_open = False
        elif isinstance(error, QueueFull):
            self._happened["the daemon's limit is reached"] += "are waiting" in str(error)
        elif isinstance(error, TurnRunning):  # most clients do not retry
            request.is_open &= self.random.random() < 0.3
        else:
            assert isinstance(error, Unavailable), repr(error)

    def _note_answered(self, request: Request, live: LiveTurn, received: list[int]) -> None:
        assert live.finish is not None
        assert received == live.reply.token_ids[: live.num_tokens], (
            "a reader did not get all tokens"
        )
        is_shorter = len(received) < len(request.received[live.attempt])
        assert not is_shorter or request.is_cut, (
            "the reply is shorter than the tokens delivered before"
        )
        text = live.text + live.tail
        assert text == text_of(received), f"{text!r} is not the text of {received}"
        reply = (received, text, live.finish, live.revision)
        assert request.reply in (None, reply), f"{request.request_id} got a different reply before"
        request.reply, request.is_open = reply, False
        self._note("client", f"{request.request_id} answered: {reply}")
        self.histories.note_acknowledged(request.conversation, request.operation, live.revision)

    # -- checks of the store --

    def look(self, name: str) -> Seen | None:
        """Compare a stored conversation with its possible histories and its required replies."""
        process = self.process
        if process is None or name not in self.histories.names():
            return None
        live = (lambda operation: self._may_happen(name, operation)) if process.is_settled else None
        return self._look(process.inspector, name, live)

    def check_store_after_death(self, inspector: Any) -> None:
        """Check the store of a dead process: each operation under way has happened by now or never will."""
        self._busy.clear()
        for name in self.histories.names():
            self._look(inspector, name, lambda operation: False)

    def _may_happen(self, name: str, operation: int) -> bool:
        request = self._by_operation.get(operation)
        if request is None:
            return name in self._busy
        return bool(request.num_calls) or self._is_live(request)

    def _is_last(self, request: Request, daemon: Daemon) -> bool:
        """Return whether no other call can begin the request, and no turn of it is arriving or live."""
        others = request.num_calls > 1 or daemon.conversations.arriving.num_turns
        return not others and not self._is_live(request)

    def _is_live(self, request: Request) -> bool:
        if self.daemon is None:
            return False
        lives = self.daemon.conversations.turns.all_live()
        return any(each.request_id == request.request_id for each in lives)

    def _look(self, inspector: Any, name: str, live: Callable[[int], bool] | None) -> Seen | None:
        try:
            number, conversation = conversation_rows.require_conversation(inspector, name, "")
        except NotFound:
            self.histories.note_seen(name, None, live)
            return None
        messages = message_rows.read_messages(
            inspector, number, conversation, 0, conversation.num_messages, True
        )
        exchanges = []
        prefix, num_tokens = 1, 0
        request: Request | None = None
        for message in messages:
            if message.role == "system":
                continue
            if message.role == "user":
                assert request is None, f"{name}: a message without its reply"
                request = self._by_words[message.content]
            else:
                assert request is not None, f"{name}: a reply without a message"
                exchanges.append((request.operation, message.revision))
                self._check_reply(name, request, message, prefix, num_tokens)
                request = None
            for token_id in message.token_ids or ():
                prefix = extend_prefix(prefix, token_id)
            num_tokens += message.num_tokens
        assert request is None, f"{name}: a message without its reply"
        seen = Seen(conversation.revision, tuple(exchanges))
        self.histories.note_seen(name, seen, live)
        return seen

    def _check_reply(
        self, name: str, request: Request, message: Any, prefix: int, num_tokens: int
    ) -> None:
        """Check that a stored reply follows from the log before it, and ends where it may."""
        token_ids, where = list(message.token_ids), f"{name}, the reply to {request.request_id}"
        for token_id in token_ids:
            assert token_id == next_token(prefix), f"{where} does not follow from its log"
            prefix = extend_prefix(prefix, token_id)
        assert message.content == text_of(token_ids), (
            f"{where} has a text that differs from its tokens"
        )
        assert not any(map(ends_turn, token_ids[:-1])), f"{where} continues after its end token"
        finish = FinishReason(message.finish_reason)
        if finish is FinishReason.STOP:
            assert ends_turn(token_ids[-1]), f"{where} has no end token"
        elif finish is FinishReason.LENGTH:
            full = num_tokens + len(token_ids) >= self.shape.engine.cache.device_tokens_max
            assert len(token_ids) == request.max_tokens or full, f"{where} is too short"
        else:
            assert finish is FinishReason.CANCELLED, f"{where} ended with {finish}"
            cut = len(token_ids) in request.cancelled_at
            assert cut, f"{where} does not end where it was cancelled"
        if request.reply is not None and name == request.conversation:
            reply = (token_ids, message.content, finish, message.revision)
            assert reply == request.reply, f"{where} differs from the acknowledged reply"

    # -- names --

    def _reuse_name(self) -> str:
        """Return the name of a deleted conversation for reuse, sometimes; else "".

        Messages of the first conversation may be sent again: they are new to the second conversation. If a
        client disconnects before its turn has begun, the turn may still begin in the second conversation.
        That turn must not use tokens made for the first conversation.
        """
        called = set(self._busy) | {
            call.request.conversation for call in self.calls if call.request is not None
        }
        gone = [
            name
            for name in self.histories.names()
            if name not in called and self.histories.is_gone(name)
        ]
        if self.daemon is None or not gone or self.random.random() < 0.5:
            return ""
        name = self.random.choice(gone)
        arriving = self.daemon.conversations.arriving
        operations = []
        for request in self.requests:
            if request.conversation == name:
                request.is_open, request.reply, request.received = False, None, {}
                if arriving.has_request("", name, request.request_id):
                    operations.append(request.operation)
        self.full.discard(name)
        self.histories.begin_again(name, operations)
        self._happened["a name is used again"] += 1
        return name

    # -- calls --

    def _new_name(self, letter: str) -> str:
        self._num_names += 1
        return f"{letter}{self._num_names}"

    def _call(self, what: str, work: Coroutine[Any, Any, None], *names: str) -> None:
        """Make a call that may change these conversations. No other changing call runs on them meanwhile."""

        async def tried() -> None:
            try:
                await work
            except PensieveError as error:
                self._note("client", f"{what}: {type(error).__name__}: {error}")

        self._note("client", what)
        self._busy.update(names)
        self._spawn(Call(what), tried(), *names)

    def _spawn(self, call: Call, work: Coroutine[Any, Any, None], *names: str) -> None:
        process = self.process
        assert process is not None
        self.calls.append(call)

        def ended(task: asyncio.Task[None]) -> None:
            self._end_call(call)
            if task.cancelled():
                return  # a call that was cancelled may continue in the daemon
            if (error := task.exception()) is not None:
                raise error
            if call.request is None:
                self._busy.difference_update(names)
            if self.process is process:
                for name in names:
                    self.look(name)

        call.task = process.loop.create_task(work)
        call.task.add_done_callback(ended)

    def _end_call(self, call: Call) -> None:
        if call in self.calls:
            self.calls.remove(call)
            if call.request is not None:
                call.request.num_calls -= 1
