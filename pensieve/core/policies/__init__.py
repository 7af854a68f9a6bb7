"""Eviction policies, which give cached chunks a value, and the parts of the policies.

    lru.py, value.py, return_policy.py   the policies; registry.py lists them by name
    protocol.py                          what a policy must implement
    queue.py                             not a policy: orders chunks by value, for all policies
    return_model.py, shadow_cache.py     not policies: parts of the policy `return`

core/eviction.py is the mechanism: it decides when a chunk must go.
"""
