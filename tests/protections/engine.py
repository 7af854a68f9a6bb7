"""Protections of the engine, the core, the model, its kernels, the text and the SDK."""

from tests.protections import Change, Protection, protection

PROTECTIONS = (
    protection(
        "a prefix that was deleted is shared by nobody who waits for a log",
        "engine/engine.py",
        "                self._share_no_more(conversation_id)\n",
        "",
        "engine/test_known_logs.py"
        "::test_a_prefix_that_was_declared_anew_while_a_log_was_asked_for_is_not_shared",
    ),
    protection(
        "what a prefix begins with is checked in what the template writes",
        "text/template.py",
        "            text[:written_before] != head.text\n            or text",
        "            text",
        "text/test_template_head.py::test_what_depends_on_later_messages_is_refused_and_never_wrong",
    ),
    protection(
        "weights that are no numbers are named",
        "model/probe.py",
        "            _check_finite(module, plain)\n",
        "",
        "model/test_loader.py::test_a_weight_that_is_no_number_is_named",
        "model/test_loader.py::test_a_type_that_is_too_narrow_for_a_model_is_named",
    ),
    protection(
        "a window is refused unless it holds the context",
        "model/observe.py",
        "        if reach < self._context_max:\n",
        "        if reach < 1:\n",
        "model/test_loader.py::test_what_is_plain_up_to_some_length_is_served_up_to_it",
        "service/test_context_max.py::test_a_windowed_model_is_exact_below_its_window",
    ),
    protection(
        "a journal that cannot be written is given up",
        "engine/journal.py",
        '        except OSError as error:\n            log.warning("the journal is given up',
        '        except UnicodeError as error:\n            log.warning("the journal is given up',
        "engine/test_journal.py::test_a_journal_that_cannot_be_written_is_given_up_and_turns_go_on",
    ),
    protection(
        "a batch that does not fit is computed in halves",
        "model/forward.py",
        "            if num_tokens == 1 or not self._halves:\n",
        "            if num_tokens >= 1:\n",
        "model/test_forward.py::test_a_batch_that_does_not_fit_is_computed_in_parts",
    ),
    protection(
        "kernels without memory for copies of rows are an error",
        "kernels/cpu_library.py",
        "    if status == 3:\n",
        "    if status == 4:\n",
        "kernels/test_out_of_memory.py::test_too_little_memory_for_copies_of_rows_is_an_error",
    ),
    protection(
        "a single token that does not fit ends the engine",
        "model/forward.py",
        "            if num_tokens == 1 or not self._halves:\n",
        "            if not self._halves:\n",
        "model/test_forward.py::test_a_single_token_that_does_not_fit_ends_the_engine",
    ),
    protection(
        "a compiled kernel is used only if its digest is its name's",
        "kernels/nvrtc.py",
        '        if path.stem == f"{key}-{digest}":\n',
        "        if digest:\n",
        "kernels/test_nvrtc.py::test_a_damaged_file_is_not_used_but_made_again",
    ),
    protection(
        "a folder of kernels that others may write to is refused",
        "kernels/nvrtc.py",
        "    if status.st_uid != os.getuid() or status.st_mode & 0o022:\n",
        "    if status.st_uid != os.getuid():\n",
        "kernels/test_nvrtc.py::test_a_folder_that_others_may_write_to_is_refused",
    ),
    Protection(
        "tiles of a processor are used only if they compute what AVX-512 does",
        (
            Change(
                "csrc/cpu/amx.cpp",
                "products_agree<uint8_t>() && attention_agrees();",
                "true;",
            ),
        ),
        ("kernels/tiles/test_planted.py::test_tiles_that_compute_something_else_are_not_used",),
    ),
    protection(
        "a worker ends with rank 0",
        "model/parallel/worker.py",
        "  # rank 0 may have been killed before it did\n        os._exit(0)\n",
        "\n        return\n",
        "model/parallel/test_parallel.py::test_workers_end_with_rank_0",
    ),
    protection(
        "the end of a worker is an error of the device",
        "model/parallel/leader.py",
        '            self.tally.give_up(f"rank {worker.index} ended (status {status})")\n',
        "",
        "model/parallel/test_parallel.py::test_a_worker_that_dies_is_a_device_error",
    ),
    protection(
        "a copy is finished when every rank has finished it",
        "model/parallel/leader.py",
        "                if self._counts[copy_id] == self._num_ranks:\n",
        "                if self._counts[copy_id] == 1:\n",
        "model/parallel/test_parallel.py::test_a_copy_is_finished_when_it_is_on_every_rank",
    ),
    protection(
        "an error of the copier reaches whoever waits",
        "model/kv/copier_cpu.py",
        "        if self._error is not None:\n            raise DeviceError(",
        "        if self._error is self:\n            raise DeviceError(",
        "model/kv/test_copier_cpu.py::test_an_error_in_the_worker_reaches_whoever_waits",
        "model/test_executor.py::test_a_failed_copy_is_a_device_error",
    ),
    protection(
        "logits that are not numbers fail their turn",
        "model/executor.py",
        "            if token is None:\n",
        "            if token is None and not launched.sampled:\n",
        "model/test_executor.py::test_a_turn_with_nan_logits_fails_alone",
    ),
    protection(
        "what a failed turn computed is discarded",
        "core/scheduler.py",
        "            self._discard(turn, now)  # also when it was cancelled meanwhile\n",
        "",
        "service/test_withstand.py::test_logits_that_are_not_numbers_fail_one_turn_and_keep_nothing_of_it",
        "core/test_turn_failures.py::test_a_failed_turn_ends_alone_and_its_pages_are_not_kept",
    ),
    protection(
        "a cancelled turn's pages go back once its last slice is committed",
        "core/scheduler.py",
        "        if turn.num_uncommitted:\n"
        "            self._releasing[turn.turn_id] = turn\n"
        "        else:\n"
        "            self._releasing.pop(turn.turn_id, None)\n",
        "        if turn.num_uncommitted < 0:\n"
        "            self._releasing[turn.turn_id] = turn\n"
        "        else:\n"
        "            self._releasing.pop(turn.turn_id, None)\n",
        "core/test_traffic.py::test_every_reply_is_right_whatever_happens",
    ),
    protection(
        "a cut inside a chunk leaves the KV behind it to nobody",
        "core/scheduler.py",
        "            keep = len(turn.tokens) + 1 if turn.keep_tokens is None else turn.keep_tokens\n",
        "            keep = len(turn.tokens) + 1\n",
        "core/test_turn_end.py::test_cancelling_keeps_as_many_tokens_as_the_reader_has_seen",
    ),
    protection(
        "a client's control tokens are text",
        "text/tokenizer.py",
        '        for run in re.finditer(b"\\x01+", written_mask(text)):\n',
        '        for run in re.finditer(b"[\\x00\\x01]+", written_mask(text)):\n',
        "text/test_hostile.py::test_every_control_string_everywhere_yields_no_control_token",
        "text/test_tokenizer.py::test_user_text_never_becomes_a_control_token",
    ),
    Protection(
        "no control token is made of a client's text, by the library or behind it",
        (
            Change(
                "pensieve/text/tokenizer.py",
                "    tokenizer.encode_special_tokens = True\n",
                "",
            ),
            Change(
                "pensieve/text/tokenizer.py",
                "        if not cuts:\n",
                "        if cuts is not None:\n",
            ),
        ),
        ("text/test_hostile.py::test_every_control_string_everywhere_yields_no_control_token",),
    ),
    protection(
        "a NUL that a tokenizer would lose is refused",
        "text/tokenizer.py",
        '        if "\\0" in text and not self._keeps_nul:\n',
        '        if "\\0" in text and self._keeps_nul is None:\n',
        "text/test_tokenizer.py::test_nul_is_kept_by_byte_level_vocabularies_and_refused_by_those_that_lose_it",
    ),
    protection(
        "text that UTF-8 cannot carry is not sent",
        "client/requests.py",
        "    except UnicodeEncodeError:\n",
        "    except UnicodeDecodeError:\n",
        "client/test_turns.py::test_text_that_utf8_cannot_carry_is_refused_before_it_is_sent",
    ),
    protection(
        "what was shown is not shown again after attaching",
        "client/turn_progress.py",
        "        text, token_ids = text[len(known_text) :], token_ids[len(known_tokens) :]\n",
        "",
        "client/test_streams.py::test_a_stream_that_breaks_goes_on_where_it_was",
        "service/test_withstand.py::test_a_connection_that_is_reset_within_a_reply_costs_nothing",
    ),
    protection(
        "the SDK sends a turn again",
        "client/retry.py",
        "        worthwhile = isinstance(error, Unavailable) or (\n",
        "        worthwhile = (\n",
        "client/test_client.py::test_a_turn_survives_the_death_of_the_engine",
        "client/test_client.py::test_a_turn_survives_kill_9_of_the_daemon",
    ),
    protection(
        "a turn that is left is ended, and of its reply what was given out stays",
        "client/turn_progress.py",
        "            request.keep_tokens = self.progress.num_tokens if self._keep_partial else 0\n",
        "",
        "client/test_leaving.py::test_ask_that_runs_out_of_time_leaves_nothing",
    ),
    protection(
        "leaving waits for the turn's end",
        "client/turn_progress.py",
        "        self._left = True\n        return self.end_request()\n",
        "        self._left = True\n        return None\n",
        "client/test_leaving.py::test_what_was_delivered_stays_and_the_next_message_is_answered",
        "client/test_leaving.py::test_the_same_for_tasks",
    ),
    Protection(
        "a turn counts as sent before it is",
        (
            Change(
                "pensieve/client/turn.py",
                "            course.was_sent = True  # before it is: an interrupt may come in between\n",
                "",
            ),
            Change(
                "pensieve/client/turn.py",
                "            connection.reading[course] = self._stream\n",
                "            connection.reading[course] = self._stream\n            course.was_sent = True\n",
            ),
        ),
        (
            "client/test_leaving.py::test_an_interrupt_just_after_the_request_was_sent_ends_the_turn",
        ),
    ),
    protection(
        "a turn that was closed before it was sent is ended",
        "client/turn.py",
        "            if course.was_left and (",
        "            if False and (",
        "client/test_leaving.py::test_a_turn_that_is_closed_just_before_its_request_is_sent_is_ended",
    ),
    protection(
        "who wants the reply of a turn that another thread closes hears of its end",
        "client/turn.py",
        "        if (request := self._course.question()) is not None:\n",
        "        if (request := None) is not None:\n",
        "client/test_leaving.py::test_a_reader_whose_turn_another_thread_closes_is_told_what_stays",
    ),
    protection(
        "the end of a program leaves its turns",
        "client/connection.py",
        "atexit.register(Connection._leave_all)\n",
        "",
        "client/test_end_of_programs.py::test_a_program_that_ends_within_a_turn_has_ended_it",
    ),
    protection(
        "a reply that is complete is no reply too late",
        "client/turn_progress.py",
        "        if self._fate == ALL_STAYS and not self._is_late:\n",
        "        if self._is_late:\n",
        "client/test_streams.py::test_a_reply_that_is_complete_when_the_time_is_over_is_read_to_its_end",
    ),
    protection(
        "a broken connection is no leaving",
        "client/turn_progress.py",
        "            isinstance(error, DeadlineExceeded) and",
        "            error is not None and",
        "client/test_leaving.py::test_a_connection_that_breaks_leaves_nothing_and_has_its_grace",
    ),
    protection(
        "loading is waited for",
        "client/retry.py",
        "        if isinstance(error, Loading):\n",
        "        if False:\n",
        "client/test_loading.py::test_a_daemon_that_loads_its_model_is_waited_for",
        "client/test_loading.py::test_a_turn_outlives_an_engine_that_takes_long_to_load",
    ),
    protection(
        "loading is not waited for without end",
        "client/retry.py",
        "            self._waited += pause or 0.0\n",
        "",
        "client/test_loading.py::test_a_server_that_never_stops_loading_is_given_up",
    ),
    protection(
        "pickled weights are not read",
        "model/loader.py",
        "            use_safetensors=True,\n",
        "",
        "model/test_loader.py::test_pickled_weights_are_not_read",
    ),
    Protection(
        "no code of a repository is run",
        (
            Change(
                "pensieve/model/loader.py",
                "        config = AutoConfig.from_pretrained(name, trust_remote_code=False)\n",
                "        config = AutoConfig.from_pretrained(name, trust_remote_code=True)\n",
            ),
        ),
        ("test_layering.py::test_nothing_runs_what_it_reads",),
    ),
    protection(
        "fields and methods keep their numbers and names",
        "v1/conversation_pb2.py",
        r"reate_if_missing\x18\x04",
        r"reate_if_misting\x18\x04",
        "service/test_withstand.py::test_nothing_that_was_promised_has_changed_on_the_wire",
    ),
    protection(
        "fields that a newer client sends are ignored",
        "service/grpc/sizes.py",
        "        if field is not None:\n",
        "        if field is None:\n"
        '            raise InvalidArgument("request", "has a field that nobody knows")\n'
        "        if field is not None:\n",
        "service/test_withstand.py::test_a_client_with_the_first_stubs_talks_to_this_daemon",
    ),
    protection(
        "a host page that has changed is not swapped in",
        "core/cache.py",
        "            if not used and not self._is_intact(chunk.host_page):\n",
        "            if used and not self._is_intact(chunk.host_page):\n",
        "service/test_check_kv.py::test_a_page_that_has_changed_on_the_host_is_computed_again",
    ),
    protection(
        "a worker whose host page has changed fails",
        "model/parallel/worker.py",
        '                    raise DeviceError("its part of the host tier is not what was copied there")\n',
        "                    pass\n",
        "model/parallel/test_parallel.py::test_a_worker_whose_host_page_has_changed_fails",
    ),
)
