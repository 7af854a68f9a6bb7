"""Drives a TorchExecutor with iterations that a test writes, to compare it with plain transformers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from pensieve.core.iteration import (
    Iteration,
    Outcome,
    PageCopy,
    Slice,
    SwapIn,
    SwapOut,
    TurnStart,
)
from pensieve.core.turn import Turn, TurnOptions
from pensieve.model.executor import TorchExecutor
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from pensieve.text import Tokenizer

CHUNK_TOKENS = 4
GAP_MAX = 1e-4  # how far a sampled token's reference logit may be below the largest logit


class Captured:
    """Replaces CUDA's graph capture. A replay computes again, with the same tensors."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    def warm(self, compute: Callable[[], None]) -> None:
        compute()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            compute()

        return replay


def poison(arena: torch.Tensor) -> None:
    """Fill every row with NaN. In a format of bytes, the scale of each row becomes NaN."""
    arena.fill_(float("nan") if arena.is_floating_point() else -1)


class LetterTokenizer:
    """Most tokens are letters. Tokens 0 to 2 have no text; 100 to 102 are the bytes of a euro sign.

    With `thinks`, tokens 1 and 2 open and close the thinking.
    """

    vocab_size = 120
    special_ids = control_ids = frozenset({0, 1, 2})
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, thinks: bool = False) -> None:
        self._names = {"<think>": 1, "</think>": 2} if thinks else {}

    def token_id(self, text: str) -> int | None:
        return self._names.get(text)

    def is_silent(self, token_id: int) -> bool:
        return token_id < 3

    def piece(self, token_id: int, *, first: bool) -> bytes:
        if 100 <= token_id < 103:
            return "€".encode()[token_id - 100 : token_id - 99]
        return chr(ord("a") + token_id % 26).encode()


def letter_tokenizer() -> Tokenizer:
    """Return a LetterTokenizer. It has the few methods that an executor and a reply call."""
    return cast("Tokenizer", LetterTokenizer())


