"""List the eviction policies by name, for `--policy` and the setting `policy`."""

from __future__ import annotations

from collections.abc import Callable

from pensieve.core.cost import CostProfile
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.policies.return_policy import ReturnPolicy
from pensieve.core.policies.value import ValuePolicy

# Factories by policy name. Arguments: the cost of recomputing a chunk, and the number of tokens in a chunk.
POLICIES: dict[str, Callable[[CostProfile, int], EvictionPolicy]] = {
    LruPolicy.name: lambda cost, chunk_tokens: LruPolicy(),
    ValuePolicy.name: ValuePolicy,
    ReturnPolicy.name: ReturnPolicy,
}
DEFAULT = ReturnPolicy.name  # of the setting `policy`; docs/performance.md says why


def policy_named(name: str, cost: CostProfile, chunk_tokens: int) -> EvictionPolicy:
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r} (known: {', '.join(POLICIES)})")
    return POLICIES[name](cost, chunk_tokens)
