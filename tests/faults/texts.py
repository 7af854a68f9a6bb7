"""A real tokenizer and chat template over 997 words, for the fault search.

Token ids are the same as in the ledger (tests/fakes.py). Every sixteenth token ends a reply and has no text.
All other tokens are words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from pensieve.text import ChatTemplate, Tokenizer
from tests.fakes import VOCAB, ends_turn

ROLES = {1: "system", 2: "user", 3: "assistant"}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {{ eos_token }} "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def word(token_id: int) -> str:
    return ROLES.get(token_id, f"w{token_id}")


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of a reply."""
    return " ".join(word(token_id) for token_id in token_ids if not ends_turn(token_id))


@cache
def template() -> ChatTemplate:
    ends = [token_id for token_id in range(VOCAB) if ends_turn(token_id)]
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": f"<e{token_id}>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id in ends
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {
                f"<e{token_id}>" if ends_turn(token_id) else word(token_id): token_id
                for token_id in range(VOCAB)
            },
            "unk_token": word(4),
        },
    }
    tokenizer = Tokenizer(
        json.dumps(definition),
        special_strings={"eos_token": "<e0>"},
        eos_token_ids=ends,
        templates={"default": TEMPLATE},
    )
    return ChatTemplate(tokenizer)
