"""The sections of scripts/bench_gpu that need a whole model: random weights in the shape of Llama 3 8B.

`load` runs the engine itself, without a daemon, under conversations like those of ShareGPT: they arrive at
random, each says something, waits for the reply, reacts after a random time, and says the next thing. Mean
reaction time, tiers and load are all shrunk by the same factor (`SHRINK`), which keeps what matters: how much
idle KV the tiers can hold for how long. Four engines get the same conversations:

    stateless     everything is forgotten when a turn ends, and computed again with the next
    device only   what the device tier has no room for is forgotten
    two tiers     the host tier takes it
    two, LRU      as before, but the least recently used is given up first

Throughput is compared at equal P90 normalized latency (the time of a turn over its output tokens), as the
paper does: each engine's latency is measured at a few rates and interpolated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Slice, SwapIn, SwapOut
from pensieve.core.policies.queue import policy_named
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import Scheduler, SchedulerConfig
from pensieve.core.turn import Turn
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import Event, EvictConversation, SubmitTurn, TurnDelta, TurnEnded
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.model.attention import SERVING, FlatModel, register
from pensieve.model.executor import TorchExecutor
from pensieve.model.fuse import fuse
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.sampler import Sampler
from pensieve.model.shape import ModelShape

if TYPE_CHECKING:
    from pensieve.bench.gpu import Bench

SHRINK = 20  # of reaction times and tiers
REACTION_SECONDS = 60.0
TURNS_MEAN, INPUT_MEAN, OUTPUT_MEAN = 5.56, 37.8, 204.6
CONTEXT_MAX = 16_384
BF16_GAP = 2e-2  # of the logits' range: rounding
GREEDY = Sampling(ignore_eos=True, max_tokens=100_000)


class Mute:
    """A tokenizer for tokens that mean nothing."""

    def is_silent(self, token_id: int) -> bool:
        return False

    def piece(self, token_id: int, *, first: bool) -> bytes:
        return b" "


def random_model(device: torch.device, small: bool, *, plain: bool = False) -> LoadedModel:
    """In the shape of Llama 3 8B (small: a few layers of nothing), made where it is used.

    Always the same weights; `plain` leaves the layers as transformers has them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, mlp, layers, vocabulary = (256, 512, 2, 512) if small else (4096, 14_336, 32, 128_256)
    heads, kv_heads = (4, 2) if small else (32, 8)
    head_size = hidden // heads
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT_MAX,
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    rotary = type(module.model.rotary_emb)(config)  # whose frequencies are no weights
    module = module.to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    module.model.rotary_emb = rotary.to(device)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5)
        else:
            parameter.data.fill_(1.0)
    register()
    module.eval().requires_grad_(False).set_attn_implementation(SERVING)
    count = sum(each.numel() for each in module.parameters())
    shape = ModelShape(
        *(layers, heads, kv_heads, head_size, vocabulary, CONTEXT_MAX),
        *(torch.bfloat16, count, 2 * count),
    )
    flat = FlatModel(module)
    if not plain:
        num_replaced, _ = fuse(flat, range(3, 40))
        if num_replaced != layers:
            raise PensieveError(f"{num_replaced} of {layers} layers were replaced")
    return LoadedModel("random", flat, shape, heads, frozenset())


def executor_of(
    model: LoadedModel, device: torch.device, device_pages: int, host_pages: int, turns_max: int
) -> TorchExecutor:
    memory = KVMemory(model.shape, device_pages, host_pages, PAGE, device)
    graphs = None
    if device.type == "cuda":
        graphs = DecodeGraphs(model.flat, memory, turns_max)
        graphs.capture()
        if graphs.failure:
            raise PensieveError(f"no graphs: {graphs.failure}")
    tokenizer: Any = Mute()
    return TorchExecutor(model, memory, Sampler(model.shape.vocab_size), tokenizer, graphs=graphs)


# -- a swap-in behind the compute --


