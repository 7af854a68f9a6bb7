"""Protections of a history in PostgreSQL."""

from tests.protections import protection

PROTECTIONS = (
    protection(
        "PostgreSQL: a server that is away is unavailable, and comes back",
        "store/postgres/failures.py",
        "(not code and _is_operational(error))",
        "(not code and False)",
        "store/test_postgres_crash.py::test_a_server_that_is_killed_loses_no_acknowledged_turn",
    ),
    protection(
        "PostgreSQL: synchronous_commit = on",
        "store/postgres/connection.py",
        '            conn.execute("SET synchronous_commit = on")\n',
        "            pass\n",
        "store/test_postgres.py::test_a_session_is_durable_whatever_the_server_or_the_role_has_set",
    ),
    protection(
        "PostgreSQL: the session before is ended first",
        "store/postgres/connection.py",
        "            if self._backend is not None and not has_ended_ours:\n",
        "            if self._backend is not None and has_ended_ours:\n",
        "store/test_postgres.py"
        "::test_an_old_session_that_the_server_still_believes_in_is_ended_by_the_next",
    ),
    protection(
        "PostgreSQL: a session that is opened again waits for the standby",
        "store/postgres/connection.py",
        'still = "UPDATE owner SET taken_at = now() WHERE token = %s"',
        'still = "SELECT 1 FROM owner WHERE token = %s"',
        "store/test_postgres.py"
        "::test_a_commit_that_a_standby_does_not_have_is_waited_for_again_before_it_is_read",
    ),
    protection(
        "a copy is made of what passes its checksum",
        "store/copying.py",
        '                checked_body(f"body {row[0]}", *row[1:])\n',
        "                pass\n",
        "store/test_copying.py::test_what_is_damaged_is_not_copied_in_part",
    ),
    protection(
        "PostgreSQL: rows are read, not only their numbers in an index",
        "store/postgres/checking.py",
        "SELECT max(r.{key}), count(r.*)",
        "SELECT max(r.{key})",
        "store/test_postgres.py::test_a_damaged_page_is_found_also_where_an_index_has_the_numbers",
    ),
    protection(
        "PostgreSQL: an error inside a savepoint is raised before it ends",
        "store/postgres/session.py",
        '        if not self._is_transaction or sql.startswith(("RELEASE", "ROLLBACK")):\n',
        "        if not self._is_transaction:\n",
        "store/test_postgres.py"
        "::test_an_error_inside_a_savepoint_is_raised_before_it_ends_and_undone_with_it",
    ),
    protection(
        "the engine's process gets no secret",
        "service/engine_client.py",
        "**without_secrets(os.environ)",
        "**os.environ",
        "service/test_postgres.py::test_a_conversation_goes_on_after_either_process_was_killed",
    ),
    protection(
        "PostgreSQL: who has lost the history writes no more",
        "store/postgres/connection.py",
        "        if not conn.execute(still, [self._token]).rowcount:\n",
        "        if conn.execute(still, [self._token]).rowcount < 0:\n",
        "store/test_postgres.py::test_who_has_lost_the_history_to_another_writes_no_more",
    ),
    protection(
        "PostgreSQL: a server that loses what it acknowledged is refused",
        "store/postgres/connection.py",
        '            if setting(name) != "on":\n',
        '            if setting(name) == "none":\n',
        "store/test_postgres.py::test_a_server_that_would_lose_what_it_acknowledged_is_refused",
    ),
    protection(
        "PostgreSQL: the server that is no standby is taken",
        "store/postgres/connection.py",
        '    "target_session_attrs": "read-write",  # of several hosts, the one that is no standby\n',
        "",
        "store/test_postgres_crash.py::test_a_standby_takes_over_with_every_acknowledged_turn",
    ),
)
