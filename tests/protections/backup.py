"""Protections of backups: what they have, what they hold up, what restoring refuses."""

from tests.protections import protection

PROTECTIONS = (
    protection(
        "the log is read before a deletion empties it",
        "store/connection.py",
        "            self._capture.collect(conn)\n            try:\n",
        "            try:\n",
        "store/backup/test_backup.py::test_every_shipped_moment_is_restored_as_it_was",
    ),
    protection(
        "a base has the pages that changed while it was copied",
        "store/backup/writing.py",
        "        if not newer:\n",
        "        if newer is not None:\n",
        "store/backup/test_backup.py"
        "::test_a_reader_that_keeps_the_log_long_does_not_hide_anything_from_the_backup",
    ),
    protection(
        "a feed begins with what the log holds already",
        "store/backup/capture.py",
        "                pages = self._read(0, num_frames)\n",
        "",
        "store/backup/test_backup.py"
        "::test_a_reader_that_keeps_the_log_long_does_not_hide_anything_from_the_backup",
    ),
    protection(
        "a connection that is opened anew ends the feeds",
        "store/connection.py",
        "            self._capture.abandon(\n"
        '                "the history was closed, or opened anew after an error of the disk"\n'
        "            )\n",
        "",
        "store/backup/test_backup.py::test_a_connection_that_is_opened_anew_ends_the_chain",
    ),
    protection(
        "changes are shipped all the time",
        "service/backing_up.py",
        "        await self._ship()\n        now = self._source.now()\n",
        "        now = self._source.now()\n",
        "service/test_backing_up.py"
        "::test_a_backup_under_load_restores_to_exactly_the_acknowledged_turns",
    ),
    protection(
        "a clean stop ships the rest",
        "service/backing_up.py",
        "                await self._ship()\n        except (PensieveError, TimeoutError) as error:\n",
        "                pass\n        except (PensieveError, TimeoutError) as error:\n",
        "service/test_backing_up.py::test_a_clean_stop_ships_the_last_turn",
    ),
    protection(
        "changes that could not be written are given back",
        "store/backup/writing.py",
        "                    feed.give_back(changes)\n",
        "                    pass\n",
        "service/test_backing_up.py::test_a_full_disk_of_the_backup_is_said_and_stops_nothing",
    ),
    protection(
        "one thread at a time appends to a chain",
        "store/backup/writing.py",
        "        with self._lock:\n            if (changes",
        "        if self._lock:\n            if (changes",
        "store/backup/test_backup.py::test_two_that_ship_at_once_append_one_after_the_other",
    ),
    protection(
        "a folder that is gone is begun anew",
        "store/backup/writing.py",
        "                if isinstance(error.__cause__, FileNotFoundError):\n",
        "                if not error:\n",
        "service/test_backing_up.py::test_a_folder_that_was_cleared_gets_another_generation",
    ),
    protection(
        "a folder that does not answer is said",
        "service/backing_up.py",
        '                self._has_problem(f"its folder has not answered for {SLOW_SECONDS:.0f} s")\n',
        "                pass\n",
        "service/test_backing_up.py"
        "::test_a_folder_that_does_not_answer_holds_up_neither_turns_nor_deletions_nor_the_end",
    ),
    protection(
        "each job of the folder has a thread of its own",
        "service/backing_up.py",
        " = in_own_thread(self._threads.loop, function)\n",
        " = asyncio.ensure_future(self._threads.in_store(NOBODY, function))\n",
        "service/test_backing_up.py"
        "::test_a_folder_that_does_not_answer_holds_up_neither_turns_nor_deletions_nor_the_end",
    ),
    protection(
        "what gathers for a folder is bounded",
        "store/backup/capture.py",
        "        if len(changes.pages) * self.page_bytes > self._bytes_max:\n",
        "        if len(changes.pages) < 0:\n",
        "store/backup/test_backup.py"
        "::test_what_a_folder_does_not_take_holds_up_neither_turns_nor_deletions",
        "service/test_backing_up.py"
        "::test_another_generation_begins_when_too_much_could_not_be_written",
    ),
    protection(
        "a log that cannot be read ends the feeds and no turn",
        "store/backup/capture.py",
        "        except (*UNREADABLE, self._driver.Error) as error:\n            self.abandon(",
        "        except self._driver.Error as error:\n            self.abandon(",
        "store/backup/test_backup.py::test_a_log_that_cannot_be_read_ends_the_chain_and_no_turn",
    ),
    protection(
        "a base has its checksum",
        "store/backup/restoring.py",
        "    if digest.hexdigest() != base.sha256:\n",
        "    if not digest.hexdigest():\n",
        "store/backup/test_backup.py"
        "::test_damage_is_named_and_restoring_stops_before_it_only_when_told",
    ),
    protection(
        "a segment has its checksum",
        "store/backup/files.py",
        "    if found.digest() != digest:\n",
        "    if not found.digest():\n",
        "store/backup/test_backup.py"
        "::test_damage_is_named_and_restoring_stops_before_it_only_when_told",
    ),
    protection(
        "only who says so gets what was before the damage",
        "store/backup/restoring.py",
        "            if not wanted.to_last_good:\n                raise BackupDamaged(",
        "            if wanted is None:\n                raise BackupDamaged(",
        "store/backup/test_backup.py"
        "::test_damage_is_named_and_restoring_stops_before_it_only_when_told",
    ),
    protection(
        "a segment follows what is before it",
        "store/backup/restoring.py",
        '            raise BackupDamaged(f"{path} does not follow what is before it")\n',
        "            pass\n",
        "store/backup/test_backup.py::test_segments_of_another_chain_are_refused",
    ),
    protection(
        "what was being written when a process died is no part of a backup",
        "store/backup/writing.py",
        "GENERATION.fullmatch(name)",
        "GENERATION.match(name)",
        "store/backup/test_backup.py"
        "::test_what_was_being_written_when_the_process_died_is_not_there",
    ),
    protection(
        "what is restored is checked",
        "store/backup/restoring.py",
        '        problems = verify.verify(partial, wanted.driver, None, "", immutable=True)\n',
        "        problems = []\n",
        "store/backup/test_backup.py::test_a_damaged_history_is_not_restored_as_if_it_were_sound",
    ),
    protection(
        "the history that is replaced is whole until then",
        "store/backup/restoring.py",
        "            _empty_log(database, driver)\n",
        "            pass\n",
        "store/backup/test_backup.py"
        "::test_a_restore_that_ends_right_before_it_puts_the_new_history_in_place_loses_nothing_of_the_old",
    ),
    protection(
        "a log whose length cannot be read is no failed turn",
        "store/backup/capture.py",
        "        except OSError:\n            return True\n        finally:\n",
        "        finally:\n",
        "store/backup/test_backup.py::test_a_log_whose_length_cannot_be_read_fails_no_turn",
    ),
    protection(
        "a history is replaced only when told",
        "store/backup/restoring.py",
        "        if target.database_bytes and not replace:\n",
        "        if target.database_bytes < 0:\n",
        "store/backup/test_backup.py::test_a_history_is_replaced_only_when_told",
    ),
)
