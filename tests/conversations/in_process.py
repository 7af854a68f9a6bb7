"""Run a history and an engine in the test's own thread. The test decides the order of their steps."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar, cast

from pensieve.config import Settings
from pensieve.conversations.admission import Admission
from pensieve.conversations.draft import Draft, OutdatedTokens, TurnRequest
from pensieve.conversations.followers import FollowerLimits, TurnFollowers
from pensieve.conversations.heads import ConversationSettings, PrefixSettings
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import LiveTurn, RetriedTurn, StartedTurn, cache_key, replayed
from pensieve.conversations.turn_ends import TurnEnds
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import Turns
from pensieve.core.constraint import Constraint
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import TurnOptions
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.messages import (
    EngineEvent,
    EngineMessage,
    ForkConversation,
    LogNeeded,
    RewindConversation,
    TurnEnded,
)
from pensieve.errors import QueueFull
from pensieve.launch.engine import BuiltEngine, build_engine
from pensieve.launch.model_folder import Report, load_texts, resolve_model
from pensieve.sampling import Sampling
from pensieve.store import records
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import Message

T = TypeVar("T")


class OneThread:
    """Replaces `Threads`: all work is done in the call."""

    def __init__(self) -> None:
        self.loop = self

    def time(self) -> float:
        return time.monotonic()

    async def in_store(self, _: str, job: Callable[..., T], *arguments: Any, lane: str = "") -> T:
        return job(*arguments)

    async def in_text_pool(self, _: str, job: Callable[[], T]) -> T:
        return job()

    def spawn(self, work: Coroutine[Any, Any, None], **_: bool) -> None:
        with contextlib.suppress(StopIteration):
            work.send(None)
            raise AssertionError("the coroutine waits, but all work must be done in the call")


def turn_ends(
    turns: Turns, history: History, try_put: Callable[[EngineMessage | None], Any]
) -> TurnEnds:
    """Return a TurnEnds that does all work in the call, without followers or limits.

    `try_put` receives the messages for the engine.
    """
    threads: Any = OneThread()
    followers = TurnFollowers(threads, FollowerLimits(0.0, 0.0, 0), lambda live: None)
    engine, admission = (
        cast(Any, SimpleNamespace(try_put=try_put)),
        Admission(1, {}, threads.time()),
    )
    return TurnEnds(turns, followers, history, threads, engine, admission, TurnEvents())


class Conversations:
    """Does the daemon's work in one thread, inside each call: history, live turns, messages to the engine."""

    def __init__(
        self, history: History, turns: Turns, mailbox: Mailbox, defaults: Sampling
    ) -> None:
        self.history = history
        self.turns = turns
        self._mailbox = mailbox
        self._defaults = defaults
        self.ends = turn_ends(turns, history, self._tell)

    def create(self, conversation_id: str, **settings: Any) -> records.StoredConversation:
        created = self.history.create(ConversationSettings(conversation_id, **settings))
        assert isinstance(created, records.StoredConversation)
        return created

    def declare(self, prefix_id: str, **settings: Any) -> records.StoredPrefix:
        declared = PrefixSettings(prefix_id, **settings)
        tokens = self.history.heads.declared(declared, 0.0)
        return self.history.declared.declare(declared, tokens, 0.0, 1000)

    def warm(self, conversation_id: str) -> None:
        attempt_id = self.turns.begin_warm(conversation_id, "")
        found = self.history.warm(conversation_id, attempt_id)
        assert not isinstance(found, OutdatedTokens)
        self._tell(found)

    def fork(self, source_id: str, new_id: str, at_revision: int) -> None:
        fork = self.history.fork(source_id, new_id, at_revision)
        self._tell(
            ForkConversation(cache_key("", source_id), fork.num_tokens, cache_key("", new_id))
        )

    def rewind(self, conversation_id: str, to_revision: int) -> None:
        rewound = self.history.rewind(conversation_id, to_revision)
        self._tell(RewindConversation(cache_key("", conversation_id), rewound.num_tokens))

    def send(
        self,
        conversation_id: str,
        messages: Sequence[Message] | str,
        *,
        request_id: str = "",
        sampling: Sampling | None = None,
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> LiveTurn:
        """Begin a turn. Then `handle` events of the engine until the turn's `finish` is set."""
        if isinstance(messages, str):
            messages = [Message("user", messages)]
        options = TurnOptions(sampling or self._defaults, priority, constraint=constraint)
        drafted = self.history.draft(
            TurnRequest(conversation_id, tuple(messages), options, request_id=request_id)
        )
        if isinstance(drafted, RetriedTurn):
            return self._live(drafted)
        assert isinstance(drafted, Draft)
        return self.begin(drafted, drafted.prompt())

    def draft(self, request: TurnRequest) -> Draft | RetriedTurn:
        drafted = self.history.draft(request)
        assert isinstance(drafted, Draft | RetriedTurn)
        return drafted

    def begin(self, draft: Draft, prompt: Sequence[Sequence[int]]) -> LiveTurn:
        return self._live(self.history.begin(draft, prompt))

    def _live(self, found: StartedTurn | RetriedTurn) -> LiveTurn:
        if isinstance(found, StartedTurn):
            live, submit = self.turns.begin(found, 0.0)
            self._mailbox.put(submit)
            return live
        if found.reply is not None:
            return replayed(found.turn, found.reply)
        attached = self.turns.of_turn(found.turn.turn_id)
        assert attached is not None
        return attached

    def cancel(self, live: LiveTurn) -> None:
        self.ends.stop(live)

    def interrupt(self, turn_id: int) -> None:
        live = self.turns.of_turn(turn_id)
        assert live is not None
        self.ends.give_up(live)

    def handle(self, event: EngineEvent) -> None:
        """Handle one event of the engine."""
        if isinstance(event, SampledToken):
            self.turns.take(event)
        elif isinstance(event, LogNeeded):
            self._tell(self.history.log_for(event))
        elif isinstance(event, TurnEnded):
            self.ends.engine_ended(event)

    def _tell(self, message: EngineMessage | None) -> None:
        if message is not None:
            with contextlib.suppress(QueueFull):
                self._mailbox.put(message)


class Runtime:
    """Conversations and their engine. The caller runs the engine with `engine.step`."""

    def __init__(
        self,
        settings: Settings,
        store: ConversationStore,
        built: BuiltEngine,
        conversations: Conversations,
        mailbox: Mailbox,
        outbox: Outbox,
    ) -> None:
        self.settings = settings
        self.store = store
        self.engine = built.engine
        self.conversations = conversations
        self.mailbox = mailbox
        self.outbox = outbox
        self._built = built

    def close(self) -> None:
        """Close everything. The history stays on disk."""
        self.mailbox.close()
        self.outbox.close()
        self._built.close()
        self.store.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start(settings: Settings, holder: str, report: Report) -> Runtime:
    """Build everything between the history's folder and the engine. Clean up if something fails."""
    store = ConversationStore.open(settings.data, holder)
    try:
        return _start(settings, store, report)
    except BaseException:
        store.close()
        raise


def _start(settings: Settings, store: ConversationStore, report: Report) -> Runtime:
    folder = resolve_model(settings.model)
    texts = load_texts(folder, report, settings.chat_template)
    mailbox, outbox = Mailbox(), Outbox()
    built = build_engine(settings, folder, texts, report, mailbox, outbox)
    history = History(
        store,
        texts,
        context_max=built.context_max,
        vocab_size=built.vocab_size,
        random_bits=secrets.randbits,
        report=report,
    )
    turns = Turns(texts.template.tokenizer, time.time())
    conversations = Conversations(history, turns, mailbox, texts.defaults)
    return Runtime(settings, store, built, conversations, mailbox, outbox)
