"""Calls to several daemons at once, for their operator: `pensieve admin --replicas`.

    async with Fleet(FixedReplicas(replicas_of("a=10.0.0.1:50051,b=10.0.0.2:50051")), token=token) as fleet:
        for answer in await fleet.stats():
            print(answer.replica.name, answer.value or answer.reason)

    replicas.py      `Replica`: name and address of a daemon
    discovery.py     list the replicas, from an argument or from a daemon
    asking.py        call all replicas at once; a replica that does not answer yields an error
    fleet.py         `Fleet`: the calls of AdminService, to all replicas
    totals.py        combine figures: sums, maxima, and quantiles over all samples
    holdings.py      find the replicas that hold KV of a conversation, and the replica that owns it
    exposition.py    merge the metrics of all replicas into one text with a `replica` label

This package is part of the SDK, so that a monitoring machine can install the client alone.
"""

from pensieve.client.fleet.asking import ReplicaAnswer
from pensieve.client.fleet.discovery import Discovery, FixedReplicas, SharedReplicas
from pensieve.client.fleet.fleet import Fleet
from pensieve.client.fleet.replicas import Replica, replicas_of

__all__ = [
    "Discovery",
    "FixedReplicas",
    "Fleet",
    "Replica",
    "ReplicaAnswer",
    "SharedReplicas",
    "replicas_of",
]
