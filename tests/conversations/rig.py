"""A real runtime (store, engine, model) with a tiny random model, and plain transformers to compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from pensieve.config import resolve
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import FinishReason
from pensieve.engine.messages import Answer, CheckIntegrity, GetStats
from pensieve.errors import ContextFull
from pensieve.sampling import Sampling
from tests.conversations.in_process import Runtime, start
from tests.models import DEEP, SERVED, tiny_model
from tests.text.families import Family, write_folder

TIE = 1e-4  # a sampled token is wrong if its reference logit is further below the largest


def write_model(folder: Path, family: Family, kind: str = "llama-gqa", seed: int = 0) -> Path:
    """Write a checkpoint with a tokenizer and a chat template, as a user would have it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, family)
    config = (SERVED | DEEP)[kind]()
    config.vocab_size = 512
    config.eos_token_id = None
    config.bos_token_id = None
    model = tiny_model(config, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False  # greedy, like the transformers to compare with
    model.config.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def started(model: Path, data: Path, **settings: str) -> Runtime:
    flags = {
        "device_cache": "480t",
        "host_cache": "480t",
        "chunk_tokens": "8",
        "token_budget": "48",
        "turns_max": "12",
        "threads": "1",
        **settings,
        "model": str(model),
        "data": str(data),
    }
    return start(resolve(flags, {}).settings, "pensieve test", lambda line: None)


def step(runtime: Runtime) -> bool:
    """Run one iteration of the engine and handle its events, in this thread and in a fixed order."""
    runtime.engine.held.wait()
    worked = runtime.engine.step() or bool(runtime.engine.held.turns)
    while (event := runtime.outbox.get(0)) is not None:
        runtime.conversations.handle(event)
        worked = True  # handling may send a message to the engine, such as a log that it needs
    return worked


def finish(runtime: Runtime, turns: Sequence[LiveTurn]) -> None:
    """Handle events until these turns have ended."""
    while any(turn.finish is None for turn in turns):
        assert step(runtime), "a turn does not end"


def ask(runtime: Runtime, conversation_id: str, text: Any, **options: Any) -> LiveTurn:
    turn = runtime.conversations.send(conversation_id, text, **options)
    finish(runtime, [turn])
    return turn


def query(runtime: Runtime, message: GetStats | CheckIntegrity) -> Answer:
    (answer,) = runtime.engine.take(message, runtime.engine.clock.now())
    assert isinstance(answer, Answer)
    return answer


def figures(runtime: Runtime) -> dict[str, float]:
    return query(runtime, GetStats(1)).figures


class Reference:
    """Plain transformers, run on the same token ids."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def wrong_tokens(self, runtime: Runtime, conversation_id: str) -> tuple[int, int, int]:
        """Return the conversation's numbers of sampled tokens, wrong tokens and ties."""
        messages = runtime.store.messages(conversation_id, include_token_ids=True)
        log = list(runtime.store.log(conversation_id))
        assert log == [token for m in messages for token in (m.token_ids or ())]
        return self.wrong_of(messages)

    def logits(self, log: Sequence[int]) -> torch.Tensor:
        """Return the logits of every position: (tokens, vocab)."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([log]), use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def wrong_of(self, messages: Sequence[Any]) -> tuple[int, int, int]:
        """Return the same counts for messages with token ids, from the store or from the SDK."""
        log = [token for message in messages for token in (message.token_ids or ())]
        if not log:
            return 0, 0, 0
        logits = self.logits(log).double()
        sampled = wrong = ties = stop = 0
        for message in messages:
            start, stop = stop, stop + message.num_tokens
            if not message.finish_reason:
                continue
            for position in range(start, stop):
                row = logits[position - 1]
                gap = float(row.max() - row[log[position]])
                sampled += 1
                wrong += gap > TIE
                ties += 0 < gap <= TIE
        return sampled, wrong, ties


class Crowd:
    """Many conversations at once: random turns, forks, rewinds and cancellations."""

    def __init__(self, runtime: Runtime, seed: int, size: int) -> None:
        self.runtime = runtime
        self.random = random.Random(seed)
        self.names = [f"c{i}" for i in range(size)]
        self.turns: dict[str, LiveTurn] = {}
        self.recent: list[str] = []  # conversations whose turns ended, in this order
        self.num_forks = self.num_rewinds = self.num_cancels = self.num_rushes = 0
        self.num_shared = 0  # first turns that reused KV of another conversation
        for name in self.names:
            self.create(name)

    def create(self, name: str) -> None:
        """Create a conversation. Some name a prefix (`prefix_id`); others only begin with the same text."""
        prompt = self.random.choice(("", "Be brief.", "The rain is over in Oslo."))
        prefix_id = f"p{len(prompt)}" if self.random.random() < 0.5 else ""
        self.runtime.conversations.create(name, system_prompt=prompt, prefix_id=prefix_id)

    def words(self, most: int) -> str:
        return " ".join(
            self.random.choice(("Oslo", "rain", "fine", "weather", "today", "Grüße", "日本", "7"))
            for _ in range(self.random.randint(1, most))
        )

    def act(self) -> None:
        resting = [name for name in self.names if name not in self.turns]
        roll = self.random.random()
        if resting and (roll < 0.8 or not self.turns):
            name = self.pick(resting)
            sampling = Sampling(
                max_tokens=self.random.choice((1, 4, 12, 48)), ignore_eos=self.random.random() < 0.5
            )
            try:
                self.turns[name] = self.runtime.conversations.send(
                    name, self.words(10), sampling=sampling
                )
            except ContextFull:  # a user would go back to where there was room
                self.rewind(name)
        elif roll < 0.86 and resting:
            source = self.pick(resting)
            revisions = self.revisions(source)
            self.num_forks += 1
            name = f"f{self.num_forks}"
            if self.num_forks % 3:
                self.runtime.conversations.fork(source, name, self.random.choice(revisions[-2:]))
            else:
                self.create(name)
            self.names.append(name)
            self.recent.append(name)
        elif roll < 0.92 and resting:
            self.rewind(self.pick(resting))
        elif self.turns:
            self.num_cancels += 1
            self.runtime.conversations.cancel(self.random.choice(list(self.turns.values())))

    def pick(self, resting: list[str]) -> str:
        recent = [name for name in self.recent[-5:] if name in resting]
        return self.random.choice(recent if recent and self.random.random() < 0.5 else resting)

    def revisions(self, name: str) -> list[int]:
        messages = self.runtime.store.messages(name)
        return sorted({0, *(message.revision for message in messages)})

    def rewind(self, name: str) -> None:
        self.num_rewinds += 1
        self.runtime.conversations.rewind(name, self.random.choice(self.revisions(name)))

    def rush(self, size: int = 12) -> None:
        """Run enough long replies at once to suspend some turns.

        Turns of a higher priority then take the places of other turns. Finally, all conversations are forked.
        Sources and forks continue at once, so that their last chunks are copied on write.
        """
        self.num_rushes += 1
        names = [f"r{self.num_rushes}-{i}" for i in range(size)]
        long = Sampling(max_tokens=80, ignore_eos=True)
        for name in names:
            self.create(name)
            self.turns[name] = self.runtime.conversations.send(name, "Oslo", sampling=long)
        for number in range(3):  # these turns take the places of others
            for _ in range(6):
                self.step()
            names.append(f"h{self.num_rushes}-{number}")
            self.create(names[-1])
            self.turns[names[-1]] = self.runtime.conversations.send(
                names[-1], self.words(4), sampling=long, priority=1 + number
            )
        self.settle()
        for name in names:
            revision = self.revisions(name)[-1]
            self.runtime.conversations.fork(name, f"{name}-fork", revision)
        self.names += [*names, *(f"{name}-fork" for name in names)]
        for name in (*names[-3:], *(f"{name}-fork" for name in names[-3:])):
            self.turns[name] = self.runtime.conversations.send(
                name, self.words(4), sampling=Sampling(max_tokens=4)
            )
        self.settle()

    def settle(self) -> None:
        finish(self.runtime, list(self.turns.values()))
        self.step()

    def step(self) -> None:
        step(self.runtime)
        for name, turn in list(self.turns.items()):
            if turn.finish is not None:
                assert turn.finish is not FinishReason.FAILED, turn.failure
                assert turn.usage is not None
                found = turn.usage.device_tokens + turn.usage.host_tokens
                self.num_shared += bool(found and not turn.history_tokens)
                del self.turns[name]
                self.recent.append(name)

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            self.act()
            for _ in range(self.random.choice((0, 1, 3, 8))):
                self.step()
        self.settle()
