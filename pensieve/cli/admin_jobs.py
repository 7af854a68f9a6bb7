"""`pensieve admin jobs` lists the batch jobs of a daemon, of all tenants, and steers them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pensieve.cli.admin_stats import seconds_text
from pensieve.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from pensieve.client import Job
    from pensieve.client.admin import Admin

ACTIONS = ("list", "pause", "resume", "cancel", "delete")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        default="list",
        metavar="ACTION",
        help="list (the default), pause, resume, cancel (what was answered stays) or delete (nothing stays)",
    )
    parser.add_argument(
        "jobs", nargs="*", metavar="ID", help="ids of the jobs; for list: only these"
    )
    parser.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="the tenant that owns them, where several have one with this ID; for list: only its own",
    )


def jobs(admin: Admin, arguments: argparse.Namespace) -> int:
    action, wanted, tenant = arguments.action, arguments.jobs, arguments.tenant
    found = list(admin.jobs.list(all_tenants=True))
    if tenant:
        found = [job for job in found if job.tenant == tenant]
    if action == "list":
        shown = [job for job in found if not wanted or job.job_id in wanted]
        _print_jobs(shown, arguments.json)
        return 0
    if not wanted:
        raise InvalidArgument("ID", f"is needed: which jobs to {action}")
    chosen = [_one(found, job_id) for job_id in wanted]  # all of them, before anything is done
    done = [_act(admin, action, job) for job in chosen]
    if arguments.json:
        print(json.dumps({"jobs": done}))
    else:
        for each in done:
            print(f"{each['job_id']}: {each['state']}")
    return 0


def _one(found: list[Job], job_id: str) -> Job:
    """The job of this id; of several tenants' it must be said whose."""
    matching = [job for job in found if job.job_id == job_id]
    if not matching:
        raise NotFound(f"there is no job {job_id!r}")
    if len(matching) > 1:
        tenants = ", ".join(sorted(job.tenant or "(none)" for job in matching))
        raise InvalidArgument("--tenant", f"must be given: these have a job {job_id!r}: {tenants}")
    return matching[0]


def _act(admin: Admin, action: str, job: Job) -> dict[str, Any]:
    if action == "delete":
        admin.jobs.delete(job.job_id, tenant=job.tenant)
        return {"job_id": job.job_id, "tenant": job.tenant, "state": "deleted"}
    act = {"pause": admin.jobs.pause, "resume": admin.jobs.resume, "cancel": admin.jobs.cancel}
    return _plain(act[action](job.job_id, tenant=job.tenant))


def _plain(job: Job) -> dict[str, Any]:
    """With times in seconds."""
    return {
        name: value.timestamp() if hasattr(value, "timestamp") else value
        for name, value in asdict(job).items()
    }


def _print_jobs(shown: list[Job], is_json: bool) -> None:
    if is_json:
        print(json.dumps({"jobs": [_plain(each) for each in shown]}))
        return
    if not shown:
        print("no jobs")
        return
    from rich.table import Table

    from pensieve.bench.report import print_whole

    table = Table("job", "tenant", "name", "state", "lines", "answered", "refused", "saved", "left")
    for column in table.columns[4:]:
        column.justify = "right"
    for job in shown:
        saved = job.saved_tokens / job.prompt_tokens if job.prompt_tokens else 0.0
        table.add_row(
            job.job_id,
            job.tenant,
            job.name,
            job.outcome or job.state,
            f"{job.num_lines:,}",
            f"{job.num_answered:,}",
            f"{job.num_refused:,}",
            f"{saved:.0%}" if job.prompt_tokens else "",
            "" if job.seconds_left is None else seconds_text(job.seconds_left),
        )
    print_whole(table)
