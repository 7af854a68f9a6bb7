"""From settings to a running engine: resolve → load → tiers → engine, each stage reported.

The one place that joins rooms which must not know each other (the model and the engine, say).
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from pensieve.config import Settings, TierSize, available_memory_bytes
from pensieve.core.sampling import Sampling
from pensieve.errors import (
    ConfigError,
    DeviceError,
    ModelError,
    PensieveError,
    UnsupportedModel,
)
from pensieve.launch import programs

if TYPE_CHECKING:
    import torch

    from pensieve.core.cost import CostProfile
    from pensieve.engine.engine import Engine
    from pensieve.engine.mailbox import Mailbox, Outbox
    from pensieve.engine.ports import Sink
    from pensieve.model.loader import LoadedModel
    from pensieve.model.parallel.leader import Leader
    from pensieve.model.shape import ModelShape
    from pensieve.service.conversations import Conversations
    from pensieve.store.conversation_store import ConversationStore
    from pensieve.text import ChatTemplate

TOKENS_MAX = 500_000  # of a tier whose size is a share of memory: small models need no more
GPU_TIMES = 4  # as many where the models are larger
Report = Callable[[str], None]


class SystemClock:
    """Monotonic seconds."""

    def now(self) -> float:
        return time.monotonic()


def resolve_model(name: str) -> Path:
    """The folder of a model: a path, a hub id (fetched if the hub can be reached), or the built-in."""
    if not name:
        from pensieve.builtin import MODEL_PATH

        return MODEL_PATH
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is a file; a model is a folder with config.json and safetensors")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"there is no model folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no model folder {name}, and it cannot be fetched: {first_line}"
        ) from error


def generation_defaults(folder: Path) -> Sampling:
    """What the model's authors recommend in generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return Sampling()
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    kinds = {name: int if name == "top_k" else float for name in names}
    values = {name: kinds[name](given[name]) for name in names if given.get(name) is not None}
    if not given.get("do_sample", False):
        values["temperature"] = 0.0
    else:
        values.setdefault("temperature", 1.0)
    return Sampling(**values)  # type: ignore[arg-type]


def fingerprint_of(folder: Path, tokenizer_fingerprint: str) -> str:
    """Of model, tokenizer and template: what the token ids of a history belong to."""
    digest = hashlib.sha256(tokenizer_fingerprint.encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(folder.glob("*.safetensors")):
        with weights.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_size, 1 << 24)))
    return digest.hexdigest()[:32]


@dataclass
class LoadedTexts:
    template: ChatTemplate
    fingerprint: str
    defaults: Sampling


class Runtime:
    """An engine in a thread of this process, with the conversations in front of it.

    Without a thread (`threaded=False`) the owner calls `engine.step` itself.
    """

    def __init__(
        self,
        settings: Settings,
        store: ConversationStore,
        built: BuiltEngine,
        conversations: Conversations,
        mailbox: Mailbox,
        outbox: Outbox,
        threaded: bool,
    ) -> None:
        self.settings = settings
        self.store = store
        self.engine = built.engine
        self.conversations = conversations
        self.mailbox = mailbox
        self.outbox = outbox
        self.failure: BaseException | None = None
        self._built = built
        self._thread = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._built.adopt_thread()
            self.engine.run()
        except BaseException as error:
            self.failure = error
        finally:
            self.outbox.close()

    def close(self) -> None:
        """Finish what runs, keep the history, let go of everything."""
        self.mailbox.close()
        self.outbox.close()
        if self._thread is not None:
            self._thread.join()
        self._built.close()
        self.store.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start(settings: Settings, holder: str, report: Report, threaded: bool = True) -> Runtime:
    """Everything from the folder of the history to the running engine; cleans up if it fails."""
    from pensieve.store.conversation_store import ConversationStore

    store = ConversationStore.open(settings.data, holder)
    try:
        if store.integrity_check_due:
            report("checking the history after an unclean stop")
            problems = store.integrity_check()
            if problems:
                raise ConfigError(f"the history in {settings.data} is damaged: {problems[0]}")
        for turn in store.interrupted_at_open:
            report(f"a turn of {turn.conversation_id} was interrupted; its history is unchanged")
        return _start(settings, store, report, threaded)
    except BaseException:
        store.close()
        raise


