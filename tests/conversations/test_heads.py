"""The first tokens of conversations under a declared prefix: tokenized once for each template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.conversations.draft import Draft, OutdatedTokens, TurnRequest
from pensieve.conversations.heads import (
    ConversationSettings,
    GivenHistory,
    PrefixSettings,
    PromptHeads,
    message_of,
    setting_of,
)
from pensieve.conversations.history import History
from pensieve.core.turn import TurnOptions
from pensieve.errors import ContextFull, InvalidArgument
from pensieve.sampling import Sampling
from pensieve.store import records
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import ChatTemplate, Message, TemplateSetting, ToolCall
from tests.text.families import (
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    QWEN_3,
    Family,
    template_of,
    tokenizer_of,
)
from tests.text.world import TOOL, template_with

SHOTS = (Message("user", "Is it raining? "), Message("assistant", "It is."))
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Texts:
    defaults = Sampling()

    def __init__(self, template: ChatTemplate) -> None:
        self.defaults_from_model = False
        self.template = template
        self.fingerprint = template.tokenizer.fingerprint()


def history_of(store: ConversationStore, template: ChatTemplate) -> History:
    return History(
        store, Texts(template), context_max=4000, vocab_size=100_000, random_bits=lambda bits: 7
    )


@pytest.fixture(autouse=True)
def _reset_tokenizer_limits() -> Iterator[None]:
    """Reset the limit that a history sets in its tokenizer, because tests share tokenizers."""
    yield
    for family in (LLAMA_3, MISTRAL, PHI_3, QWEN_2_5, QWEN_3):
        tokenizer_of(family).tokens_max = sys.maxsize


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        yield store


def declare(history: History, **fields: Any) -> records.StoredPrefix:
    settings = PrefixSettings("rules", **fields)
    return history.declared.declare(settings, history.heads.declared(settings, 0.0), 0.0, 10)


def create(history: History, name: str) -> records.StoredConversation:
    """Create a conversation. If the prefix needs new tokens, make them first, as the daemon does."""
    while isinstance(
        made := history.create(ConversationSettings(name, prefix_id="rules")), OutdatedTokens
    ):
        history.renew(made, made.tokens())
    return made


def draft_turn(history: History, name: str, text: str) -> Draft:
    ask = TurnRequest(name, (Message("user", text),), TurnOptions())
    while isinstance(found := history.draft(ask), OutdatedTokens):
        history.renew(found, found.tokens())
    assert isinstance(found, Draft)
    return found


def say(history: History, store: ConversationStore, name: str, text: str) -> None:
    """Run a turn whose reply is one word."""
    draft = draft_turn(history, name, text)
    begun = history.begin(draft, draft.prompt())
    reply = records.NewMessage("assistant", "yes", history._template.tokenizer.encode_text("yes"))
    store.finish_turn(begun.turn.turn_id, reply, "length", {})


def opening_tokens(
    template: ChatTemplate, messages: list[Message], setting: TemplateSetting
) -> list[int]:
    return template.tokenizer.encode(template.render(messages, setting), at_start=True).ids


@pytest.mark.parametrize("family", [QWEN_2_5, QWEN_3, LLAMA_3, MISTRAL], ids=lambda each: each.name)
def test_a_prefix_may_consist_of_tools_only(store: ConversationStore, family: Family) -> None:
    template = template_of(family)
    history = history_of(store, template)
    options = {"date_string": "1 Jan 2026"} if family is LLAMA_3 else {}
    declared = declare(history, tools=[TOOL], template_options=options)
    assert declared.conversation.num_messages == 1
    if family in (QWEN_2_5, QWEN_3):
        assert declared.conversation.num_tokens > 50
    create(history, "c")
    log = [*store.log("c")]
    for ids in draft_turn(history, "c", "Is it far?").prompt():
        log += ids
    tools = store.get_conversation("c").tools
    assert tools == (TOOL,)
    whole = opening_tokens(
        template, [Message("user", "Is it far?")], TemplateSetting(tools, options)
    )
    assert log == whole


def test_a_template_without_a_fixed_head_tokenizes_the_prefix_in_the_first_turn(
    store: ConversationStore,
) -> None:
    template = template_with(PLAIN)
    history = history_of(store, template)
    declared = declare(history, system_prompt="Be brief.", messages=SHOTS)
    assert (declared.conversation.num_messages, declared.conversation.num_tokens) == (3, 0)
    create(history, "c")
    (ids,) = draft_turn(history, "c", "So?").prompt()
    before = [Message("system", "Be brief."), *SHOTS]
    assert ids == opening_tokens(template, [*before, Message("user", "So?")], TemplateSetting())
    say(history, store, "c", "So?")
    store.rewind_conversation("c", 0)
    assert draft_turn(history, "c", "So?").prompt() == [ids]


@pytest.mark.parametrize("shots", [(), SHOTS])
def test_a_prefix_and_its_conversations_are_tokenized_again_for_another_template(
    store: ConversationStore, shots: tuple[Message, ...]
) -> None:
    history = history_of(store, template_of(QWEN_2_5))
    declare(history, system_prompt="Be brief.", messages=shots)
    for name in ("said", "silent"):
        create(history, name)
    say(history, store, "said", "Is it far?")
    qwen = [*store.log("said")]

    other = template_of(PHI_3)
    again = history_of(store, other)
    create(again, "new")
    first = [Message("system", "Be brief."), *shots]
    head = other.head(first, TemplateSetting())
    assert [*store.log("new")] == head.token_ids
    for name in ("new", "silent"):
        log = [*store.log(name)] if name == "new" else head.token_ids
        for ids in draft_turn(again, name, "So?").prompt():
            log = [*log, *ids]
        assert log == opening_tokens(other, [*first, Message("user", "So?")], TemplateSetting())
        assert [*store.log(name)] == head.token_ids
    draft_turn(again, "said", "And now?")  # this tokenizes the conversation again
    asked = opening_tokens(other, [*first, Message("user", "Is it far?")], TemplateSetting())
    yes = other.tokenizer.encode_text("yes")
    assert [*store.log("said")] == [*asked, *yes] != qwen
    store.rewind_conversation("said", 0)
    assert [*store.log("said")] == head.token_ids
    assert store.verify() == []


def test_a_prefix_that_a_new_template_rejects_is_refused_and_left_unchanged(
    store: ConversationStore,
) -> None:
    history = history_of(store, template_of(QWEN_2_5))
    declare(history, system_prompt="Be brief.", messages=SHOTS[:1])
    before = store.log("prefix:rules")
    again = history_of(store, template_of(MISTRAL))  # its template wants alternating roles
    with pytest.raises(InvalidArgument, match="refuses"):
        create(again, "c")
    assert store.log("prefix:rules") == before


def test_a_prefix_longer_than_the_context_is_refused(store: ConversationStore) -> None:
    history = history_of(store, template_of(QWEN_2_5))
    with pytest.raises(ContextFull):
        declare(history, system_prompt="a b " * 4000)
    with pytest.raises(InvalidArgument, match="cannot fit"):
        declare(history, system_prompt="x" * 16 * 4000 + "x")


def test_heads_are_tokenized_once_and_the_least_recent_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = template_of(QWEN_2_5)
    heads, made = PromptHeads(template, 4000), []
    original = ChatTemplate.head

    def record_call(self: ChatTemplate, messages: Any, setting: TemplateSetting) -> Any:
        made.append(messages)
        return original(self, messages, setting)

    monkeypatch.setattr(ChatTemplate, "head", record_call)
    monkeypatch.setattr("pensieve.conversations.heads.HEADS_MAX", 2)
    prompts = [[Message("system", f"Be brief {number}.")] for number in range(3)]
    for each in (prompts[0], prompts[0], prompts[1], prompts[0]):
        heads.of(each, TemplateSetting())
    assert len(made) == 2
    heads.of(prompts[2], TemplateSetting())  # evicts prompt 1, which was used longest ago
    assert [heads.knows(each, TemplateSetting()) for each in prompts] == [True, False, True]
    assert not heads.knows(prompts[0], TemplateSetting(options={"a": 1}))


def test_a_given_history_with_tool_calls_continues_with_its_original_tokens(store: Any) -> None:
    """Templates write arguments in the order of their keys, and the store sorts the keys."""
    history = history_of(store, template_of(QWEN_2_5))
    call = ToolCall("rain", {"where": "Oslo", "days": {"to": 3, "from": 1}}, "call1")
    settings = ConversationSettings(
        "c",
        tools=[TOOL],
        messages=(
            Message("user", "Is it raining?"),
            Message("assistant", "I ask.", tool_calls=(call,)),
            Message("tool", "3 mm", tool_call_id="call1"),
            Message("assistant", "It is."),
        ),
    )
    tokens = history.heads.declared(settings, 0.0)
    made = history.declared.begin_with_history(settings, tokens, 0.0)
    assert made.num_tokens == sum(map(len, tokens)) > 50
    again = history_of(store, template_of(QWEN_2_5))  # has not tokenized this history before
    say(again, store, "c", "And now?")
    messages = store.messages("c")
    assert [each.role for each in messages] == [
        *("user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    first = [message_of(each) for each in messages[:5]]
    log = list(store.log("c"))[: -messages[5].num_tokens]
    setting = setting_of(store.get_conversation("c"))
    assert log == opening_tokens(again._template, first, setting)


def test_a_given_history_is_tokenized_again_for_another_template(store: Any) -> None:
    settings = ConversationSettings("c", system_prompt="Be brief.", messages=SHOTS)
    history = history_of(store, template_of(QWEN_2_5))
    tokens = history.heads.declared(settings, 0.0)
    history.declared.begin_with_history(settings, tokens, 0.0)
    say(history, store, "c", "And now?")
    other = history_of(store, template_of(LLAMA_3))
    draft = draft_turn(other, "c", "And then?")
    assert draft.conversation.fingerprint == other._fingerprint
    log = list(store.log("c"))
    first = [message_of(each) for each in store.messages("c")[:4]]
    before = opening_tokens(other._template, first, setting_of(draft.conversation))
    assert log[: len(before)] == before


def test_a_history_in_pieces_is_refused_as_soon_as_it_cannot_fit() -> None:
    history = GivenHistory(context_max=3)
    history.extend([Message("user", ""), Message("assistant", "")])
    history.extend([Message("user", "")])
    with pytest.raises(InvalidArgument, match="4 messages cannot fit a context of 3 tokens"):
        history.extend([Message("assistant", "")])
    with pytest.raises(InvalidArgument, match="characters cannot fit a context of 3 tokens"):
        GivenHistory(context_max=3).extend([Message("user", "x" * 1_000_000)])
