"""The retention policies by name, as `--policy` and the settings know them."""

from __future__ import annotations

from collections.abc import Callable

from pensieve.core.cost import CostProfile
from pensieve.core.policies.learned import ReturnPolicy
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.policies.protocol import RetentionPolicy
from pensieve.core.policies.value import ValuePolicy

# Each is made from what recomputing a chunk costs, and how many tokens a chunk has.
_MAKERS: dict[str, Callable[[CostProfile, int], RetentionPolicy]] = {
    LruPolicy.name: lambda cost, chunk_tokens: LruPolicy(),
    ValuePolicy.name: ValuePolicy,
    ReturnPolicy.name: ReturnPolicy,
}
POLICIES = tuple(_MAKERS)


def policy_named(name: str, cost: CostProfile, chunk_tokens: int) -> RetentionPolicy:
    if name not in _MAKERS:
        raise ValueError(f"no retention policy is named {name!r} ({', '.join(POLICIES)})")
    return _MAKERS[name](cost, chunk_tokens)
