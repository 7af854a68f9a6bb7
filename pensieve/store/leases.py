"""Renew the lease of this daemon's session, in a separate thread and connection.

The lease stays valid while the process runs, even if the store's threads are blocked. If the lease expires,
other daemons may claim this daemon's conversations (owners.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from pensieve.errors import PensieveError, one_line
from pensieve.store.backend import Conflict, LeaseTransactions
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.owners import Owners, next_number
from pensieve.store.transactions import CALLS_MAX

log = logging.getLogger("pensieve")
RENEWALS_PER_LEASE = 5
TIDY_SECONDS = 60.0


class Leases:
    def __init__(
        self,
        transactions: LeaseTransactions,
        owners: Owners,
        housekeeper: Housekeeper,
        tidy: Callable[[], None],
    ) -> None:
        """`tidy` is called regularly in this thread while this daemon is the housekeeper."""
        self._transactions, self._owners, self._housekeeper = transactions, owners, housekeeper
        self._tidy = tidy
        self._tidied_at = time.monotonic()
        self._failure_logged = False  # a renewal has failed, and this was logged
        # an attempt to end hanging transactions has failed, and this was logged
        self._end_failure_logged = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Renew the lease once, in the caller's thread, and start the thread."""
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        for _ in range(CALLS_MAX - 1):
            # Try again if another daemon took the housekeeper's row at the same time.
            with contextlib.suppress(Conflict):
                self._renew()
                return
        self._renew()

    def _renew(self) -> None:
        began = time.monotonic()
        with self._transactions.writing() as conn:
            self._owners.renew(conn)
            self._housekeeper.claim_if_free(conn, self._owners.session, next_number)
        self._housekeeper.confirm_claim(began + self._owners.lease_seconds)

    def close(self) -> None:
        """Stop the thread and close the connection. A second call does nothing."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(PensieveError):
            self._transactions.close()

    def _run(self) -> None:
        while not self._ending.wait(self._owners.lease_seconds / RENEWALS_PER_LEASE):
            try:
                self._renew_and_tidy()
            except Exception:  # without this thread, other daemons would claim our conversations
                if not self._failure_logged:
                    log.exception("unexpected error in the lease thread, which continues")
                self._failure_logged = True

    def _renew_and_tidy(self) -> None:
        try:
            self.renew()
        except PensieveError as error:
            if not self._failure_logged:
                log.warning("cannot renew this daemon's lease, will retry: %s", error)
            self._failure_logged = True
        else:
            if self._failure_logged:
                log.warning("this daemon's lease is renewed again")
            self._failure_logged = False
        self._end_hanging_transactions()
        if self._failure_logged:
            return
        if self._housekeeper.is_ours and time.monotonic() >= self._tidied_at + TIDY_SECONDS:
            self._tidied_at = time.monotonic()
            self._tidy()

    def _end_hanging_transactions(self) -> None:
        """End hanging transactions of other daemons. They may hold locks that the next renewal needs."""
        try:
            self._transactions.end_hanging_transactions()
        except Exception as error:  # after any error, the next renewal must still happen
            if not self._failure_logged and not self._end_failure_logged:
                log.warning("cannot end hanging transactions of other daemons: %s", one_line(error))
                self._end_failure_logged = True
        else:
            self._end_failure_logged = False