def _start(settings: Settings, store: ConversationStore, report: Report, threaded: bool) -> Runtime:
    from pensieve.engine.mailbox import Mailbox, Outbox
    from pensieve.service.conversations import Conversations

    folder = resolve_model(settings.model)
    texts = load_texts(folder, report)
    mailbox, outbox = Mailbox(), Outbox()
    built = build_engine(settings, folder, texts, report, mailbox, outbox)
    conversations = Conversations(
        store,
        texts.template,
        mailbox,
        context_max=built.context_max,
        vocab_size=built.vocab_size,
        fingerprint=texts.fingerprint,
        defaults=texts.defaults,
        report=report,
    )
    return Runtime(settings, store, built, conversations, mailbox, outbox, threaded)


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass
class BuiltEngine:
    """An engine that is ready to run, and what has to be closed after it."""

    engine: Engine
    executor: Closable
    context_max: int
    vocab_size: int
    device_pages: int
    host_pages: int
    page_bytes: int
    journal: TextIO | None
    device: torch.device | None = None

    def adopt_thread(self) -> None:
        """A thread begins with the first GPU; the one that calls this gets ours."""
        if self.device is not None and self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)

    def close(self) -> None:
        self.executor.close()
        if self.journal is not None:
            self.journal.close()


def build_engine(
    settings: Settings,
    folder: Path,
    texts: LoadedTexts,
    report: Report,
    mailbox: Mailbox,
    sink: Sink,
) -> BuiltEngine:
    """Load the model and put cache, scheduler and executor around it."""
    with ExitStack() as undo:
        return _build_engine(settings, folder, texts, report, mailbox, sink, undo)


def _build_engine(
    settings: Settings,
    folder: Path,
    texts: LoadedTexts,
    report: Report,
    mailbox: Mailbox,
    sink: Sink,
    undo: ExitStack,
) -> BuiltEngine:
    """What `undo` holds is closed unless all goes well."""
    report("loading torch")
    import torch

    from pensieve.core.cache import CacheConfig, KVCache
    from pensieve.core.policies.queue import policy_named
    from pensieve.core.scheduler import Scheduler, SchedulerConfig
    from pensieve.engine.engine import Engine, EngineConfig
    from pensieve.engine.journal import Journal, opened
    from pensieve.model.executor import TorchExecutor
    from pensieve.model.free_memory import free_for_kv
    from pensieve.model.graphs import DecodeGraphs
    from pensieve.model.kv.memory import KVMemory
    from pensieve.model.parallel.executor import ParallelExecutor
    from pensieve.model.sampling.sampler import Sampler

    model, leader = _load_model(settings, folder, report, undo)
    num_ranks = settings.tensor_parallel
    shape, tokenizer = model.shape, texts.template.tokenizer
    if tokenizer.vocab_size > shape.vocab_size:
        raise ModelError(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, the model {shape.vocab_size}"
        )

    sampler = Sampler(shape.vocab_size, model.eos_token_ids | texts.template.end_of_turn_ids)
    device = model.flat.module.device
    device_bytes = None  # the host's
    if device.type == "cuda":
        report("measuring what is left of the GPU's memory")
        if leader is not None:
            leader.say_measure(settings.token_budget, settings.turns_max, settings.chunk_tokens)
        device_bytes = free_for_kv(
            model,
            settings.token_budget,
            settings.turns_max,
            settings.chunk_tokens,
            device,
            (sampler, tokenizer),
        )
        if leader is not None:
            device_bytes = num_ranks * min(device_bytes, *leader.hear_measured())
    page_bytes = num_ranks * shape.kv_bytes_per_page(settings.chunk_tokens)  # of all ranks
    device_pages, host_pages = _tier_pages(settings, page_bytes, device_bytes)
    memory = KVMemory(shape, device_pages, host_pages, settings.chunk_tokens, device, report)
    if leader is not None:
        leader.allocate(device_pages, host_pages, settings.chunk_tokens)
    device_size, host_size = (_size(pages * page_bytes) for pages in (device_pages, host_pages))
    report(
        f"KV pools: device {device_size} = {device_pages * settings.chunk_tokens:,} "
        f"tokens, host {host_size} = {host_pages * settings.chunk_tokens:,} tokens"
    )
    cost = _cost(settings, shape, model.num_heads)
    cache_config = CacheConfig(device_pages, host_pages, settings.chunk_tokens)
    scheduler_config = SchedulerConfig(settings.token_budget, settings.turns_max)
    context_max = min(shape.context_max, cache_config.device_tokens_max)
    engine_config = EngineConfig(context_max)
    graphs = None
    if device.type == "cuda" and leader is None:
        graphs = DecodeGraphs(model.flat, memory, settings.turns_max)
        with torch.inference_mode():
            graphs.capture()
        report(
            f"decoding runs without graphs: {graphs.failure}"
            if graphs.failure
            else f"captured graphs for up to {settings.turns_max} turns"
        )
    own = TorchExecutor(model, memory, sampler, tokenizer, graphs=graphs)
    undo.callback(own.close)
    executor: TorchExecutor | ParallelExecutor = own
    if leader is not None:
        executor = ParallelExecutor(own, leader, settings.chunk_tokens)
    journal_file = None
    observers = []
    if settings.journal is not None:
        try:
            journal_file = opened(settings.journal)
        except OSError as error:
            raise ConfigError(f"cannot write {settings.journal}: {error.strerror}") from error
        computed_by = {
            "name": folder.name,
            "device": str(device),
            "parameters": shape.num_parameters,
            "layers": shape.num_layers,
            "heads": model.num_heads,
            "head_size": shape.head_size,
            "weight_bytes": shape.weight_bytes,
            "kv_bytes_per_token": num_ranks * shape.kv_bytes_per_token,
        }
        observers.append(
            Journal(
                journal_file,
                engine_config,
                cache_config,
                scheduler_config,
                settings.policy,
                cost,
                computed_by,
            )
        )
    engine = Engine(
        engine_config,
        Scheduler(
            KVCache(cache_config, policy_named(settings.policy, cost, settings.chunk_tokens)),
            scheduler_config,
        ),
        executor,
        SystemClock(),
        mailbox,
        sink,
        observers,
    )
    gc.collect()
    gc.freeze()  # the modules' objects live as long as the process; no collection need walk them
    undo.pop_all()
    return BuiltEngine(
        engine,
        executor,
        context_max,
        shape.vocab_size,
        device_pages,
        host_pages,
        page_bytes,
        journal_file,
        device,
    )


