"""Run a stage of a pipeline: some of the layers, and their KV.

    rank 1          rank 2                rank 0: the engine's process
    embeddings
    layers 0 … k-1 ──activations──> layers k … l-1 ──activations──> layers l … n-1
                                                                    LM head, sampling

Every stage executes the same iterations in the same order, each over its own layers.  So activations arrive
in the expected order and need no identifiers.  A sender does not wait for the receiver, which may be busy
with the previous iteration.  Rank 0 starts to receive an iteration's activations when the iteration is
launched.  So they arrive while rank 0 computes another iteration.

A stage may have several shards (ranks.py), each of them a rank with a part of each layer.  Stages pass on the
input of a layer, which is bit for bit the same on all shards of a stage.  So each shard sends this input to
the shard with the same number in the next stage.  Token ids come with the iteration.

Before `connect` a stage computes alone, with made-up activations.  So each stage is probed, and its layers
replaced, without the others (loader.py).  For fp8 KV the stages are connected at the end of the probe,
because the scales must be chosen from real activations.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pensieve.model.attention import FlatModel
from pensieve.model.layer_range import BlankTable, NoLmHead, OtherStageLayer, StagePart
from pensieve.model.parallel.ranks import Rank, limit_group


class _ActivationTransfer(NamedTuple):
    activations: torch.Tensor  # (1, tokens, hidden)
    work: dist.Work


class StageLinks:
    """Receive activations from the previous stage, and send activations to the next stage."""

    def __init__(self, rank: Rank, like: torch.Tensor) -> None:
        """Exchange tensors with the last dimension, the dtype and the device of `like`."""
        self._like = like
        self._before, self._after, self._sent_max = rank.before, rank.after, rank.num_stages
        self._expected: deque[_ActivationTransfer] = deque()
        self._sent: deque[_ActivationTransfer] = deque()

    def expect(self, num_tokens: int) -> None:
        """Start receiving the next activations, of `num_tokens` tokens."""
        activations = self._like.new_empty((1, num_tokens, self._like.shape[-1]))
        work = dist.irecv(activations, self._before)
        assert work is not None
        self._expected.append(_ActivationTransfer(activations, work))

    def receive(self, num_tokens: int) -> torch.Tensor:
        if not self._expected:
            self.expect(num_tokens)
        activations, work = self._expected.popleft()
        assert activations.shape[1] == num_tokens, "the stages run different iterations"
        work.wait()
        return activations

    def send(self, activations: torch.Tensor) -> None:
        """Send activations and keep them alive until sent; wait for the oldest if too many are pending."""
        kept = activations.contiguous()
        work = dist.isend(kept, self._after)
        assert work is not None
        self._sent.append(_ActivationTransfer(kept, work))
        if len(self._sent) > self._sent_max:
            self._sent.popleft().work.wait()


class StageModel(FlatModel):
    """Run one stage of a model; only the last stage's logits are meaningful."""

    def __init__(self, module: Any, part: StagePart, rank: Rank) -> None:
        super().__init__(module)
        self.alone = False
        self.num_layers, self.first_layer = len(part.layers), part.layers.first
        if rank.num_shards > 1:
            limit_group(module)
        self._rank = rank
        self._links: StageLinks | None = None
        self._like: torch.Tensor | None = None
        self._has_previous_stage = part.entry is not None
        if part.entry is not None:
            part.entry.exchange = self._receive_or_pass
        if part.exit is not None:
            part.exit.exchange = self._send_and_pass

    def connect(self) -> None:
        """Exchange activations with other stages from now on; call it after the probe."""
        assert self._like is not None, "the stage has not computed anything yet"
        if self._links is None:
            self._links = StageLinks(self._rank, self._like)

    def expect(self, num_tokens: int) -> None:
        """Start receiving the activations of a launched iteration that is computed later."""
        if self._links is not None and self._has_previous_stage:
            self._links.expect(num_tokens)

    def _receive_or_pass(self, given: torch.Tensor) -> torch.Tensor:
        if self._links is None:
            self._like = given[:, :0]
            return given
        return self._links.receive(given.shape[1])

    def _send_and_pass(self, given: torch.Tensor) -> torch.Tensor:
        if self._links is None:
            self._like = given[:, :0]
        else:
            self._links.send(given)
        return given


def shards_of(rank: Rank) -> Any:
    """Return `prepare_distribute_model` for a stage's class.

    By itself, `transformers` makes a mesh of all processes and divides the model among them.  With stages,
    the mesh has one row for each stage, and the stage's shards in this row (ranks.py).  A stage is divided
    among the ranks of its row only.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    def prepared(_cls: Any, _config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
        assert device_map is None
        rows = DistributedConfig(pp_size=rank.num_stages, tp_size=rank.num_shards)
        device, mesh = initialize_distributed_mesh(rows)
        return DistributedConfig(tp_size=rank.num_shards), device, mesh

    return classmethod(prepared)


def expand_own_plan(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """Expand the parallel plan of a stage's class, only for modules and parameters that the stage has.

    Blank modules replace the parts of other stages (layer_range.py).  The library's own expansion would run
    useless collectives on the results of these blank modules.
    """
    blank_names = tuple(
        name
        for name, each in module.named_modules()
        if isinstance(each, BlankTable | OtherStageLayer | NoLmHead)
    )
    library: Any = type(module).__mro__[1]
    expanded = library._expand_parallel_plan(module, plan)
    return {
        name: style
        for name, style in expanded.items()
        if not any(name == each or name.startswith(f"{each}.") for each in blank_names)
    }
