"""What of the calls goes into the audit log (service/audit_log.py).

    admin    each call of an operator's method, when it has ended: who, which, about what, how it went; and
             each call about a job that names its tenant, which only an operator does
    delete   each deletion: who, which conversation or job, how it went
    token    the first use of a token over a connection, and again in each hour
    refused  a caller who is not known, or may not do this; of many in a short time a number
    reload   the token file or the certificate was read again, or could not be used
    start, stop   of the daemon

Somebody without a token must not fill the disk, so of refusals REFUSED_PER_SECOND are written, and each such
line says how many were left out before it.  A token is named by its `name` in the token file, or by the
beginning of its digest there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pensieve.service.audit_log import AuditLog
from pensieve.service.limits import Bucket

AGAIN_SECONDS = 3600.0
USES_MAX = 10_000  # of tokens over connections that are remembered; the oldest are forgotten
REFUSED_PER_SECOND = 1.0  # ten seconds' worth can be saved up
ADMIN_PREFIX = "/pensieve.v1.AdminService/"
JOB_PREFIX = "/pensieve.v1.JobService/"
DELETE_METHODS = (
    "/pensieve.v1.ConversationService/DeleteConversation",
    "/pensieve.v1.ConversationService/DeletePrefix",
    f"{JOB_PREFIX}DeleteJob",
)


def is_audited(method: str, request: Any) -> bool:
    """Whether a call is put down when it has ended; its request may never have come."""
    tenant: str = getattr(request, "tenant", "")
    if tenant and method.startswith(JOB_PREFIX):
        return True
    return method.startswith((ADMIN_PREFIX, *DELETE_METHODS))


class Audit:
    """Belongs to the loop; without a file it does nothing."""

    def __init__(self, file: AuditLog | None, now: Callable[[], float]) -> None:
        """`now` is the loop's clock."""
        self._file = file
        self._now = now
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._refusals = Bucket(REFUSED_PER_SECOND, now())
        self._num_left_out = 0

    def token_used(self, token: str, tenant: str, peer: str) -> None:
        if self._file is None or not token:
            return
        key, now = (token, peer), self._now()
        last = self._used.get(key)
        if last is not None and now - last < AGAIN_SECONDS:
            return
        self._used[key] = now
        self._used.move_to_end(key)
        if len(self._used) > USES_MAX:
            self._used.popitem(last=False)
        self._file.write("token", token=token, tenant=tenant, peer=peer)

    def refused(self, method: str, peer: str, reason: str, token: str) -> None:
        """`token`: of a caller who is known and may not do this."""
        if self._file is None:
            return
        if self._refusals.seconds_until(1.0, self._now()):
            self._num_left_out += 1
            return
        self._refusals.spend(1.0, self._now())
        num_left_out, self._num_left_out = self._num_left_out, 0
        self._file.write(
            "refused",
            method=_short(method),
            peer=peer,
            reason=reason,
            token=token,
            left_out=num_left_out or None,
        )

    def ended(
        self, method: str, request: Any, by: Any, peer: str, outcome: str, began: float
    ) -> None:
        """A call that is audited has ended; its request may never have come."""
        if self._file is None:
            return
        is_delete = method in DELETE_METHODS
        self._file.write(
            "delete" if is_delete else "admin",
            method="" if is_delete else _short(method),
            conversation_id=getattr(request, "conversation_id", ""),
            prefix_id=getattr(request, "prefix_id", ""),
            job_id=getattr(request, "job_id", ""),
            of_tenant=getattr(request, "tenant", ""),
            token=by.token,
            tenant=by.tenant,
            peer=peer,
            outcome=outcome,
            seconds=round(self._now() - began, 3),
        )

    def tokens_reloaded(self, num_tokens: int, problem: str) -> None:
        if self._file is not None:
            self._file.write("reload", what="tokens", tokens=num_tokens, outcome=problem or "OK")

    def certificate_reloaded(self, problem: str) -> None:
        """Any thread may call this."""
        if self._file is not None:
            self._file.write("reload", what="certificate", outcome=problem or "OK")

    def started(self, address: str) -> None:
        if self._file is not None:
            self._file.write("start", address=address)

    def stopped(self) -> None:
        if self._file is not None:
            self._file.write("stop")


def _short(method: str) -> str:
    return method.rpartition("/")[2]
