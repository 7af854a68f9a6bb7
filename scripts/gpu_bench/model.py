"""Random weights in the shape of Llama 3 8B, an executor and an engine, for sections that need a model.

Conversations like those of ShareGPT are played to the engine directly, without a daemon.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import SampledToken
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import TurnOptions
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    CancelTurn,
    EngineEvent,
    EvictConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Ports
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels.kv_format import FP8
from pensieve.launch.engine import SystemClock
from pensieve.model.attention import SERVING, FlatModel, register
from pensieve.model.executor import TorchExecutor
from pensieve.model.fuse import fuse
from pensieve.model.fuse.whole_model import FusedModel
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.piecewise_graphs import TOKENS_MAX, capture_pieces
from pensieve.model.sampling.sampler import Sampler
from pensieve.model.shape import ModelShape
from pensieve.sampling import Sampling

CONTEXT_MAX = 16_384
GREEDY = Sampling(ignore_eos=True, max_tokens=100_000)


class DummyTokenizer:
    """A tokenizer for random tokens: the text of each token is a space."""

    def is_silent(self, token_id: int) -> bool:
        return False

    def piece(self, token_id: int, *, first: bool) -> bytes:
        return b" "


def random_model(device: torch.device, small: bool, *, plain: bool = False) -> LoadedModel:
    """Make a model in the shape of Llama 3 8B on the device; with `small`, a few tiny layers.

    The weights are always the same. With `plain` the layers stay as transformers has them.
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
    rotary = type(module.model.rotary_emb)(config)  # `to_empty` would lose its frequencies
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
        num_replaced = fuse(flat, range(3, 40), range(37), int8=False).num_layers
        if num_replaced != layers:
            raise PensieveError(f"{num_replaced} of {layers} layers were replaced")
    return LoadedModel("random", flat, shape, heads, frozenset())


def in_fp8(model: LoadedModel) -> LoadedModel:
    """Return the model with its KV kept in fp8.

    Keys and values are about 1, which any of these scales can represent. Neighbouring layers, neighbouring
    heads, and the keys and values of a head have different scales, so that a wrong scale is noticed.
    """
    shape = model.shape
    exponents = tuple(
        (
            tuple(-((layer + head) % 4) for head in range(shape.num_kv_heads)),
            tuple(-((layer + head + 2) % 4) for head in range(shape.num_kv_heads)),
        )
        for layer in range(shape.num_layers)
    )
    return replace(model, shape=replace(shape, kv_dtype=FP8.name, kv_exponents=exponents))


def executor_of(
    model: LoadedModel,
    device: torch.device,
    device_pages: int,
    host_pages: int,
    turns_max: int,
    *,
    graphs: bool = True,
    filled: bool = False,
) -> TorchExecutor:
    """Return an executor; with `filled`, its device pages hold random numbers, like a computed history."""
    if isinstance(model.flat.whole, FusedModel) and model.flat.whole.graphs is not None:
        model.flat.whole.graphs = None  # graphs of an earlier executor hold its memory
        torch.cuda.empty_cache()
    memory = KVMemory(model.shape, device_pages, host_pages, PAGE, device)
    if filled:
        draw = torch.Generator(device).manual_seed(0)
        for layer in memory.device_arena:  # the same numbers in every format
            layer.copy_(torch.randn(layer.shape, generator=draw, device=device))
    captured = None
    if device.type == "cuda" and graphs:
        captured = DecodeGraphs(model.flat, memory, turns_max)
        captured.capture()
        if captured.failure:
            raise PensieveError(f"no graphs: {captured.failure}")
        if failure := capture_pieces(model.flat, memory, TOKENS_MAX):
            raise PensieveError(f"no graphs of pieces: {failure}")
    tokenizer: Any = DummyTokenizer()
    sampler = Sampler(model.shape.vocab_size)
    return TorchExecutor(model, memory, sampler, tokenizer, graphs=captured)


TURNS_MEAN, INPUT_MEAN, OUTPUT_MEAN = 5.56, 37.8, 204.6


@dataclass
class ScriptedConversation:
    """A conversation: the messages that its user will send, and its tokens so far."""

    name: str
    messages: list[array[int]]
    outputs: list[int]  # tokens of each reply
    reactions: list[float]
    tokens: array[int] = field(default_factory=lambda: array("I"))
    replied: list[int] = field(default_factory=list)  # positions of reply tokens
    turn: int = 0


def drawn_conversations(
    rate: float, seconds: float, reaction: float, vocab_size: int, seed: int
) -> list[tuple[float, ScriptedConversation]]:
    """Draw (arrival, conversation) pairs with the mean lengths of ShareGPT."""
    draw = random.Random(seed)
    found: list[tuple[float, ScriptedConversation]] = []
    now = 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        count = 1 + min(int(draw.expovariate(1 / (TURNS_MEAN - 0.5))), 40)
        inputs = [1 + min(int(draw.expovariate(1 / INPUT_MEAN)), 1024) for _ in range(count)]
        outputs = [1 + min(int(draw.expovariate(1 / OUTPUT_MEAN)), 1024) for _ in range(count)]
        reactions = [draw.expovariate(1 / reaction) for _ in range(count)]
        messages = [array("I", draw.choices(range(3, vocab_size), k=each)) for each in inputs]
        found.append(
            (now, ScriptedConversation(f"{seed}-{len(found)}", messages, outputs, reactions))
        )
    return found


