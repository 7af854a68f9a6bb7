"""Several daemons looked at as one, for their operator: what `pensieve admin` does with `--replicas`.

    async with Fleet(FixedReplicas(replicas_of("a=10.0.0.1:50051,b=10.0.0.2:50051")), token=token) as fleet:
        for answer in await fleet.stats():
            print(answer.replica.name, answer.value or answer.reason)

replicas.py     `Replica`: name and address of one
discovery.py    which there are: from a list, or from a daemon
asking.py       one call to each of them at once; who does not answer is an answer that says so
fleet.py        `Fleet`: the calls of AdminService, to all
totals.py       figures of all put together: sums, worst ones, and quantiles of all times
holdings.py     which replicas hold KV of a conversation, and whose it is
exposition.py   metrics of all as one text, each sample with its replica

It lies in the SDK because it needs what the SDK needs, a channel and the stubs, and nothing of a server: a
machine that only watches installs the client alone, and whoever deploys replicas may import it.
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
