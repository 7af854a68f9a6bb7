"""Messages, settings and small templates that the template tests share."""

from collections.abc import Iterable, Sequence
from itertools import chain

from pensieve.text import ChatTemplate, Message, TemplateSetting, Tokenizer
from tests.text.families import Family
from tests.text.tiny_tokenizers import byte_level_library

NOTHING = TemplateSetting()
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
EQUIPPED = TemplateSetting(tools=(TOOL,))


def user(content: str) -> Message:
    return Message("user", content)


def spoken(template: ChatTemplate, ids: Iterable[int]) -> str:
    """Return the text of all tokens, special tokens too."""
    return b"".join(template.tokenizer.piece(i, first=False) for i in ids).decode()


def flat(by_message: Iterable[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(by_message))


def by_name(family: Family) -> str:
    return family.name


def template_with(
    source: str,
    *,
    special: Sequence[str] = ("<s>", "</s>"),
    plain: Sequence[str] = (),
    **named: str,
) -> ChatTemplate:
    library = byte_level_library(special, plain)
    strings = {"bos_token": special[0], "eos_token": special[-1]}
    return ChatTemplate(
        Tokenizer(library.to_str(), special_strings=strings, templates={"default": source, **named})
    )
