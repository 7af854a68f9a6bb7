"""A history and an engine in the test's own thread, whose order a seed decides."""

from __future__ import annotations

from types import TracebackType

from pensieve.config import Settings
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.launch.engine import BuiltEngine, build_engine
from pensieve.launch.model_folder import Report, load_texts, resolve_model
from pensieve.service.conversations import Conversations
from pensieve.store.conversation_store import ConversationStore


class Runtime:
    """Conversations in front of an engine; the owner calls `engine.step` itself."""

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
        """Keep the history, let go of everything else."""
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
    """Everything from the folder of the history to an engine to step; cleans up if it fails."""
    store = ConversationStore.open(settings.data, holder)
    try:
        return _start(settings, store, report)
    except BaseException:
        store.close()
        raise


def _start(settings: Settings, store: ConversationStore, report: Report) -> Runtime:
    folder = resolve_model(settings.model)
    texts = load_texts(folder, report)
    mailbox, outbox = Mailbox(), Outbox()
    built = build_engine(settings, folder, texts, report, mailbox, outbox)
    conversations = Conversations(
        store,
        texts.template,
        mailbox,
        context_max=built.context_max,
        vocab_size=built.vocab_size,
        fingerprint=texts.fingerprint,
        defaults=texts.defaults,
        report=report,
    )
    return Runtime(settings, store, built, conversations, mailbox, outbox)
