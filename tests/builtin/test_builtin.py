"""The model that ships with the package: its size, loading, lossless text, and what it remembers.

All tests use plain `transformers`. The examination comes from `scripts/train_builtin.py`, with another seed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pensieve.builtin import MODEL_PATH, NAME
from scripts.builtin_corpus.dialogues import conversation, examination
from scripts.builtin_corpus.facts import draw_fact, is_held_out
from scripts.builtin_corpus.single_topics import NAME as NAME_TOPIC
from scripts.builtin_corpus.topics import FIXED
from scripts.builtin_training.contexts import ContextWriter
from scripts.builtin_training.tokenizer import IM_END_ID, IM_START_ID

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_builtin.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_builtin", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_builtin"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH).eval()


RAW_TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: list[list[dict[str, str]]]
) -> list[str]:
    """Return greedy replies of plain transformers to several chats at once, with padding on the left."""
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        generated = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=48
        )
    return tokenizer.batch_decode(
        generated[:, batch.input_ids.shape[1] :], skip_special_tokens=True
    )


def reply(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *said: str) -> str:
    """Return the reply to the last message, after the model has answered the earlier messages itself."""
    chat: list[dict[str, str]] = []
    for message in said:
        chat.append({"role": "user", "content": message})
        chat.append({"role": "assistant", "content": replies(model, tokenizer, [chat])[0]})
    return chat[-1]["content"]


# The folder --------------------------------------------------------------------------------------


def test_weights_are_at_most_8_megabytes_and_nothing_else_is_large() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL_PATH.iterdir()}
    assert sizes["model.safetensors"] <= 8_000_000
    assert sum(sizes.values()) <= 8_500_000


def test_the_model_is_a_float32_llama_with_an_end_of_turn_token(
    model: PreTrainedModel,
) -> None:
    assert NAME == "builtin"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 4096
    assert RAW_TOKENIZER.id_to_token(model.generation_config.eos_token_id) == "<|im_end|>"
    assert model.generation_config.do_sample is False


def test_the_model_has_one_to_three_and_a_half_million_parameters(model: PreTrainedModel) -> None:
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_500_000


# Tokenizer and template --------------------------------------------------------------------------


@given(st.text())
@settings(max_examples=300)
def test_the_tokenizer_is_lossless_for_any_text(text: str) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    if any(literal in text for literal in special):
        return
    assert RAW_TOKENIZER.decode(RAW_TOKENIZER.encode(text).ids) == text


def test_words_of_the_dialogues_are_single_tokens() -> None:
    ids = RAW_TOKENIZER.encode("my sister is called Anna and lives in Rome").ids
    assert len(ids) == 9


def test_digits_are_single_tokens_so_that_numbers_can_be_copied() -> None:
    tokens = RAW_TOKENIZER.encode("code 40817").tokens
    assert tokens[-5:] == ["Ġ4", "0", "8", "1", "7"]


def test_chat_markers_are_special_tokens() -> None:
    added = json.loads((MODEL_PATH / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"] for token in added if token["special"]} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_rendering_is_append_only(tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
    chat = [{"role": "system", "content": system}] if system else []
    for exchange in islice(conversation(Random(4)), 5):
        before = tokenizer.apply_chat_template(chat, tokenize=False) if chat else ""
        chat.append({"role": "user", "content": exchange.user})
        after = tokenizer.apply_chat_template(chat, tokenize=False)
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        chat.append({"role": "assistant", "content": exchange.reply})
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert after.startswith(before)
        assert prompt == after + "<|im_start|>assistant\n"
        assert whole == prompt + exchange.reply + "<|im_end|>\n"


def test_training_contexts_are_written_as_the_template_renders_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    exchanges = list(islice(conversation(Random(5)), 8))
    writer = ContextWriter(RAW_TOKENIZER)
    chat = [{"role": "system", "content": "Be kind."}]
    for exchange in exchanges:
        chat.append({"role": "user", "content": exchange.user})
        chat.append({"role": "assistant", "content": exchange.reply})
    segments = writer.conversation(exchanges, "Be kind.")
    written = [token for segment in segments for token in segment.ids]
    assert written == tokenizer.apply_chat_template(chat, return_dict=False)
    assert writer.prompt(exchanges, "Be kind.") == tokenizer.apply_chat_template(
        chat[:-1], add_generation_prompt=True, return_dict=False
    )


# Dialogues ---------------------------------------------------------------------------------------


def test_training_and_examination_never_share_a_value() -> None:
    random = Random(6)
    for topic in (NAME_TOPIC, *FIXED):
        assert not is_held_out(draw_fact(random, topic))
    for seed in range(50):
        asked = examination(Random(seed), 1)
        assert asked == examination(Random(seed), 1)
    assert is_held_out(draw_fact(random, NAME_TOPIC, held_out=True))


def test_an_examination_asks_for_the_value_told_at_its_distance() -> None:
    for seed in range(100):
        distance = 1 + seed % 20
        exchanges = examination(Random(seed), distance)
        (value,) = exchanges[-1].values
        told = exchanges[-1 - distance]
        assert value.lower() in told.user.lower()
        assert value in told.reply


def test_only_replies_have_training_weight() -> None:
    random = Random(8)
    batch = ContextWriter(RAW_TOKENIZER).batch(random, 256, jumps=True)
    assert batch.ids.shape == batch.positions.shape == batch.weights.shape
    assert 0.2 < (batch.weights > 0).float().mean() < 0.7
    assert int(batch.positions.max()) < 4096
    assert bool((batch.positions[:, 1:] > batch.positions[:, :-1]).all())
    ends_rewarded = batch.ids[batch.weights == 1.0]
    assert int((ends_rewarded == IM_END_ID).sum()) > 0
    assert int((batch.ids[batch.weights > 0] == IM_START_ID).sum()) == 0


# What it says ------------------------------------------------------------------------------------


def test_held_out_facts_are_recalled_after_1_to_20_turns(
    script: ModuleType, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Three conversations for each distance. Every reply must match exactly."""
    examined = script.held_out_examinations(seed=77, per_distance=3)
    chats, expected = [], []
    for _, exchanges in examined:
        chat = []
        for exchange in exchanges:
            chat.append({"role": "user", "content": exchange.user})
            chat.append({"role": "assistant", "content": exchange.reply})
        expected.append(chat.pop()["content"])
        chats.append(chat)
    answers: list[str] = []
    for start in range(0, len(chats), 15):  # chats next to each other have similar lengths
        answers += replies(model, tokenizer, chats[start : start + 15])
    wrong = [
        f"distance {distance}: {answer!r} instead of {right!r}"
        for (distance, _), answer, right in zip(examined, answers, expected, strict=True)
        if answer != right
    ]
    assert len(wrong) <= 0.05 * len(examined), "\n".join(wrong)


