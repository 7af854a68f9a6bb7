"""Find the daemon that has a job, if several daemons share the history.

A job stays with the daemon that received its file, its *home*. Calls about a job at another daemon raise
OwnedElsewhere, and the servers forward them to the home (api/grpc/forwarding.py). While the home is down,
the call fails with Unavailable, which names the home.

A list has the jobs of every daemon that answers within LIST_SECONDS. The daemons request LIST_PATH from each
other over ForwardHttp, on behalf of the caller. A list of files also needs the sizes of results, which are
requested from SIZES_PATH. If a daemon does not answer a request for sizes within LIST_SECONDS, the list
fails.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pensieve.api.grpc.http_forwarding import fetch_path
from pensieve.api.grpc.peers import Peers
from pensieve.conversations.daemon import Daemon
from pensieve.errors import NotFound, OwnedElsewhere, PensieveError, Unavailable, whole_line
from pensieve.jobs.job_records import JobKey, JobOutcome, JobState, ResultBytes
from pensieve.jobs.values import DaemonJobs, JobView
from pensieve.store.job_owners import JobOwner

log = logging.getLogger("pensieve")
LIST_PATH = "/pensieve/jobs"
SIZES_PATH = "/pensieve/jobs/sizes"  # sizes of results; the query has the ids of the jobs
ALL_TENANTS = "all_tenants"  # query for an operator's list
LIST_SECONDS = 5.0
SIZES_AT_ONCE = 1000  # ids per query, whose length is limited (api/grpc/sizes.py)
CallMetadata = Iterable[tuple[str, str | bytes]]  # metadata of a client's call, including its token


class JobHomes:
    """Publishes which jobs are here, and finds the homes of other jobs.

    A Forwarder uses this class as the `OwnerLookup` of jobs. A job never moves to another daemon.
    """

    def __init__(self, daemon: Daemon) -> None:
        """`daemon` shares its history with others."""
        self._threads, self._reader, self._store = daemon.threads, daemon.reader, daemon.store

    async def add(self, key: JobKey, now: float) -> None:
        """Record a job before it is stored here. Raises AlreadyExists if another daemon has the id."""
        await self._threads.in_store(key.tenant, self._store.job_owners.take, *key, now)

    async def remove(self, key: JobKey) -> None:
        """Remove the record of a deleted job. If this fails, the next `keep` removes it."""
        try:
            await self._threads.in_store(key.tenant, self._store.job_owners.release, *key)
        except PensieveError as error:
            log.warning(
                "cannot remove the record of a deleted job, will retry: %s", whole_line(error)
            )

    async def keep(
        self, keys: Collection[JobKey], since: float, forget_before: float | None
    ) -> None:
        """Make the records match the jobs that are here, except records added after `since`.

        Records of a home that was last active before `forget_before` are removed.
        """
        keep = self._store.job_owners.keep
        await self._threads.in_store("", keep, keys, since, forget_before)

    async def raise_if_elsewhere(self, key: JobKey) -> None:
        """Raise OwnedElsewhere if another daemon has the job, or Unavailable if that daemon is down."""
        owner = await self._find(key)
        if owner is None or owner.is_ours:
            return
        if not owner.address:
            raise Unavailable(
                f"job {key.job_id!r} is in the data folder of {owner.replica}, which is down"
            )
        raise _owned_elsewhere(key.job_id, owner)

    async def others(self) -> dict[str, str]:
        """Return the names of the other daemons that share the history now, by address."""
        found = await self._threads.in_read_thread("", self._reader.sessions)
        names = {each.address: each.replica for each in found if each.is_alive and each.address}
        names.pop(self.address, None)
        return dict(sorted(names.items()))

    # -- OwnerLookup --

    @property
    def address(self) -> str:
        return self._store.owners.address

    @property
    def lease_seconds(self) -> float:
        return self._store.owners.lease_seconds

    async def claim(self, job_id: str, tenant: str) -> OwnedElsewhere | None:
        """Return the home if it is another reachable daemon. Raises NotFound if there is no such job."""
        owner = await self._find(JobKey(tenant, job_id))
        if owner is None:
            raise NotFound("there is no such job")
        return None if owner.is_ours or not owner.address else _owned_elsewhere(job_id, owner)

    take = claim

    async def _find(self, key: JobKey) -> JobOwner | None:
        return await self._threads.in_store(key.tenant, self._store.job_owners.find, *key)


def _owned_elsewhere(job_id: str, owner: JobOwner) -> OwnedElsewhere:
    return OwnedElsewhere(job_id, owner.replica, owner.address, "job")


class JobLists:
    """Lists of the jobs of all daemons that share the history."""

    def __init__(self, jobs: DaemonJobs, homes: JobHomes, peers: Peers) -> None:
        self._jobs, self._homes, self._peers = jobs, homes, peers

    async def all(self, tenant: str | None, metadata: CallMetadata) -> list[JobView]:
        """Return the jobs of a tenant, or of all tenants. Jobs of daemons that do not answer are left out.

        The field `number` of each returned job is its creation time in microseconds, so that jobs of
        different daemons can be put in order.
        """
        query = ALL_TENANTS if tenant is None else ""
        calls = [self._jobs_of(address, query, metadata) for address in await self._homes.others()]
        found = [*await self._jobs.list(tenant)]
        for views in await asyncio.gather(*calls):
            found += views
        return [replace(each, number=round(1e6 * each.created_at)) for each in found]

    async def _jobs_of(self, address: str, query: str, metadata: CallMetadata) -> list[JobView]:
        try:
            answer = json.loads(await self._fetch(address, LIST_PATH, query, metadata))
            return [_view(each, address) for each in answer["jobs"]]
        except (PensieveError, ValueError, TypeError, KeyError) as error:
            log.warning("cannot list the jobs of %s: %s", address, whole_line(error))
            return []

    async def sizes(
        self, views: Iterable[JobView], metadata: CallMetadata
    ) -> Mapping[tuple[str, str], ResultBytes]:
        """Return the sizes of the results of other daemons' jobs, by home and job_id.

        Deleted jobs are left out. Raises Unavailable if a home does not answer.
        """
        ids: dict[str, set[str]] = {}
        for view in views:
            ids.setdefault(view.home, set()).add(view.job_id)
        calls = [self._sizes_of(home, sorted(each), metadata) for home, each in ids.items()]
        found: dict[tuple[str, str], ResultBytes] = {}
        for sizes in await asyncio.gather(*calls):
            found |= sizes
        return found

    async def _sizes_of(
        self, home: str, ids: Sequence[str], metadata: CallMetadata
    ) -> Mapping[tuple[str, str], ResultBytes]:
        found: dict[tuple[str, str], ResultBytes] = {}
        try:
            async with asyncio.timeout(LIST_SECONDS):
                for first in range(0, len(ids), SIZES_AT_ONCE):
                    query = ",".join(ids[first : first + SIZES_AT_ONCE])
                    answer = json.loads(await self._fetch(home, SIZES_PATH, query, metadata))
                    for job_id, sizes in answer["sizes"].items():
                        found[home, job_id] = ResultBytes(*sizes)
        except (PensieveError, TimeoutError, ValueError, TypeError, KeyError) as error:
            name = (await self._homes.others()).get(home, "a daemon")
            problem = whole_line(error) or f"no answer within {LIST_SECONDS:g} s"
            raise Unavailable(
                f"{name} at {home} does not report the sizes of its files: {problem}"
            ) from error
        return found

    async def _fetch(self, address: str, path: str, query: str, metadata: CallMetadata) -> bytes:
        forwarded = self._peers.metadata(metadata)
        async with self._peers.channel(address) as channel:
            return await fetch_path(channel, forwarded, path, query, LIST_SECONDS)


def job_list_body(views: Iterable[JobView]) -> Mapping[str, Any]:
    """Return the answer to LIST_PATH."""
    return {"jobs": [asdict(each) for each in views]}


def _view(fields: dict[str, Any], home: str) -> JobView:
    outcome = fields["outcome"]
    converted: dict[str, Any] = {
        "state": JobState(fields["state"]),
        "outcome": None if outcome is None else JobOutcome(outcome),
        "home": home,
    }
    return JobView(**{**fields, **converted})