class World:
    """Draws pages at random, fills them with NaN, and keeps all turns that were made."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        device_pages: int = 64,
        host_pages: int = 32,
        staging_pages: int = 0,
        memory: KVMemory | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        chunk_tokens: int = CHUNK_TOKENS,
        depth: int | None = None,
        graphs: Callable[[KVMemory], DecodeGraphs] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.memory = memory or KVMemory(
            model.shape, device_pages, host_pages, chunk_tokens, staging_pages=staging_pages
        )
        for arena in (
            self.memory.device_arena,
            self.memory.host_arena,
            self.memory.staging_arena,
        ):
            poison(arena)
        self.graphs = graphs(self.memory) if graphs is not None else None
        self.sampler = Sampler(model.shape.vocab_size, eos_token_ids)
        self.executor = TorchExecutor(
            model, self.memory, self.sampler, letter_tokenizer(), depth, self.graphs
        )
        self.free_pages = list(range(self.memory.device_pages))
        self.rng.shuffle(self.free_pages)
        self.turns: list[Turn] = []
        self._started: set[int] = set()
        self._index = 0

    def turn(
        self,
        num_prompt_tokens: int,
        *,
        num_outputs_max: int = 40,
        sampling: Sampling | None = None,
        warm: bool = False,
        tokens: Sequence[int] | None = None,
    ) -> Turn:
        if tokens is None:
            tokens = [self.rng.randrange(3, 100) for _ in range(num_prompt_tokens)]
        turn = Turn(
            attempt_id=len(self.turns),
            conversation_id="c",
            tokens=array("I", tokens),
            history_tokens=0,
            prompt_end=len(tokens),
            length_max=len(tokens) + num_outputs_max,
            options=TurnOptions(sampling or Sampling(ignore_eos=True)),
            warm=warm,
        )
        self.turns.append(turn)
        self.extend_pages(turn, len(tokens))
        return turn

    def extend_pages(self, turn: Turn, num_tokens: int) -> None:
        while len(turn.page_table) * self.memory.chunk_tokens < num_tokens:
            turn.page_table.append(self.free_pages.pop())

    def step(
        self,
        *slices: tuple[Turn, int, int, bool],
        copies: Sequence[PageCopy] = (),
        swap_ins: Sequence[SwapIn] = (),
        swap_outs: Sequence[SwapOut] = (),
        failing: Sequence[Turn] = (),
    ) -> Outcome:
        """Run one iteration, and append the sampled tokens to their turns, as the core would.

        Exactly the turns in `failing` must fail. A turn that reads NaN from an unwritten page fails, too.
        """
        self.launch(*slices, copies=copies, swap_ins=swap_ins, swap_outs=swap_outs)
        return self.collect(failing)

    def launch(
        self,
        *slices: tuple[Turn, int, int, bool],
        copies: Sequence[PageCopy] = (),
        swap_ins: Sequence[SwapIn] = (),
        swap_outs: Sequence[SwapOut] = (),
    ) -> None:
        for turn, _, stop, _ in slices:
            self.extend_pages(turn, stop)
        turns = {each[0].attempt_id: each[0] for each in slices}
        iteration = Iteration(
            self._index,
            tuple(self.slice(*each) for each in slices),
            tuple(copies),
            tuple(swap_ins),
            tuple(swap_outs),
            tuple(
                start_of(turn) for turn in turns.values() if turn.attempt_id not in self._started
            ),
        )
        self._started.update(turns)
        self._index += 1
        self.executor.launch(iteration)

    def slice(self, turn: Turn, start: int, stop: int, needs_token: bool) -> Slice:
        return slice_of(turn, start, stop, needs_token, self.memory.chunk_tokens)

    def collect(self, failing: Sequence[Turn] = ()) -> Outcome:
        outcome = self.executor.collect()
        failed = [failure.attempt_id for failure in outcome.failures]
        assert failed == [turn.attempt_id for turn in failing], outcome.failures
        for sample in outcome.samples:
            self.turns[sample.attempt_id].tokens.append(sample.token_id)
        return outcome

    def decode(self, *turns: Turn, **movements: Any) -> Outcome:
        """Compute the next token of each of these turns."""
        slices = [(turn, len(turn.tokens) - 1, len(turn.tokens), True) for turn in turns]
        return self.step(*slices, **movements)

    def replace_page(self, turn: Turn, chunk: int) -> tuple[int, int]:
        """Move a chunk of a turn to another page, and fill the old page with NaN. Return (old, new)."""
        old, new = turn.page_table[chunk], self.free_pages.pop()
        turn.page_table[chunk] = new
        poison(self.memory.device_arena[:, old])
        return old, new


def play_at_random(world: World, seed: int) -> list[Turn]:
    """Run several turns at once. Lengths of slices, swaps, pages and holes are random."""
    rng, chunk_tokens = random.Random(seed), world.memory.chunk_tokens
    turns = [world.turn(rng.randint(1, 20)) for _ in range(4)]
    computed = dict.fromkeys(turns, 0)
    copy_id = 0
    for _ in range(30):
        slices, ins = [], []
        for turn in turns:
            if computed[turn] and rng.random() < 0.15:
                # A full chunk moves to another page through the host, or is dropped.
                chunk = rng.randrange(-(-computed[turn] // chunk_tokens))
                slots = min(chunk_tokens, computed[turn] - chunk * chunk_tokens)
                start = chunk * chunk_tokens
                if rng.random() < 0.5:
                    out = SwapOut(copy_id, turn.page_table[chunk], turn.attempt_id, slots)
                    assert world.step(swap_outs=[out]).finished_copies == (copy_id,)
                    page = world.replace_page(turn, chunk)[1]
                    ins.append(SwapIn(copy_id + 1, turn.attempt_id, page, slots))
                    copy_id += 2
                else:
                    world.replace_page(turn, chunk)
                    slices.append((turn, start, start + slots, False))
            stop = min(len(turn.tokens), computed[turn] + rng.randint(1, 7))
            slices.append((turn, computed[turn], stop, stop == len(turn.tokens)))
            computed[turn] = stop
        outcome = world.step(*slices, swap_ins=ins)
        assert set(outcome.finished_copies) == {each.copy_id for each in ins}
    return turns


def slice_of(
    turn: Turn, start: int, stop: int, needs_token: bool, chunk_tokens: int = CHUNK_TOKENS
) -> Slice:
    """Make a slice as the scheduler does."""
    is_last = needs_token and turn.ends_at(stop + 1)
    tokens, pages = turn.tokens[start:stop], turn.page_table[: -(-stop // chunk_tokens)]
    return Slice(turn.attempt_id, start, stop, tokens, pages, needs_token, is_last)


def start_of(turn: Turn) -> TurnStart:
    return TurnStart(turn.attempt_id, turn.tokens[: turn.prompt_end], turn.options.sampling)


def plain_model(folder: Path) -> Any:
    """Load the checkpoint with the attention of transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def largest_gap(model: Any, turn: Turn) -> float:
    """Return how far, at most, a sampled token's logit is below the largest in plain transformers."""
    tokens = torch.tensor([list(turn.tokens)])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    before = logits[turn.prompt_end - 1 : -1]
    sampled = tokens[0, turn.prompt_end :]
    assert len(sampled) > 0
    return float((before.amax(1) - before.gather(1, sampled[:, None])[:, 0]).max())
