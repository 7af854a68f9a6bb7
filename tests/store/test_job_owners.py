"""The database records which daemon has a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve.errors import AlreadyExists
from pensieve.store import ConversationStore
from pensieve.store.job_owners import JobOwner
from tests.store.faulty import writer_of

Open = Callable[..., ConversationStore]


def test_a_job_belongs_to_the_daemon_that_took_it_also_after_a_restart(start: Open) -> None:
    a, b = start("a"), start("b")
    a.job_owners.take("acme", "nightly", 1.0)
    assert a.job_owners.find("acme", "nightly") == JobOwner("a", "a:1", is_ours=True)
    assert b.job_owners.find("acme", "nightly") == JobOwner("a", "a:1", is_ours=False)
    assert b.job_owners.find("other", "nightly") is None
    with pytest.raises(AlreadyExists, match="'nightly' already exists, at another daemon"):
        b.job_owners.take("acme", "nightly", 2.0)
    a.job_owners.take("acme", "nightly", 2.0)
    a.close()
    assert b.job_owners.find("acme", "nightly") == JobOwner("a", "", is_ours=False)
    start("new-name", folder="a")
    assert b.job_owners.find("acme", "nightly") == JobOwner("new-name", "new-name:1", is_ours=False)


def test_only_the_owner_can_release_a_job(start: Open) -> None:
    a, b = start("a"), start("b")
    a.job_owners.take("", "nightly", 1.0)
    b.job_owners.release("", "nightly")
    assert b.job_owners.find("", "nightly") is not None
    a.job_owners.release("", "nightly")
    a.job_owners.release("", "nightly")
    assert b.job_owners.find("", "nightly") is None
    b.job_owners.take("", "nightly", 2.0)


def test_keep_makes_the_rows_match_the_daemons_existing_jobs(start: Open) -> None:
    a, b = start("a"), start("b")
    for job_id in ("kept", "gone"):
        a.job_owners.take("", job_id, 1.0)
    a.job_owners.take("", "new", 3.0)
    b.job_owners.take("", "theirs", 1.0)
    a.job_owners.keep([("", "kept"), ("acme", "found"), ("", "theirs")], 2.0)
    found = {
        key: None if (owner := b.job_owners.find(*key)) is None else owner.replica
        for key in [
            *(("", name) for name in ("kept", "gone", "new", "theirs")),
            ("acme", "found"),
        ]
    }
    assert found == {
        ("", "kept"): "a",
        ("", "gone"): None,
        ("", "new"): "a",
        ("", "theirs"): "b",
        ("acme", "found"): "a",
    }
    a.close()
    renamed = start("new-name", folder="a")
    renamed.job_owners.keep([("", "kept")], 2.0)
    renamed.close()
    owner = b.job_owners.find("", "kept")
    assert owner == JobOwner("new-name", "", is_ours=False)


def test_job_rows_of_a_daemon_that_never_restarts_are_deleted_after_a_time(start: Open) -> None:
    a, b = start("a"), start("b")
    for job_id in ("nightly", "weekly"):
        a.job_owners.take("", job_id, 1.0)
    b.job_owners.keep([], 100.0, 50.0)  # the daemon that has the job is alive
    assert a.job_owners.find("", "nightly") is not None
    jobs = [("", "nightly"), ("", "weekly")]
    a.job_owners.keep(jobs, 100.0, 50.0)
    a.close()
    b.job_owners.keep([], 200.0)
    b.job_owners.keep([], 200.0, 100.0)
    assert b.job_owners.find("", "nightly") is not None
    b.job_owners.keep([], 200.0, 101.0)
    assert b.job_owners.find("", "nightly") is None
    b.job_owners.take("", "nightly", 201.0)
    a = start("a")
    a.job_owners.keep(jobs, 300.0, 101.0)
    assert [b.job_owners.find(*each) for each in jobs] == [
        JobOwner("b", "b:1", is_ours=True),
        JobOwner("a", "a:1", is_ours=False),
    ]


def test_job_rows_of_a_killed_daemon_are_deleted_after_a_time(start: Open) -> None:
    a, b = start("a"), start("b")
    a.job_owners.take("", "nightly", 1.0)
    vars(a)["_leases"].close()
    with writer_of(a).writing() as conn:
        conn.execute("UPDATE sessions SET lease_until = 1 WHERE folder = ?", (a.owners.folder,))
    b.job_owners.keep([], 200.0, 100.0)
    assert b.job_owners.find("", "nightly") is None