def section_hidden(bench: Bench, model: LoadedModel) -> None:
    history, message = (320, 64) if bench.small else (4000, 512)
    pages = -(-(history + message) // PAGE)
    executor = executor_of(model, bench.device, 2 * pages, pages, 1)
    draw = random.Random(0)
    tokens = array("I", [draw.randrange(model.shape.vocab_size) for _ in range(history + message)])
    turn = Turn(0, "c", tokens, 0, len(tokens), len(tokens) + 10, GREEDY)
    order = list(range(2 * pages))
    draw.shuffle(order)
    turn.page_table = order[:pages]
    spare = order[pages:]
    host = list(range(pages))
    draw.shuffle(host)
    full = history // PAGE

    def step(*slices: Slice, ins: Sequence[SwapIn] = (), outs: Sequence[SwapOut] = ()) -> float:
        bench.synchronize()
        began = time.perf_counter()
        executor.launch(Iteration(0, slices, (), tuple(ins), tuple(outs)))
        outcome = executor.collect()
        if slices and slices[-1].needs_token and not outcome.samples:
            raise PensieveError(f"no token: {outcome.failures}")
        return time.perf_counter() - began

    for start in range(0, history, 512):
        step(Slice(turn, start, min(start + 512, history), False))
    prompt = Slice(turn, history, history + message, True)
    outs = [SwapOut(i, turn.page_table[i], host[i], PAGE) for i in range(full)]
    step(outs=outs)
    told = 0
    while told < full:
        executor.launch(Iteration(0, ()))
        told += len(executor.collect().finished_copies)
        if told == 0:
            break
    times: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(3 if bench.small else 9):
        times["device"].append(step(prompt))
        turn.page_table[:full], spare[:full] = spare[:full], turn.page_table[:full]
        ins = [SwapIn(i, host[i], turn.page_table[i], PAGE) for i in range(full)]
        times["host"].append(step(prompt, ins=ins))
        executor._copier.wait_any()
    executor.close()
    median = {place: statistics.median(each[1:]) for place, each in times.items()}
    ratio = median["host"] / median["device"]
    bench.tell(
        "hidden",
        f"{message} new tokens over {history}: {median['device'] * 1e3:.1f} ms on the device, "
        f"{median['host'] * 1e3:.1f} ms from the host tier: {ratio:.3f} x",
        ratio=ratio,
    )


# -- conversations --


@dataclass
class Talk:
    """A conversation to be had."""

    name: str
    says: list[array[int]]
    outputs: list[int]  # how many tokens each reply has
    reactions: list[float]
    tokens: array[int] = field(default_factory=lambda: array("I"))
    replied: list[int] = field(default_factory=list)  # positions of tokens of replies
    turn: int = 0


def talks(
    rate: float, seconds: float, reaction: float, vocab_size: int, seed: int
) -> list[tuple[float, Talk]]:
    """(arrival, conversation), as ShareGPT's: lengths are drawn so that the means are right."""
    draw = random.Random(seed)
    found: list[tuple[float, Talk]] = []
    now = 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        count = 1 + min(int(draw.expovariate(1 / (TURNS_MEAN - 0.5))), 40)
        inputs = [1 + min(int(draw.expovariate(1 / INPUT_MEAN)), 1024) for _ in range(count)]
        outputs = [1 + min(int(draw.expovariate(1 / OUTPUT_MEAN)), 1024) for _ in range(count)]
        reactions = [draw.expovariate(1 / reaction) for _ in range(count)]
        says = [array("I", draw.choices(range(3, vocab_size), k=each)) for each in inputs]
        found.append((now, Talk(f"{seed}-{len(found)}", says, outputs, reactions)))
    return found


@dataclass(frozen=True)
class Kind:
    name: str
    host: bool = True
    policy: str = "value"
    stateless: bool = False


KINDS = (
    Kind("stateless", stateless=True),
    Kind("device only", host=False),
    Kind("two tiers"),
    Kind("two, LRU", policy="lru"),
)


class Clock:
    def now(self) -> float:
        return time.perf_counter()


class Conversations:
    """Says what there is to say when its time has come, and keeps the times of what came back."""

    def __init__(self, mailbox: Mailbox, stateless: bool, began: float) -> None:
        self._mailbox = mailbox
        self._stateless = stateless
        self._began = began
        self._due: list[tuple[float, int, Talk]] = []
        self._running: dict[int, tuple[Talk, float, int]] = {}  # talk, submitted at, its output
        self._num_turns = 0
        self.latencies: list[float] = []  # normalized, of turns that ended
        self.output_tokens = 0
        self.failures = 0

    def add(self, at: float, talk: Talk) -> None:
        self._num_turns += 1
        heapq.heappush(self._due, (self._began + at, self._num_turns, talk))

    @property
    def next_at(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def speak(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number, talk = heapq.heappop(self._due)
            history = len(talk.tokens)
            talk.tokens.extend(talk.says[talk.turn])
            output = talk.outputs[talk.turn]
            if len(talk.tokens) + output >= CONTEXT_MAX:
                continue
            self._running[number] = (talk, now, output)
            sampling = Sampling(ignore_eos=True, max_tokens=output)
            message = SubmitTurn(number, talk.name, talk.tokens.tobytes(), history, sampling)
            self._mailbox.put(message)

    def publish(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, TurnDelta):
                talk = self._running[event.turn_id][0]
                talk.replied.append(len(talk.tokens))
                talk.tokens.append(event.token_id)
                self.output_tokens += 1
            elif isinstance(event, TurnEnded):
                talk, since, output = self._running.pop(event.turn_id)
                if event.failure is not None:
                    self.failures += 1
                    continue
                self.latencies.append((now - since) / output)
                if self._stateless:
                    self._mailbox.put(EvictConversation(talk.name))
                talk.turn += 1
                if talk.turn < len(talk.says):
                    self.add(now - self._began + talk.reactions[talk.turn], talk)


def engine_of(
    model: LoadedModel,
    executor: TorchExecutor,
    kind: Kind,
    mailbox: Mailbox,
    sink: Any,
    device_pages: int,
    host_pages: int,
    token_budget: int,
    turns_max: int,
) -> Engine:
    shape = model.shape
    cost = CostProfile.analytic(
        shape.num_parameters, shape.num_layers, shape.num_heads, shape.head_size, PAGE
    )
    cache = KVCache(
        CacheConfig(device_pages, host_pages if kind.host else 0, PAGE),
        policy_named(kind.policy, cost, PAGE),
    )
    scheduler = Scheduler(cache, SchedulerConfig(token_budget, turns_max))
    config = EngineConfig(min(shape.context_max, (device_pages - 1) * PAGE))
    return Engine(config, scheduler, executor, Clock(), mailbox, sink)


def serve(
    model: LoadedModel,
    executor: TorchExecutor,
    kind: Kind,
    arrivals: list[tuple[float, Talk]],
    seconds: float,
    pages: tuple[int, int],
    token_budget: int,
    turns_max: int,
) -> tuple[Conversations, float]:
    """Conversations for so long; what is running then is waited for."""
    mailbox = Mailbox()
    began = time.perf_counter()
    people = Conversations(mailbox, kind.stateless, began)
    engine = engine_of(model, executor, kind, mailbox, people, *pages, token_budget, turns_max)
    for at, talk in arrivals:
        people.add(at, talk)
    while (now := time.perf_counter()) < began + seconds:
        people.speak(now)
        if not engine.step():
            time.sleep(max(0.0, min(people.next_at - time.perf_counter(), 0.005)))
    lasted = time.perf_counter() - began
    tokens = people.output_tokens
    while engine.step():
        pass
    people.output_tokens = tokens
    return people, lasted


def section_load(bench: Bench, model: LoadedModel) -> None:
    small = bench.small
    rates = (2.0,) if small else (2.0, 4.0, 8.0)  # conversations a second
    left = max(bench.seconds_left - 15, 60)
    seconds = 3.0 if small else min(left / (len(rates) * len(KINDS)) - 1, 20.0)
    turns_max, budget = (8, 64) if small else (128, 1024)
    # What 60 s of reaction would leave idle on 40 GB of KV, all of it by SHRINK.
    device_pages = 60 if small else 300_000 // SHRINK // PAGE * 4
    host_pages = 4 * device_pages
    executor = executor_of(model, bench.device, device_pages, host_pages, turns_max)
    reaction = REACTION_SECONDS / SHRINK
    found: dict[str, list[tuple[float, float]]] = {}  # by kind: (P90 latency, tokens a second)
    for rate in rates:
        for kind in KINDS:
            vocab_size = model.shape.vocab_size
            arrivals = talks(rate, seconds, reaction, vocab_size, int(rate * 10))
            if small:
                for _, talk in arrivals:
                    talk.outputs = [min(each, 12) for each in talk.outputs]
            people, lasted = serve(
                *(model, executor, kind, arrivals, seconds, (device_pages, host_pages)),
                *(budget, turns_max),
            )
            if people.failures or not people.latencies:
                raise PensieveError(f"{kind.name}: {people.failures} turns failed")
            ordered = sorted(people.latencies)
            p90 = ordered[int(0.9 * (len(ordered) - 1))]
            throughput = people.output_tokens / lasted
            found.setdefault(kind.name, []).append((p90, throughput))
            bench.tell(
                "load",
                f"{rate:g} conversations/s, {kind.name}: {throughput:.0f} tokens/s, P90 "
                f"{p90 * 1e3:.1f} ms a token, {len(ordered)} turns",
                rate=rate,
                kind=kind.name,
                throughput=throughput,
                p90=p90,
            )
    executor.close()
    limit = statistics.median(p90 for p90, _ in found["stateless"])
    at_limit = {name: throughput_at(points, limit) for name, points in found.items()}
    for name, throughput in at_limit.items():
        bench.tell(
            "load",
            f"at P90 {limit * 1e3:.1f} ms a token, {name}: {throughput:.0f} tokens/s, "
            f"{throughput / at_limit['stateless']:.2f} x stateless",
            kind=name,
            ratio=throughput / at_limit["stateless"],
        )


def throughput_at(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Where the line through (P90, tokens a second) meets the limit; its end where it does not."""
    ordered = sorted(points)
    for (low, before), (high, after) in itertools.pairwise(ordered):
        if low <= limit <= high and high > low:
            return before + (after - before) * (limit - low) / (high - low)
    below = [throughput for p90, throughput in ordered if p90 <= limit]
    return max(below) if below else ordered[0][1]


# -- the same words, whatever becomes of the KV --


def section_exactness(bench: Bench, model: LoadedModel) -> None:
    """The same conversations with room for all, and with a quarter of it: swaps, drops, recompute.

    Sums of floats depend on the company a row is in, so replies may part where two tokens are equally
    likely; from there on they are held against logits, not against each other.
    """
    turns_max, budget = 8, 128
    said: dict[str, list[Talk]] = {}
    recomputed = 0
    for name, pages in {"room": (400, 0), "pressure": (60, 40)}.items():
        draw = random.Random(3)
        executor = executor_of(model, bench.device, *pages, turns_max)
        mailbox = Mailbox()
        people = Conversations(mailbox, False, time.perf_counter())
        engine = engine_of(model, executor, Kind(name), mailbox, people, *pages, budget, turns_max)
        said[name] = []
        for index in range(10):
            outputs = [draw.randint(4, 24) for _ in range(4)]
            says = [
                array("I", draw.choices(range(3, model.shape.vocab_size), k=draw.randint(5, 150)))
                for _ in outputs
            ]
            said[name].append(Talk(f"c{index}", says, outputs, [0.0] * 4))
            people.add(0.0, said[name][-1])
        while True:
            people.speak(math.inf)
            if not engine.step() and people.next_at == math.inf:
                break
        recomputed = engine.scheduler.counters.recomputed_tokens
        executor.close()
        if people.failures:
            raise PensieveError(f"{people.failures} turns failed")
    parted = sum(
        one.tokens != other.tokens
        for one, other in zip(said["room"], said["pressure"], strict=True)
    )
    if not recomputed:
        raise PensieveError("the pressure was none: nothing was computed again")
    right = random_model(bench.device, bench.small, plain=True)
    told = [(name, wrong_tokens(right, bench.device, each)) for name, each in said.items()]
    if any(wrong for _, wrong in told):
        raise PensieveError(f"tokens that the model would not say: {told}")
    count = sum(len(talk.replied) for each in said.values() for talk in each)
    bench.tell(
        "exactness",
        f"{count} tokens of replies, {recomputed} of histories computed again, 0 wrong; {parted} of "
        f"{len(said['room'])} conversations parted where two tokens were as likely",
        parted=parted,
        recomputed=recomputed,
    )


def wrong_tokens(model: LoadedModel, device: torch.device, said: Sequence[Talk]) -> int:
    """Of all replies, given the ids before them: tokens whose logit lies far below the largest."""
    model.flat.module.set_attn_implementation("sdpa")
    wrong = 0
    for talk in said:
        ids = torch.tensor(list(talk.tokens), device=device)
        logits = model.flat.module(input_ids=ids[None], use_cache=False).logits[0].float()
        at = torch.tensor(talk.replied, device=device)
        before = logits[at - 1]
        largest = before.amax(1)
        gaps = (largest - before.gather(1, ids[at, None])[:, 0]) / (largest - before.amin(1))
        wrong += int((gaps > BF16_GAP).sum())
    return wrong
