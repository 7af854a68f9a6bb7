"""Protections of the history: what is acknowledged stays, what is deleted goes, damage is found."""

from tests.protections import Change, Protection, protection

PROTECTIONS = (
    protection(
        "synchronous = FULL",
        "store/connection.py",
        '                "synchronous = FULL",\n',
        '                "synchronous = NORMAL",\n',
        "store/test_power_loss.py::test_a_loss_of_power_loses_nothing_acknowledged",
        "store/test_migrations.py::test_the_writer_is_durable_and_wipes_what_it_deletes",
    ),
    protection(
        "the check after an unclean stop",
        "launch/daemon.py",
        "            if daemon.store.integrity_check_due:\n"
        "                daemon.check_history(hooks.report)\n",
        "",
        "service/test_crashes.py::test_after_an_unclean_stop_the_history_is_checked_while_it_is_served",
    ),
    protection(
        "the check after an unclean stop, before a chat begins",
        "launch/daemon.py",
        "        if setup.check_history_first and store.integrity_check_due:\n",
        "        if setup.check_history_first and not store:\n",
        "launch/test_embedded_daemon.py::test_after_an_unclean_stop_the_history_is_checked_first",
    ),
    protection(
        "a check stays due until it has passed",
        "store/conversation_store.py",
        "            clean = not self.integrity_check_due\n",
        "            clean = True\n",
        "store/test_folder.py::test_an_integrity_check_stays_due_until_it_has_passed",
    ),
    protection(
        "an unclean stop is noticed",
        "store/folder.py",
        "            stopped_unclean = bool(os.pread(lock, HOLDER_BYTES_MAX, 0))\n",
        "            stopped_unclean = False\n",
        "store/test_folder.py::test_a_clean_stop_is_remembered_and_so_is_an_unclean_one",
    ),
    protection(
        "a body is checked when it is read",
        "store/bodies.py",
        "    if body_crc(private, tokens) != crc:\n",
        "    if crc is None:\n",
        "store/test_verify.py::test_a_flipped_bit_is_not_served",
    ),
    protection(
        "messages must tile the log",
        "store/message_rows.py",
        "        if row[0] != num_messages or row[2] != len(log):\n            break\n",
        "",
        "store/test_verify.py::test_a_log_with_a_gap_is_not_served",
    ),
    protection(
        "SQLite looks for damaged pages",
        "store/verify.py",
        '            found = conn.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})").fetchall()\n',
        '            found = [("ok",)]\n',
        "service/test_crashes.py::test_after_an_unclean_stop_the_history_is_checked_while_it_is_served",
    ),
    protection(
        "a turn's end is one transaction",
        "store/connection.py",
        "        with self._operation() as db, db.atomic():\n            yield db.conn\n",
        "        with self._operation() as db:\n            yield db.conn\n",
        "store/test_faults.py::test_an_operation_happens_or_does_not",
    ),
    protection(
        "after an I/O error the file is opened anew",
        "store/connection.py",
        "            if _primary_code(error) in REOPEN_AFTER:\n                self._discard()\n",
        "",
        "store/test_disk_faults.py::test_after_an_io_error_a_new_connection_is_used",
    ),
    protection(
        "a disk that fails is UNAVAILABLE",
        "store/connection.py",
        "    if primary in UNAVAILABLE:\n",
        "    if primary in ():\n",
        "service/test_withstand.py::test_a_disk_that_fails_refuses_turns_serves_what_it_can_and_heals",
        "store/test_disk_faults.py::test_a_full_disk_refuses_the_turn_and_keeps_the_rest",
    ),
    protection(
        "a turn whose end could not be written does not run for ever",
        "store/running_rows.py",
        "        self.interrupt_dead()\n        try:\n",
        "        try:\n",
        "store/test_turn_end_faults.py::test_a_turn_whose_end_could_not_be_written_is_interrupted_by_the_next_write",
    ),
    protection(
        "turns of a process that died are interrupted",
        "store/running_rows.py",
        "            for turn_id in dead:\n"
        "                turn_rows.interrupt_turn(conn, turn_id, self._now())\n",
        "",
        "store/test_turns.py::test_running_turns_are_interrupted_when_the_store_opens",
        "store/test_crash.py::test_no_acknowledged_turn_is_lost_and_none_is_half_written",
    ),
    protection(
        "a turn is acknowledged when it is stored",
        "service/conversations.py",
        "                committed = await self._threads.in_store(live.tenant, self._history.finish, reply)\n"
        "                self.turns.finish(live, reply, committed)\n",
        "                storing = asyncio.ensure_future(\n"
        "                    self._threads.in_store(live.tenant, self._history.finish, reply)\n"
        "                )\n"
        "                self.turns.finish(live, reply, (live.first_revision + 1, ''))\n"
        "                self.readers.wake(live.number)\n"
        "                await asyncio.sleep(0.05)\n"
        "                await storing\n",
        "service/test_crashes.py::test_no_acknowledged_turn_is_lost_and_none_is_half_written",
    ),
    protection(
        "one process at a time has the folder",
        "store/folder.py",
        "            _take(lock, path)\n",
        "",
        "store/test_folder.py::test_a_second_process_learns_who_holds_the_folder",
    ),
    protection(
        "another program that holds the database is an error in words",
        "store/connection.py",
        '    5: "another program holds the database",\n',
        "",
        "store/test_disk_faults.py::test_an_error_of_sqlite_is_one_line",
    ),
    protection(
        "a newer schema is refused",
        "store/migrations.py",
        "    if version > len(steps) or unknown:\n",
        "    if version < 0:\n",
        "store/test_migrations.py::test_a_newer_schema_is_refused_and_untouched",
        "cli/test_chat.py::test_a_history_of_a_newer_version_is_refused",
    ),
    protection(
        "a database of another program is refused",
        "store/migrations.py",
        "    if not ours and not fresh:\n",
        "    if not ours and not path:\n",
        "store/test_migrations.py::test_a_database_of_another_program_is_refused",
    ),
    protection(
        "a database is copied before its schema changes",
        "store/migrations.py",
        "        _back_up(db, path, version)\n",
        "        pass\n",
        "store/test_migrations.py::test_a_database_is_copied_before_its_schema_changes",
    ),
    protection(
        "a deletion removes the copies that migrations made",
        "store/erasure.py",
        "        _remove_backups(self._writer.path)\n",
        "",
        "store/test_migrations.py::test_a_deletion_removes_the_copy_that_a_migration_made",
    ),
    protection(
        "what is deleted is overwritten",
        "store/connection.py",
        '                "secure_delete = ON",\n',
        '                "secure_delete = OFF",\n',
        "store/test_deletion.py::test_nothing_of_a_deleted_conversation_is_on_the_disk",
        "store/test_migrations.py::test_the_writer_is_durable_and_wipes_what_it_deletes",
    ),
    protection(
        "a deletion empties the write-ahead log",
        "store/erasure.py",
        "            is_empty = self._writer.truncate_journal()\n",
        "            is_empty = True\n",
        "store/test_deletion.py::test_nothing_of_a_deleted_conversation_is_on_the_disk",
        "store/test_deletion.py::test_a_reader_that_holds_the_journal_is_reported_and_a_retry_erases",
    ),
    protection(
        "a deletion does not wait for a reader in the store thread",
        "store/connection.py",
        '                conn.execute("PRAGMA busy_timeout = 0").fetchall()\n',
        "",
        "store/test_deletion.py::test_a_deletion_does_not_wait_for_a_reader",
    ),
    protection(
        "what is left in the write-ahead log by an earlier process is known to be there",
        "store/erasure.py",
        "        self.pending = writer.has_journal()\n",
        "        self.pending = False\n",
        "store/test_deletion.py"
        "::test_what_a_reader_kept_beyond_the_end_of_the_process_is_erased_by_the_next",
    ),
    Protection(
        "what a dying process did not erase, the next one does when it opens the history",
        (
            Change(
                "pensieve/store/conversation_store.py",
                "        self.erasure.resume()\n",
                "",
            ),
            Change(
                "pensieve/store/connection.py",
                "                self._recover()\n",
                "                pass\n",
            ),
        ),
        ("store/test_deletion.py::test_what_a_dying_process_did_not_erase_is_erased_by_the_next",),
    ),
    protection(
        "a log is recovered by a connection that is closed again",
        "store/connection.py",
        "                self._recover()\n",
        "                pass\n",
        "store/test_deletion.py::test_recovery_leaves_nothing_of_the_memory_in_a_file",
    ),
    protection(
        "a retry of a deletion erases",
        "store/conversation_store.py",
        "        except NotFound:\n            self.erasure.finish()\n            raise\n",
        "        except NotFound:\n            raise\n",
        "store/test_deletion.py::test_a_reader_that_holds_the_journal_is_reported_and_a_retry_erases",
        "service/test_erasing.py::test_a_client_that_deletes_again_has_it_erased",
    ),
    protection(
        "reads make way for an erasure",
        "store/history_reader.py",
        "        self._make_way()\n        try:\n",
        "        try:\n",
        "store/test_deletion.py::test_a_read_makes_way_for_an_erasure_and_not_for_ever",
    ),
    protection(
        "space comes back",
        "store/compaction.py",
        "        if wiped_bytes >= self._bytes_min and 2 * wiped_bytes > file_bytes - free_bytes:\n",
        "        if wiped_bytes < 0:\n",
        "store/test_compaction.py::test_the_file_shrinks_when_more_than_half_is_wiped",
    ),
    protection(
        "a step of a compaction is small",
        "store/compaction.py",
        "STEP_ROWS = 128\n",
        "STEP_ROWS = 1_000_000\n",
        "store/test_compaction.py::test_a_deletion_writes_what_it_deletes_and_steps_are_small",
    ),
    protection(
        "a fence keeps balancing away from what is alive",
        "store/compaction.py",
        "FENCE_ROWS = 4 ",
        "FENCE_ROWS = 0 ",
        "store/test_compaction.py::test_the_fence_keeps_balancing_away_from_what_is_alive",
    ),
    protection(
        "every character is stored exactly",
        "store/bodies.py",
        'separators=(",", ":")).encode()\n',
        'separators=(",", ":")).replace("\\\\u0000", "").encode()\n',
        "store/test_conversations.py::test_every_token_id_and_letter_comes_back",
    ),
)
