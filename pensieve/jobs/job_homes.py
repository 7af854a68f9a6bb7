"""Which daemon has a job, where several daemons share the history.

A job stays with the daemon that received its file, its *home*. A call about a job that is not here is refused
with OwnedElsewhere, and the doors forward it to the home (api/grpc/forwarding.py). While the home is away, no
daemon can answer: the call fails with Unavailable, which names the home.

A list has the jobs of every daemon that answers within LIST_SECONDS. The daemons ask each other for LIST_PATH
over ForwardHttp, in the name of the caller. The sizes of the results in a list of files have another
path, SIZES_PATH. A daemon that does not tell them within LIST_SECONDS makes the list fail.

All of it runs on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pensieve.api.grpc.http_forwarding import fetched
from pensieve.api.grpc.peers import Peers
from pensieve.conversations.daemon import Daemon
from pensieve.errors import NotFound, OwnedElsewhere, PensieveError, Unavailable, whole_line
from pensieve.jobs.job_records import JobKey, JobOutcome, JobState, ResultBytes
from pensieve.jobs.values import DaemonJobs, JobView
from pensieve.store.job_owners import JobOwner

log = logging.getLogger("pensieve")
LIST_PATH = "/pensieve/jobs"
SIZES_PATH = "/pensieve/jobs/sizes"  # of results; the query has the ids of the jobs
ALL_TENANTS = "all_tenants"  # the query of an operator
LIST_SECONDS = 5.0
SIZES_AT_ONCE = 1000  # ids in a query, which has a limit (api/grpc/sizes.py)
Given = Iterable[tuple[str, str | bytes]]  # metadata of a client's call, with its token


class JobHomes:
    """Tells the other daemons which jobs are here, and finds the homes of theirs.

    For a Forwarder it is the `OwnerLookup` of jobs: a job never moves.
    """

    def __init__(self, daemon: Daemon) -> None:
        """`daemon` shares its history."""
        self._threads, self._reader, self._store = daemon.threads, daemon.reader, daemon.store

    async def add(self, key: JobKey, now: float) -> None:
        """Before a job is stored here; AlreadyExists if another daemon has a job of this id."""
        await self._threads.in_store(key.tenant, self._store.job_owners.take, *key, now)

    async def remove(self, key: JobKey) -> None:
        """After a job is gone. If that cannot be written, the next `keep` does it."""
        try:
            await self._threads.in_store(key.tenant, self._store.job_owners.release, *key)
        except PensieveError as error:
            log.warning("it could not be written that a job is gone: %s", whole_line(error))

    async def keep(
        self, keys: Collection[JobKey], since: float, forget_before: float | None
    ) -> None:
        """These are the jobs that are here; others were added after `since`.

        Jobs of a home that was last there before `forget_before` are forgotten.
        """
        keep = self._store.job_owners.keep
        await self._threads.in_store("", keep, keys, since, forget_before)

    async def refuse(self, key: JobKey) -> None:
        """Raise OwnedElsewhere if another daemon has the job, or Unavailable if that daemon is away."""
        owner = await self._find(key)
        if owner is None or owner.is_ours:
            return
        if not owner.address:
            raise Unavailable(
                f"job {key.job_id!r} is in the data folder of {owner.replica}, which is away"
            )
        raise _elsewhere(key.job_id, owner)

    async def others(self) -> dict[str, str]:
        """The names of the other daemons that share the history now, by address."""
        found = await self._threads.in_reader("", self._reader.sessions)
        names = {each.address: each.replica for each in found if each.is_alive and each.address}
        names.pop(self.address, None)
        return dict(sorted(names.items()))

    # -- claims --

    @property
    def address(self) -> str:
        return self._store.owners.address

    @property
    def lease_seconds(self) -> float:
        return self._store.owners.lease_seconds

    async def claim(self, job_id: str, tenant: str) -> OwnedElsewhere | None:
        """Return the home if it is another daemon that is there; NotFound if there is no such job."""
        owner = await self._find(JobKey(tenant, job_id))
        if owner is None:
            raise NotFound("there is no such job")
        return None if owner.is_ours or not owner.address else _elsewhere(job_id, owner)

    take = claim

    async def _find(self, key: JobKey) -> JobOwner | None:
        return await self._threads.in_store(key.tenant, self._store.job_owners.find, *key)


def _elsewhere(job_id: str, owner: JobOwner) -> OwnedElsewhere:
    return OwnedElsewhere(job_id, owner.replica, owner.address, "job")


class JobLists:
    """The jobs of all daemons that share the history."""

    def __init__(self, jobs: DaemonJobs, homes: JobHomes, peers: Peers) -> None:
        self._jobs, self._homes, self._peers = jobs, homes, peers

    async def all(self, tenant: str | None, given: Given) -> list[JobView]:
        """Those of a tenant, or of all, without those of daemons that do not answer.

        Their numbers are comparable: they count microseconds.
        """
        query = ALL_TENANTS if tenant is None else ""
        asked = [self._of(address, query, given) for address in await self._homes.others()]
        found = [*await self._jobs.list(tenant)]
        for views in await asyncio.gather(*asked):
            found += views
        return [replace(each, number=round(1e6 * each.created_at)) for each in found]

    async def _of(self, address: str, query: str, given: Given) -> list[JobView]:
        try:
            answer = json.loads(await self._fetched(address, LIST_PATH, query, given))
            return [_view(each, address) for each in answer["jobs"]]
        except (PensieveError, ValueError, TypeError, KeyError) as error:
            log.warning("a list is without the jobs of %s: %s", address, whole_line(error))
            return []

    async def sizes(
        self, views: Iterable[JobView], given: Given
    ) -> Mapping[tuple[str, str], ResultBytes]:
        """The sizes of the results of other daemons' jobs, by home and job_id, without jobs that are gone.

        Unavailable if a home does not answer any more.
        """
        ids: dict[str, set[str]] = {}
        for view in views:
            ids.setdefault(view.home, set()).add(view.job_id)
        asked = [self._sizes_of(home, sorted(each), given) for home, each in ids.items()]
        found: dict[tuple[str, str], ResultBytes] = {}
        for sizes in await asyncio.gather(*asked):
            found |= sizes
        return found

    async def _sizes_of(
        self, home: str, ids: Sequence[str], given: Given
    ) -> Mapping[tuple[str, str], ResultBytes]:
        found: dict[tuple[str, str], ResultBytes] = {}
        try:
            async with asyncio.timeout(LIST_SECONDS):
                for first in range(0, len(ids), SIZES_AT_ONCE):
                    query = ",".join(ids[first : first + SIZES_AT_ONCE])
                    answer = json.loads(await self._fetched(home, SIZES_PATH, query, given))
                    for job_id, sizes in answer["sizes"].items():
                        found[home, job_id] = ResultBytes(*sizes)
        except (PensieveError, TimeoutError, ValueError, TypeError, KeyError) as error:
            name = (await self._homes.others()).get(home, "a daemon")
            why = whole_line(error) or f"no answer within {LIST_SECONDS:g} s"
            raise Unavailable(
                f"{name} at {home} does not say how long its files are: {why}"
            ) from error
        return found

    async def _fetched(self, address: str, path: str, query: str, given: Given) -> bytes:
        metadata = self._peers.metadata(given)
        async with self._peers.channel(address) as channel:
            return await fetched(channel, metadata, path, query, LIST_SECONDS)


def listed_here(views: Iterable[JobView]) -> Mapping[str, Any]:
    """What LIST_PATH answers."""
    return {"jobs": [asdict(each) for each in views]}


def _view(fields: dict[str, Any], home: str) -> JobView:
    outcome = fields["outcome"]
    known: dict[str, Any] = {
        "state": JobState(fields["state"]),
        "outcome": None if outcome is None else JobOutcome(outcome),
        "home": home,
    }
    return JobView(**{**fields, **known})
