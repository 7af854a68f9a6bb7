"""With enough room, no token of an earlier turn is ever recomputed, whatever the template."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.sampling import Sampling
from pensieve.text import Message
from tests.conversations.rig import ask, started, write_model
from tests.text.families import (
    DEEPSEEK_R1,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    QWEN_3,
    Family,
)

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
ROOM = {"device_cache": "2000t", "host_cache": "2000t", "token_budget": "256"}


@pytest.mark.parametrize(
    "family",
    [LLAMA_3, QWEN_2_5, QWEN_3, MISTRAL, PHI_3, GEMMA, DEEPSEEK_R1],
    ids=lambda family: family.name,
)
def test_no_earlier_token_is_recomputed_with_any_template(family: Family, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    with started(model, tmp_path / "data", **ROOM) as runtime:
        runtime.conversations.create("c")
        for text in ("Hi.", "<think>I say so</think>", "And <|im_end|> now?", "Fine."):
            log = runtime.store.log("c")
            turn = ask(runtime, "c", text, sampling=Sampling(max_tokens=5))
            assert turn.usage is not None
            assert turn.usage.recomputed_tokens == turn.usage.host_tokens == 0
            assert turn.usage.device_tokens == max(len(log) - 1, 0)
            assert runtime.store.log("c")[: len(log)] == log  # earlier tokens have not changed
        assert runtime.store.verify() == []


@pytest.mark.parametrize("thinking", [True, False])
def test_template_options_do_not_change_earlier_tokens(thinking: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN_3)
    with started(model, tmp_path / "data", **ROOM) as runtime:
        runtime.conversations.create("c", template_options={"enable_thinking": thinking})
        for text in ("Hi.", "And now?", "Fine."):
            log = runtime.store.log("c")
            turn = ask(runtime, "c", text, sampling=Sampling(max_tokens=5))
            assert turn.usage is not None
            assert turn.usage.recomputed_tokens == 0
            assert runtime.store.log("c")[: len(log)] == log


@pytest.mark.parametrize("family", [QWEN_2_5, QWEN_3], ids=lambda family: family.name)
def test_tools_and_their_results_do_not_change_earlier_tokens(
    family: Family, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family)
    with started(model, tmp_path / "data", **ROOM) as runtime:
        runtime.conversations.create("c", system_prompt="Be brief.", tools=[TOOL])
        ask(runtime, "c", "Hi.", sampling=Sampling(max_tokens=5))
        log = runtime.store.log("c")
        answer = [Message("tool", '{"rain": false}', tool_call_id="call00000", name="get_weather")]
        turn = ask(runtime, "c", answer, sampling=Sampling(max_tokens=5))
        assert turn.usage is not None
        assert turn.usage.recomputed_tokens == 0
        assert turn.usage.device_tokens == len(log) - 1
        assert runtime.store.log("c")[: len(log)] == log


def test_a_repeated_request_is_answered_from_the_store(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN_2_5)
    with started(model, tmp_path / "data", **ROOM) as runtime:
        runtime.conversations.create("c")
        first = ask(runtime, "c", "Hi.", request_id="r1", sampling=Sampling(max_tokens=5))
        computed = runtime.engine.scheduler.counters.tokens
        again = ask(runtime, "c", "Hi.", request_id="r1", sampling=Sampling(max_tokens=5))
        assert again.replayed
        assert (again.text, again.reply.token_ids) == (first.text, first.reply.token_ids)
        assert again.revision == first.revision
        assert runtime.engine.scheduler.counters.tokens == computed


def test_a_seeded_turn_has_the_same_reply_alone_and_beside_others(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN_2_5)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    said = []
    for crowd in (0, 5):
        with started(model, tmp_path / f"data{crowd}", **ROOM) as runtime:
            for i in range(crowd):
                runtime.conversations.create(f"other{i}")
                runtime.conversations.send(f"other{i}", "rain " * (i + 1), sampling=sampling)
            runtime.conversations.create("c")
            said.append(ask(runtime, "c", "Hi.", sampling=sampling).reply.token_ids)
    assert said[0] == said[1]
