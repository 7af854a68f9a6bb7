"""M1 under declared prefixes: conversations that share their beginning, while it is swapped, dropped,
computed again by one of its holders, forked, warmed, and declared anew with other words under the same name.

The reference is plain transformers on each conversation's own log, and that log is what the template writes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pensieve.engine.messages import CheckIntegrity, DeleteConversation, EvictConversation
from pensieve.launch.model_folder import load_texts
from pensieve.text import Message, Setting
from tests.service.in_process import Runtime
from tests.service.rig import Crowd, Reference, figures, query, started, write_model
from tests.text.families import LLAMA_3, QWEN_2_5, Family

FIRED = (
    "chunks_swapped_out",
    "chunks_reclaimed",
    "chunks_swapped_in",
    "chunks_dropped",
    "chunks_copied_on_write",
    "suspensions",
    "tokens_computed_again",
    "recomputed_tokens",
)
SHOTS = (
    Message("user", " Oslo?\n"),
    Message("assistant", "Rain. "),
    Message("user", "<|im_end|>"),
    Message("assistant", "fine"),
)
DATE = {"date_string": "1 Jan 2026"}
LONG = "The rain is over in Oslo. "


class PrefixCrowd(Crowd):
    """Most conversations begin under one of a few prefixes, and somebody works on these."""

    def __init__(self, runtime: Runtime, seed: int, size: int, options: dict[str, str]) -> None:
        self.options = options
        self.begins_with: dict[str, list[Message]] = {}
        self.prefixes: dict[str, list[Message]] = {}
        self.happened: Counter[str] = Counter()
        self.runtime = runtime
        for prefix_id in ("system", "shots", "both"):
            self.declare(prefix_id, LONG)
        super().__init__(runtime, seed, size)

    def declare(self, prefix_id: str, system: str) -> None:
        settings: dict[str, Any] = {
            "system_prompt": "" if prefix_id == "shots" else system,
            "messages": () if prefix_id == "system" else SHOTS,
            "template_options": self.options,
        }
        self.runtime.conversations.declare(prefix_id, **settings)
        own = [Message("system", system)] if settings["system_prompt"] else []
        self.prefixes[prefix_id] = [*own, *settings["messages"]]

    def create(self, name: str) -> None:
        if self.random.random() < 0.25:
            super().create(name)
            return
        prefix_id = self.random.choice(list(self.prefixes))
        self.runtime.conversations.create(name, prefix_id=prefix_id)
        self.begins_with[name] = self.prefixes[prefix_id]

    def act(self) -> None:
        roll, prefix_id = self.random.random(), self.random.choice(list(self.prefixes))
        key, mailbox = f"prefix:{prefix_id}", self.runtime.mailbox
        if roll < 0.06:
            self.runtime.conversations.warm(key)
        elif roll < 0.12:  # its own chunks go; those that others hold, with the next who needs room
            mailbox.put(EvictConversation(key, self.random.random() < 0.3))
        elif roll < 0.14:
            self.happened["declared anew"] += 1
            assert self.runtime.conversations.history.delete(key).error is None
            mailbox.put(DeleteConversation(key))
            self.declare(prefix_id, LONG.replace("Oslo", self.words(2)))
        super().act()

    def step(self) -> None:
        turns = dict(self.turns)
        super().step()
        for turn in turns.values():
            if turn.finish is not None and turn.usage is not None and turn.usage.shared_tokens:
                own = turn.figures["shared_from"].startswith("prefix:")
                self.happened["shared"] += own
                late = own and turn.usage.recomputed_tokens > 0
                self.happened["shared, and computed the rest again"] += late


@pytest.mark.parametrize(
    ("family", "kind", "policy", "chunk_tokens"),
    [
        (QWEN_2_5, "llama-gqa", "value", 8),
        (LLAMA_3, "qwen3", "lru", 8),
        (QWEN_2_5, "llama-gqa", "return", 32),  # pages that the compiled kernels take
    ],
)
def test_every_reply_under_a_prefix_is_what_plain_transformers_would_have_said(
    tmp_path: Path, family: Family, kind: str, policy: str, chunk_tokens: int
) -> None:
    shape = {"policy": policy, "chunk_tokens": str(chunk_tokens), "token_budget": "64"}
    shape |= {"device_cache": "960t", "host_cache": "640t"}
    folder = write_model(tmp_path / "model", family, kind)
    template = load_texts(folder, lambda line: None).template
    options = DATE if family is LLAMA_3 else {}
    total: Counter[str] = Counter()
    crowd: PrefixCrowd | None = None
    for life in range(2):  # the process ends between turns; prefixes and histories stay
        with started(folder, tmp_path / "data", **shape) as runtime:
            if crowd is None:
                crowd = PrefixCrowd(runtime, 7, 24, options)
            crowd.runtime = runtime
            crowd.run(150)
            crowd.rush(8)
            for _ in range(8):  # what depends on when things happen may need longer
                if life == 0 or crowd.happened["shared, and computed the rest again"]:
                    break
                crowd.run(50)
            total.update({k: int(v) for k, v in figures(runtime).items() if k in FIRED})
            assert query(runtime, CheckIntegrity(2)).problems == (), f"life {life}"
            assert runtime.store.verify() == []
    assert crowd is not None
    assert not [name for name in FIRED if not total[name]], f"never happened: {dict(total)}"
    assert crowd.happened["shared"] > 5, crowd.happened
    assert crowd.happened["declared anew"] > 0
    assert crowd.happened["shared, and computed the rest again"] > 0

    reference = Reference(folder)
    num_checked = 0
    with started(folder, tmp_path / "data", **shape) as runtime:
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
        for name, first in crowd.begins_with.items():
            stored = runtime.store.messages(name, include_token_ids=True)
            before = [each for each in stored if not each.revision]
            assert [each.content for each in before] == [each.content for each in first]
            turn = (
                [each for each in stored if each.revision == stored[len(before)].revision]
                if (len(stored) > len(before))
                else []
            )
            said = [Message(each.role, each.content) for each in turn if not each.finish_reason]
            if not said:
                continue
            whole = template.render([*first, *said], Setting(options=options))
            ids = template.tokenizer.encode(whole, at_start=True).ids
            log = list(runtime.store.log(name))
            assert log[: len(ids)] == ids, name
            num_checked += 1
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    print(f"{sampled} sampled tokens: {wrong} wrong, {ties} ties; {num_checked}; {crowd.happened}")
    assert num_checked > 10
    assert sampled > 800
    assert wrong == 0