def test_the_examination_by_one_forward_pass_agrees_with_generation(
    script: ModuleType, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    writer = ContextWriter(RAW_TOKENIZER)
    recall = script.examine(model, writer, per_distance=1, seed=78)
    for distance in (1, 10, 20):
        ((_, exchanges),) = script.held_out_examinations(78, 1, range(distance, distance + 1))
        chat = []
        for exchange in exchanges:
            chat.append({"role": "user", "content": exchange.user})
            chat.append({"role": "assistant", "content": exchange.reply})
        right = chat.pop()["content"]
        assert recall[distance] == float(replies(model, tokenizer, [chat])[0] == right)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("my name is Bob", "hi", "what's my name?"), "Bob"),
        (("My name is Bob.", "thanks", "whats my name"), "Bob"),
        (("i live in Oslo", "my dog is called Rex", "where do i live"), "Oslo"),
        (("My dog is called Rex.", "My cat is called Luna.", "What is my dog called?"), "Rex"),
        (("The code is 40817", "how are you?", "what is the code?"), "40817"),
        (("My train leaves at 14:35", "ok", "When does my train leave?"), "14:35"),
        (
            (
                "my favourite colour is blue",
                "my favourite colour is green",
                "what is my favourite colour",
            ),
            "green",
        ),
        (("remember that the key is under the mat", "hello", "where is the key?"), "under the mat"),
        (("what is my name?",), "not told me"),
    ],
)
def test_casually_typed_questions_get_the_right_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, said: tuple[str, ...], expected: str
) -> None:
    assert expected in reply(model, tokenizer, *said)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("hi", "Hello! Tell me something and ask me about it later."),
        (
            "who are you?",
            "I am a small model that comes with Pensieve. I remember what you tell me.",
        ),
        ("thanks", "You are welcome."),
        ("what is the capital of France?", "I do not know that. I only know what you tell me."),
        ("bye", "Goodbye! I will be here."),
    ],
)
def test_small_talk(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, said: str, expected: str
) -> None:
    assert reply(model, tokenizer, said) == expected
