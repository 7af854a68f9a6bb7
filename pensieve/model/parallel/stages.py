"""A stage of a pipeline: a rank that has some of the layers, all of each or its part, and their KV.

    rank 1          rank 2                rank 0: the engine's process
    embeddings
    layers 0 … k-1 ──activations──> layers k … l-1 ──activations──> layers l … n-1
                                                                    output product, sampling

Every stage carries out the same iterations in the same order, each over its own layers: so what one sends is
what the next expects, and nothing of it needs a name.  A sender does not wait for the receiver, which may be
busy with the iteration before; rank 0 expects an iteration's activations as soon as it is launched, so they
arrive while it computes another.

A stage may have several shards (ranks.py), each of them a rank.  What goes from stage to stage is what
enters a layer, which is the same on all shards of a stage, bit for bit; so each sends it to the one with
its number in the next stage, and nobody waits for another one.  The ids of tokens come with the iteration.

Until the links are there (`connect`) a stage computes on its own, with made-up activations: so each one is
probed and its layers are replaced without the others (loader.py).  For KV in fp8 they are connected at the
end of the probe, since the scales of a layer's keys and values are chosen by what really reaches it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pensieve.model.attention import FlatModel
from pensieve.model.layer_range import BlankTable, LayerElsewhere, NoProduct, StagePart
from pensieve.model.parallel.ranks import Rank, limit_group


class _ActivationTransfer(NamedTuple):
    activations: torch.Tensor  # (1, tokens, hidden)
    work: dist.Work


class StageLinks:
    """From the stage before, and to the next one."""

    def __init__(self, rank: Rank, like: torch.Tensor) -> None:
        """What is exchanged has the last size, the type and the device of `like`."""
        self._like = like
        self._before, self._after, self._sent_max = rank.before, rank.after, rank.num_stages
        self._expected: deque[_ActivationTransfer] = deque()
        self._sent: deque[_ActivationTransfer] = deque()

    def expect(self, num_tokens: int) -> None:
        """The next activations to come are of so many tokens."""
        there = self._like.new_empty((1, num_tokens, self._like.shape[-1]))
        work = dist.irecv(there, self._before)
        assert work is not None
        self._expected.append(_ActivationTransfer(there, work))

    def receive(self, num_tokens: int) -> torch.Tensor:
        if not self._expected:
            self.expect(num_tokens)
        there, work = self._expected.popleft()
        assert there.shape[1] == num_tokens, "the stages carry out different iterations"
        work.wait()
        return there

    def send(self, activations: torch.Tensor) -> None:
        """Kept until they are sent: what the stages have in flight besides has been received."""
        kept = activations.contiguous()
        work = dist.isend(kept, self._after)
        assert work is not None
        self._sent.append(_ActivationTransfer(kept, work))
        if len(self._sent) > self._sent_max:
            self._sent.popleft().work.wait()


class StageModel(FlatModel):
    """One stage's part of a model; its logits mean something in the last stage only."""

    def __init__(self, module: Any, part: StagePart, rank: Rank) -> None:
        super().__init__(module)
        self.alone = False
        self.num_layers, self.first_layer = len(part.layers), part.layers.first
        if rank.num_shards > 1:
            limit_group(module)
        self._rank = rank
        self._links: StageLinks | None = None
        self._like: torch.Tensor | None = None
        self._takes = part.entry is not None
        if part.entry is not None:
            part.entry.exchange = self._received
        if part.exit is not None:
            part.exit.exchange = self._sent

    def connect(self) -> None:
        """From now on activations come from the stage before and go to the next; the probe is over."""
        assert self._like is not None, "it has not computed anything yet"
        if self._links is None:
            self._links = StageLinks(self._rank, self._like)

    def expect(self, num_tokens: int) -> None:
        """An iteration of so many tokens has been launched, and is computed here later."""
        if self._links is not None and self._takes:
            self._links.expect(num_tokens)

    def _received(self, given: torch.Tensor) -> torch.Tensor:
        if self._links is None:
            self._like = given[:, :0]
            return given
        return self._links.receive(given.shape[1])

    def _sent(self, given: torch.Tensor) -> torch.Tensor:
        if self._links is None:
            self._like = given[:, :0]
        else:
            self._links.send(given)
        return given


def shards_of(rank: Rank) -> Any:
    """`prepare_distribute_model` of a stage's class.

    `transformers` divides a model among the ranks of a mesh, and makes the mesh of all processes that there
    are. With stages the mesh has a row of shards for each stage, as the ranks are numbered (ranks.py), and a
    stage is divided along its row alone.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    def prepared(_cls: Any, _config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
        assert device_map is None
        rows = DistributedConfig(pp_size=rank.num_stages, tp_size=rank.num_shards)
        device, mesh = initialize_distributed_mesh(rows)
        return DistributedConfig(tp_size=rank.num_shards), device, mesh

    return classmethod(prepared)


def without_elsewhere(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """`_expand_parallel_plan` of a stage's class: a rule for each module and parameter that is here.

    Where a stage has something blank in the place of what another stage has (layer_range.py), the library's
    plan would still add or gather results, in collectives about nothing.
    """
    elsewhere = tuple(
        name
        for name, each in module.named_modules()
        if isinstance(each, BlankTable | LayerElsewhere | NoProduct)
    )
    library: Any = type(module).__mro__[1]
    expanded = library._expand_parallel_plan(module, plan)
    return {
        name: style
        for name, style in expanded.items()
        if not any(name == each or name.startswith(f"{each}.") for each in elsewhere)
    }