@dataclass(frozen=True)
class EngineKind:
    name: str
    host: bool = True
    policy: str = "value"
    stateless: bool = False


ENGINES = (
    EngineKind("stateless", stateless=True),
    EngineKind("device only", host=False),
    EngineKind("two tiers"),
    EngineKind("two, LRU", policy="lru"),
)


class ConversationDriver:
    """Send each message at its time, and record the times of the replies."""

    def __init__(self, stateless: bool, began: float) -> None:
        self.mailbox = Mailbox()
        self._stateless = stateless
        self._began = began
        self._due: list[tuple[float, int, ScriptedConversation]] = []
        # ScriptedConversation, submission time, output tokens.
        self._running: dict[int, tuple[ScriptedConversation, float, int]] = {}
        self._num_turns = 0
        self.latencies: list[float] = []  # normalized, of completed turns
        self.output_tokens = 0
        self.failures = 0
        self.num_cut = 0  # turns that were cancelled at the end
        self.num_shared = 0  # tokens whose KV was computed for another conversation

    def cut(self) -> None:
        """Cancel all running turns."""
        self.num_cut = len(self._running)
        for number, (talk, _, _) in self._running.items():
            self.mailbox.put(CancelTurn(number, len(talk.tokens)))

    def add(self, at: float, talk: ScriptedConversation) -> None:
        self._num_turns += 1
        heapq.heappush(self._due, (self._began + at, self._num_turns, talk))

    @property
    def next_at(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def send_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number, talk = heapq.heappop(self._due)
            history = len(talk.tokens)
            talk.tokens.extend(talk.messages[talk.turn])
            output = talk.outputs[talk.turn]
            if len(talk.tokens) + output >= CONTEXT_MAX:
                continue
            self._running[number] = (talk, now, output)
            options = TurnOptions(Sampling(ignore_eos=True, max_tokens=output))
            root = "" if self._stateless else "bench"
            message = SubmitTurn(
                number, talk.name, talk.tokens.tobytes(), history, options, root=root
            )
            self.mailbox.put(message)

    def publish(self, events: Sequence[EngineEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, SampledToken):
                talk = self._running[event.attempt_id][0]
                talk.replied.append(len(talk.tokens))
                talk.tokens.append(event.token_id)
                self.output_tokens += 1
            elif isinstance(event, TurnEnded):
                talk, since, output = self._running.pop(event.attempt_id)
                self.num_shared += event.usage.shared_tokens
                if self.num_cut:
                    continue
                if event.failure is not None:
                    self.failures += 1
                    continue
                self.latencies.append((now - since) / output)
                if self._stateless:
                    self.mailbox.put(EvictConversation(talk.name))
                talk.turn += 1
                if talk.turn < len(talk.messages):
                    self.add(now - self._began + talk.reactions[talk.turn], talk)


@dataclass(frozen=True)
class EngineShape:
    device_pages: int
    host_pages: int
    token_budget: int
    turns_max: int


def engine_of(
    model: LoadedModel,
    executor: TorchExecutor,
    kind: EngineKind,
    shape: EngineShape,
    driver: ConversationDriver,
) -> Engine:
    """Return an engine with an empty cache and scheduler around an existing executor."""
    layers = model.shape
    cost = CostProfile.analytic(
        layers.num_parameters, layers.num_layers, layers.num_heads, layers.head_size, PAGE
    )
    configs = EngineConfigs.fitted(
        CacheConfig(shape.device_pages, shape.host_pages if kind.host else 0, PAGE),
        SchedulerConfig(shape.token_budget, shape.turns_max),
        layers.context_max,
    )
    ports = Ports(SystemClock(), driver.mailbox, driver)
    return Engine(configs, policy_named(kind.policy, cost, PAGE), executor, ports)


def serve(
    model: LoadedModel,
    executor: TorchExecutor,
    kind: EngineKind,
    shape: EngineShape,
    arrivals: list[tuple[float, ScriptedConversation]],
    seconds: float,
    grace: float = math.inf,
) -> tuple[ConversationDriver, float]:
    """Play conversations for `seconds`; return the driver and the seconds that this took, without the grace.

    Running turns then get `grace` seconds to end. Turns that still run after that are cancelled (`num_cut`).
    """
    began = time.perf_counter()
    driver = ConversationDriver(kind.stateless, began)
    engine = engine_of(model, executor, kind, shape, driver)
    for at, talk in arrivals:
        driver.add(at, talk)
    while (now := time.perf_counter()) < began + seconds:
        driver.send_due(now)
        if not engine.step():
            time.sleep(max(0.0, min(driver.next_at - time.perf_counter(), 0.005)))
    lasted = time.perf_counter() - began
    tokens = driver.output_tokens
    ends = time.perf_counter() + grace
    while engine.step():
        if time.perf_counter() > ends:
            driver.cut()
            ends = math.inf
    driver.output_tokens = tokens
    return driver, lasted
