"""How `transformers` divides the layers of one stage among its shards.

It divides a model among the ranks of a mesh, and makes the mesh of all processes that there are.  With
stages the mesh has a row of shards for each stage, as the ranks are numbered (ranks.py), and a stage is
divided along its row alone: so the class that a stage is read with has these two methods in the place of
the library's.

Where a stage has something blank in the place of embeddings or the output product of another stage
(layer_range.py), the library's plan would still add or gather results there, in collectives about nothing.
Rules of what is elsewhere are left out.
"""

from __future__ import annotations

from typing import Any

from pensieve.model.layer_range import BlankTable, LayerElsewhere, NoProduct
from pensieve.model.parallel.ranks import Rank


def shards_of(rank: Rank) -> Any:
    """`prepare_distribute_model` of a stage's class."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    def prepared(_cls: Any, _config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
        assert device_map is None
        rows = DistributedConfig(pp_size=rank.num_stages, tp_size=rank.num_shards)
        device, mesh = initialize_distributed_mesh(rows)
        return DistributedConfig(tp_size=rank.num_shards), device, mesh

    return classmethod(prepared)


def without_elsewhere(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """`_expand_parallel_plan` of a stage's class: a rule for each module and parameter that is here."""
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
