"""What the SDK returns of batch jobs, made from messages of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pensieve.client.shown import shown
from pensieve.v1 import jobs_pb2 as pb

JOB_STATES: dict[int, str] = {
    pb.JOB_STATE_RECEIVING: "receiving",
    pb.JOB_STATE_CHECKING: "checking",
    pb.JOB_STATE_WAITING: "waiting",
    pb.JOB_STATE_RUNNING: "running",
    pb.JOB_STATE_PAUSED: "paused",
    pb.JOB_STATE_ENDED: "ended",
}
JOB_OUTCOMES: dict[int, str] = {
    pb.JOB_OUTCOME_UNSPECIFIED: "",
    pb.JOB_OUTCOME_COMPLETED: "completed",
    pb.JOB_OUTCOME_CANCELLED: "cancelled",
    pb.JOB_OUTCOME_FAILED: "failed",
    pb.JOB_OUTCOME_CHECKED: "checked",
}
RESULT_KINDS: dict[str, pb.ResultKind.ValueType] = {
    "all": pb.RESULT_KIND_UNSPECIFIED,
    "answers": pb.RESULT_KIND_ANSWERS,
    "errors": pb.RESULT_KIND_ERRORS,
}


@dataclass(frozen=True, slots=True)
class Job:
    """A batch job at one moment.

    Attributes:
        job_id: its name.
        tenant: whose it is.
        name: as it was given to `create`.
        sha256: of the file, in hexadecimal digits.
        num_bytes: the length of the file.
        endpoint: as it was given to `create`.
        check_only: as it was given to `create`.
        state: "receiving", "checking", "waiting" (for its turn among the jobs), "running", "paused" or
            "ended"; "unknown" if a newer server says so, as the next one.
        outcome: once it has ended: "completed", "cancelled", "failed" or "checked"; empty before.
        problem: why it has failed, in one line; empty as a rule.
        num_lines: that have a request.
        num_answered: of these, those that have an answer,
        num_refused: those with which something is wrong,
        num_running: and those that are being computed.
        prompt_tokens: of what was answered.
        saved_tokens: of these, those that were not computed, because another request of the job begins with
            them.
        output_tokens: of the answers.
        tokens_per_second: prompt and output tokens of the latest time; 0 while it does not run.
        seconds_left: until it has ended, as it goes now; None while nobody can say.
        created_at: when its file had begun to come, in UTC.
        started_at: when it ran first; None before.
        ended_at: when it ended; None before.
    """

    job_id: str
    tenant: str
    name: str
    sha256: str
    num_bytes: int
    endpoint: str
    check_only: bool
    state: str
    outcome: str
    problem: str
    num_lines: int
    num_answered: int
    num_refused: int
    num_running: int
    prompt_tokens: int
    saved_tokens: int
    output_tokens: int
    tokens_per_second: float
    seconds_left: float | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    __repr__ = shown


def job_of(given: pb.Job) -> Job:
    """From a job of the wire."""
    return Job(
        given.job_id,
        given.tenant,
        given.name,
        given.sha256,
        given.num_bytes,
        given.endpoint,
        given.check_only,
        JOB_STATES.get(given.state, "unknown"),
        JOB_OUTCOMES.get(given.outcome, "unknown"),
        given.problem,
        given.num_lines,
        given.num_answered,
        given.num_refused,
        given.num_running,
        given.prompt_tokens,
        given.saved_tokens,
        given.output_tokens,
        given.tokens_per_second,
        given.seconds_left if given.HasField("seconds_left") else None,
        given.create_time.ToDatetime(UTC),
        given.start_time.ToDatetime(UTC) if given.HasField("start_time") else None,
        given.end_time.ToDatetime(UTC) if given.HasField("end_time") else None,
    )
