"""Record which daemon has a batch job, if several daemons share the history.

The file of a job stays in the data folder of the daemon that received the job (jobs/job_store.py). So a row
contains the identity of that folder, which survives restarts. The daemon is reachable while a session of
this folder is open (owners.py).

The key of a row is a digest of tenant and job id. A row may outlive its job. The row's owner then answers
that the job does not exist, and removes the row in the next `keep`.

`keep` also refreshes `created_at` of this daemon's rows. So other daemons can tell when this daemon was last
active, and can remove the rows of a folder that is no longer used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pensieve.errors import AlreadyExists
from pensieve.store.conversation_rows import digest
from pensieve.store.owners import Owners, alive_condition
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

JOB_KEYS = "job"  # separates the keys of jobs from those of conversations


class JobOwner(NamedTuple):
    replica: str
    address: str  # gRPC address; empty while the daemon cannot be reached
    is_ours: bool


class JobOwners:
    """The methods run their own transactions. Call them in a store thread, outside of transactions."""

    def __init__(self, transactions: StoreTransactions, owners: Owners) -> None:
        self._transactions, self._owners = transactions, owners

    @repeated
    def take(self, tenant: str, job_id: str, now: float) -> None:
        """Record this daemon as the owner. Raises AlreadyExists if another daemon has a job with this id."""
        with self._transactions.writing() as conn:
            self._insert(conn, _key(tenant, job_id), now)
            owner = self._find(conn, _key(tenant, job_id))
            if owner is None or not owner.is_ours:
                raise AlreadyExists(f"job {job_id!r} already exists, at another daemon")

    @repeated
    def release(self, tenant: str, job_id: str) -> None:
        """Remove this daemon's row for a job, if there is one."""
        with self._transactions.writing() as conn:
            conn.execute(
                "DELETE FROM job_owners WHERE key = ? AND folder = ?",
                (_key(tenant, job_id), self._owners.folder),
            )

    @repeated
    def keep(
        self, jobs: Iterable[tuple[str, str]], since: float, forget_before: float | None = None
    ) -> None:
        """Make this daemon's rows match `jobs` (tenant and id). Keep rows that were written after `since`.

        `forget_before`: also remove the rows of folders that no daemon has had open since that time.
        """
        keys = {_key(*each) for each in jobs}
        with self._transactions.writing() as conn:
            rows = conn.execute(
                "SELECT key, created_at, replica FROM job_owners WHERE folder = ?",
                (self._owners.folder,),
            ).fetchall()
            for key, created_at, replica in rows:
                if bytes(key) in keys and replica == self._owners.replica:
                    keys.discard(bytes(key))
                elif bytes(key) in keys or created_at < since:
                    conn.execute("DELETE FROM job_owners WHERE key = ?", (key,))
            conn.execute(
                "UPDATE job_owners SET created_at = ? WHERE folder = ? AND created_at < ?",
                (since, self._owners.folder, since),
            )
            for key in sorted(keys):
                self._insert(conn, key, since)
            if forget_before is not None:
                conn.execute(
                    "DELETE FROM job_owners WHERE created_at < ? AND folder NOT IN"
                    f" (SELECT s.folder FROM sessions s WHERE {alive_condition(conn)})",
                    (forget_before,),
                )

    def find(self, tenant: str, job_id: str) -> JobOwner | None:
        with self._transactions.reading() as conn:
            return self._find(conn, _key(tenant, job_id))

    def _insert(self, conn: Connection, key: bytes, now: float) -> None:
        conn.execute(
            "INSERT INTO job_owners (key, folder, replica, created_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (key) DO NOTHING",
            (key, self._owners.folder, self._owners.replica, now),
        )

    def _find(self, conn: Connection, key: bytes) -> JobOwner | None:
        row = conn.execute(
            f"SELECT j.folder, j.replica, s.replica, s.address, {alive_condition(conn)} FROM job_owners j"
            " LEFT JOIN sessions s ON s.folder = j.folder WHERE j.key = ?",
            (key,),
        ).fetchone()
        if row is None:
            return None
        folder, replica, replica_now, address, alive = row
        is_reachable = replica_now is not None and alive
        return JobOwner(
            replica_now or replica,
            address if is_reachable else "",
            folder == self._owners.folder,
        )


def _key(tenant: str, job_id: str) -> bytes:
    return digest(tenant, JOB_KEYS, job_id)