def _load_model(
    settings: Settings, folder: Path, report: Report, undo: ExitStack
) -> tuple[LoadedModel, Leader | None]:
    """The model, or rank 0's part of it and the other ranks."""
    import torch

    from pensieve.model.loader import check_divisible, load
    from pensieve.model.parallel.leader import Leader
    from pensieve.model.parallel.ranks import check_machine

    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    num_ranks = settings.tensor_parallel
    device = chosen_device(settings)
    int8 = settings.weights == "int8"
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
            _check_kernels(settings, device, report)
        except (DeviceError, ConfigError) as error:
            if settings.device != "auto":
                raise
            report(f"computing on the CPU: {error}")
            device = torch.device("cpu")
    if num_ranks == 1:
        return load(folder, dtype=dtype, device=device, int8=int8, report=report), None
    if int8:
        raise ConfigError("--weights int8 is for one rank: --tensor-parallel 1")
    check_machine(device, num_ranks)
    check_divisible(folder, num_ranks)
    num_threads = max(torch.get_num_threads() // num_ranks, 1)
    torch.set_num_threads(num_threads)
    report(f"starting {num_ranks - 1} more rank{'s' if num_ranks > 2 else ''}")
    followed = {
        "folder": str(folder),
        "dtype": None if settings.dtype == "auto" else settings.dtype,
        "num_threads": num_threads,
    }
    leader = Leader(num_ranks, device, followed, programs.RANK)
    undo.callback(leader.close)
    try:
        model = load(folder, dtype=dtype, device=device, rank=leader, report=report)
    except (ModelError, RuntimeError) as error:  # perhaps only a broken collective
        leader.explain(error)
        raise
    leader.check_shapes(model.shape)
    return model, leader


def chosen_device(settings: Settings) -> torch.device:
    """Where to compute; ConfigError if that is not there."""
    import torch

    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (it was built without CUDA)"
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no GPU{built}")
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    if index and settings.tensor_parallel > 1:
        raise ConfigError("--tensor-parallel takes the first GPUs: --device cuda")
    return torch.device("cuda", index)


def _check_kernels(settings: Settings, device: torch.device, report: Report) -> None:
    """The kernels can be had for this GPU; compiling them takes a few seconds the first time."""
    from pensieve.kernels import PAGE_SLOTS, cuda_launch

    if settings.weights == "int8":
        raise ConfigError("--weights int8 is for CPUs: --device cpu")
    if settings.chunk_tokens != PAGE_SLOTS:
        raise ConfigError(f"--chunk-tokens is {PAGE_SLOTS} on a GPU: the kernels' pages are")
    report(f"kernels for {cuda_launch.architecture(device.index)}")
    cuda_launch.prepare(device.index)


def _cost(settings: Settings, shape: ModelShape, num_heads: int) -> CostProfile:
    """What recomputing a chunk costs: as found on this machine, or from the model's shape."""
    from pensieve.core.cost import CostProfile
    from pensieve.sim import cost_file

    if settings.cost is None:
        return CostProfile.analytic(
            shape.num_parameters,
            shape.num_layers,
            num_heads,
            shape.head_size,
            settings.chunk_tokens,
        )
    found = cost_file.load(settings.cost)
    if found.layers != shape.num_layers:
        raise ConfigError(
            f"{settings.cost} is of a model with {found.layers} layers, and this one has "
            f"{shape.num_layers}"
        )
    kv_bytes = settings.tensor_parallel * shape.kv_bytes_per_token
    if found.kv_bytes_per_token != kv_bytes:
        raise ConfigError(
            f"{settings.cost} is of a model with {found.kv_bytes_per_token:,} bytes of KV per token, and "
            f"this one has {kv_bytes:,}"
        )
    return replace(found.recompute(settings.chunk_tokens), measured=True)


def _tier_pages(settings: Settings, page_bytes: int, device_bytes: int | None) -> tuple[int, int]:
    """Pages of both tiers, held against the memory there is; the device's own, if it has some."""
    available = available_memory_bytes()
    share = TierSize(0.25, "share")
    host = share if settings.host_cache.unit == "auto" else settings.host_cache
    on_device = settings.device_cache
    if on_device.unit == "auto":
        on_device = share if device_bytes is None else TierSize(1.0, "share")
    device_pages, host_pages = (
        size.pages(page_bytes, settings.chunk_tokens, memory)
        for size, memory in (
            (on_device, available if device_bytes is None else device_bytes),
            (host, available),
        )
    )
    most = TOKENS_MAX * (1 if device_bytes is None else GPU_TIMES) // settings.chunk_tokens
    device_pages = min(device_pages, most) if on_device.unit == "share" else device_pages
    host_pages = min(host_pages, most) if host.unit == "share" else host_pages
    if device_pages < 4:
        raise ConfigError(
            f"--device-cache {settings.device_cache} holds {device_pages} chunks of "
            f"{settings.chunk_tokens} tokens ({page_bytes:,} bytes each); 4 are needed"
        )
    if device_bytes is not None:
        if device_pages * page_bytes > device_bytes:
            raise ConfigError(
                f"--device-cache {settings.device_cache} needs {_size(device_pages * page_bytes)}, and "
                f"{_size(device_bytes)} of the GPU are left beside weights and workspace"
            )
        if host_pages * page_bytes > available:
            raise ConfigError(
                f"--host-cache {settings.host_cache} needs {_size(host_pages * page_bytes)}, and "
                f"{_size(available)} are available"
            )
    elif (device_pages + host_pages) * page_bytes > available:
        raise ConfigError(
            f"the two tiers need {(device_pages + host_pages) * page_bytes / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB are available; lower --device-cache or --host-cache"
        )
    return device_pages, host_pages


def load_texts(folder: Path, report: Report) -> LoadedTexts:
    """Tokenizer and chat template, probed; needs no torch."""
    from pensieve.text import ChatTemplate, Tokenizer, probe

    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate(tokenizer)
    told = probe(template)
    if told.lost_controls:
        raise UnsupportedModel(
            "its chat template makes control tokens by formatting or a filter, where they cannot be "
            f"told from text (seen in {told.lost_controls[0]})"
        )
    for difference in told.differences:
        report(f"chat template: {difference}")
    try:
        fingerprint = fingerprint_of(folder, tokenizer.fingerprint())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    defaults = replace(generation_defaults(folder), max_tokens=1024)
    return LoadedTexts(template, fingerprint, defaults)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def one_line(error: BaseException) -> str:
    """What a person is told of an error that ends the command."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PensieveError) else f"{type(error).__name__}: {text}"
