"""Protections of the service: admission, quotas, readers, threads, the supervision of the engine."""

from tests.protections import Change, Protection, protection

PROTECTIONS = (
    protection(
        "the queue estimate is of the present queue",
        "service/admission.py",
        "        if load.waiting_since is None:\n            return 0.0\n"
        "        nobody_since = max(self._admitted_at, load.waiting_since)\n"
        "        return max(load.num_waiting * self._seconds_per_admission, now - nobody_since)\n",
        "        return max(load.num_waiting, 1) * self._seconds_per_admission\n",
        "service/test_admission.py::test_nobody_waiting_is_no_wait_whatever_was_before",
        "service/test_admission.py::test_after_a_burst_nobody_is_refused_for_it",
        "service/test_admission.py::test_an_engine_that_admits_nobody_makes_everybody_wait",
    ),
    protection(
        "a deadline that the queue would miss is refused",
        "service/admission.py",
        "        if seconds_left is not None and wait > seconds_left:\n",
        "        if seconds_left is not None and wait < 0:\n",
        "service/test_admission.py::test_the_wait_is_that_of_those_who_wait_now",
        "service/test_admission.py::test_a_refusal_for_the_deadline_says_so",
    ),
    protection(
        "turns begun and not ended are limited",
        "service/admission.py",
        "        if load.num_turns >= self._turns_max:\n",
        "        if load.num_turns < 0:\n",
        "service/test_daemon.py::test_too_many_turns_are_refused_with_a_time_to_come_back",
    ),
    protection(
        "a known request is looked up before a refusal",
        "service/daemon.py",
        "        if (live := await conversations.known(ask)) is not None:\n"
        "            return live\n",
        "",
        "service/test_admission.py::test_nobody_is_refused_because_of_the_own_turn",
        "service/test_admission.py::test_a_tenant_in_debt_may_still_hear_its_turn",
    ),
    protection(
        "attaching to a live turn asks neither admission nor store",
        "service/daemon.py",
        "        if (live := conversations.attach(ask)) is not None:\n            return live\n",
        "",
        "service/test_admission.py::test_attaching_does_not_wait_for_the_store",
    ),
    protection(
        "a turn waits for a reader who is on the way",
        "service/conversations.py",
        "        if self.arriving.expects(live):\n",
        "        if self.arriving.expects(live) and live.finish is not None:\n",
        "service/test_admission.py::test_a_turn_waits_for_a_reader_whom_the_store_holds_up",
    ),
    protection(
        "turns that are about to begin count for their tenant",
        "service/daemon.py",
        "            turns.num_of_tenant(tenant, conversation_id) + arriving.num_of_tenant(tenant),\n",
        "            turns.num_of_tenant(tenant, conversation_id),\n",
        "service/test_admission.py::test_turns_about_to_begin_count_for_their_tenant",
    ),
    protection(
        "who leaves early pays",
        "service/conversations.py",
        "        if finish is FinishReason.CANCELLED:  # its client left; what failed costs nothing\n",
        "        if finish is FinishReason.STOP:\n",
        "service/test_admission.py::test_who_leaves_early_pays_for_what_was_computed",
    ),
    protection(
        "a tenant's turns and tokens are limited",
        "service/admission.py",
        "return allowance.exceeded(load.num_turns_of_tenant, now) or allowance.calls_exceeded()",
        "return allowance.calls_exceeded()",
        "cli/test_serve.py::test_a_tenants_limits_hold",
    ),
    protection(
        "the same request is known though defaults have changed",
        "service/draft.py",
        "        if self.given_sampling is not None:\n",
        "        if self.given_sampling is not None and not self.given_sampling:\n",
        "service/test_replay.py::test_other_defaults_make_no_other_request",
    ),
    protection(
        "logprobs and parts of a reply are stored with it",
        "service/turns.py",
        "            stream_of(live),\n",
        "            {},\n",
        "service/test_replay.py::test_logprobs_come_again_over_the_wire",
    ),
    protection(
        "a damaged history is not written to",
        "service/daemon.py",
        "        if not self.history_problems:\n            return None\n",
        "        if self.history_problems is not None:\n            return None\n",
        "service/test_admission.py::test_a_damaged_history_is_read_and_not_written_to",
    ),
    protection(
        "long texts are tokenized beside the store thread",
        "service/history.py",
        "        if not isinstance(drafted, Draft) or drafted.num_characters > short_characters:\n",
        "        if not isinstance(drafted, Draft):\n",
        "service/test_fairness.py::test_long_texts_are_tokenized_beside_the_store_thread",
    ),
    protection(
        "a system prompt is tried out beside the store thread",
        "service/conversations.py",
        "        num_tokens = await self._tokenized(\n",
        "        num_tokens = await self._threads.in_store(\n",
        "service/test_fairness.py::test_long_texts_are_tokenized_beside_the_store_thread",
    ),
    protection(
        "tokenizing is done beside the loop",
        "service/threads.py",
        "        return await self._text_pool.run(tenant, function)\n",
        "        return function()\n",
        "service/test_withstand.py::test_a_very_long_message_is_tokenised_beside_the_loop",
    ),
    protection(
        "a text that cannot fit is refused by its length",
        "service/draft.py",
        "    if size > BYTES_PER_TOKEN_MAX * context_max:\n",
        "    if size < 0:\n",
        "service/test_daemon.py::test_a_message_that_cannot_fit_leaves_the_conversation_unharmed",
    ),
    protection(
        "tenants come by turns",
        "service/fair_pool.py",
        "                self._queues[tenant] = queue  # behind all others\n",
        "                self._queues = {tenant: queue, **self._queues}\n",
        "service/test_fairness.py::test_tenants_come_by_turns_and_each_in_its_own_order",
        "service/test_fairness.py::test_a_flood_of_one_tenant_is_passed_by_the_others",
    ),
    protection(
        "reads have a thread of their own",
        "service/threads.py",
        "        return await self._read_thread.run(tenant, lambda: function(*arguments, **named))\n",
        "        return await self._store_thread.run(tenant, lambda: function(*arguments, **named))\n",
        "service/test_fairness.py::test_reading_waits_for_nobody_who_writes",
    ),
    protection(
        "sampling values are checked",
        "service/history.py",
        "        if (problem := ask.options.sampling.problem(self._vocab_size)) is not None:\n",
        "        if (problem := ask.options.sampling.problem(self._vocab_size)) == ():\n",
        "service/test_daemon.py::test_what_cannot_be_done_is_refused_with_its_reason",
    ),
    Protection(
        "a second turn of a conversation is refused, in the draft and by the store",
        (
            Change(
                "pensieve/service/history.py",
                "        if conversation.running_turn_id is not None:\n"
                "            raise TurnRunning(conversation_id, str(conversation.running_turn_id))\n"
                "        if ask.expected",
                "        if ask.expected",
            ),
            Change(
                "pensieve/store/conversation_store.py",
                "must_run=False)\n            _refuse_running(conversation)\n",
                "must_run=False)\n",
            ),
        ),
        ("service/test_daemon.py::test_a_second_turn_while_one_runs_is_aborted_and_names_it",),
    ),
    Protection(
        "a request_id that was answered begins nothing, in the draft and in the store",
        (
            Change(
                "pensieve/service/history.py",
                "            if known is not None:\n",
                "            if known is not None and known.reply is None:\n",
            ),
            Change(
                "pensieve/store/conversation_store.py",
                "            if stored and TurnState.RUNNING not in LEGAL_TRANSITIONS[stored.turn.state]:\n",
                "            if stored and stored.turn.state is TurnState.RUNNING:\n",
            ),
        ),
        (
            "service/test_daemon.py::test_the_same_request_id_replays_and_computes_nothing",
            "store/test_turns.py::test_the_same_request_replays_what_was_stored",
        ),
    ),
    protection(
        "a stale revision is refused",
        "service/history.py",
        "        if ask.expected_revision not in (None, conversation.revision):\n",
        "        if ask.expected_revision == -1:\n",
        "service/test_conversations.py::test_a_revision_that_was_wrong_when_it_was_read_stays_wrong",
    ),
    protection(
        "a draft begins on the conversation that it was made for",
        "service/history.py",
        "            expected_created_at=conversation.created_at,\n",
        "",
        "service/test_conversations.py::test_a_draft_does_not_begin_on_another_conversation_of_the_same_name",
    ),
    protection(
        "a turn without a reader is given up",
        "service/readers.py",
        "            self._on_abandoned(live)\n",
        "",
        "service/test_daemon.py::test_a_client_that_leaves_for_good_leaves_no_trace",
        "service/test_chaos.py::test_healthy_streams_come_whole_beside_abandoned_stalled_and_slow_ones",
    ),
    protection(
        "a cancel ends a turn at the last token that was taken",
        "service/turns.py",
        "live.history_tokens + live.prompt_tokens + live.num_tokens)",
        "live.history_tokens + live.prompt_tokens + 10**6)",
        "service/test_turns.py::test_what_was_taken_before_a_cancel_is_kept_and_nothing_after_it",
    ),
    protection(
        "a turn that was cancelled takes no token",
        "service/turns.py",
        "live.phase is Phase.RUNNING and not live.cancelled:\n            live.take(token)",
        "live.phase is Phase.RUNNING:\n            live.take(token)",
        "service/test_turns.py::test_what_was_taken_before_a_cancel_is_kept_and_nothing_after_it",
    ),
    protection(
        "turns beyond the limit are told when to come back",
        "service/grpc/translate.py",
        "COME_BACK = {QueueFull: 1.0, Unavailable: 0.2}",
        "COME_BACK = {Unavailable: 0.2}",
        "service/test_overload.py::test_ten_times_the_load_costs_the_carried_ones_nothing",
    ),
    protection(
        "a deletion waits for those who read, and for nobody in the store thread",
        "service/conversations.py",
        "                await erased(self._history.finish_erasure, self._threads)\n",
        "                pass\n",
        "service/test_erasing.py::test_a_deletion_waits_for_a_reader_and_nobody_waits_for_the_deletion",
    ),
    protection(
        "a deletion that is repeated waits like the first one",
        "service/history.py",
        "            return Deleted(None, error, self._store.erasure.pending)\n",
        "            return Deleted(None, error, False)\n",
        "service/test_erasing.py::test_a_client_that_deletes_again_waits_as_the_first_one_does",
    ),
    protection(
        "a refusal is no garbage",
        "service/fair_pool.py",
        "            del job\n",
        "            pass\n",
        "service/test_fairness.py::test_a_refusal_is_no_garbage_that_only_a_collection_frees",
    ),
    protection(
        "the sweep erases what was deleted",
        "service/daemon.py",
        "            self._erasing.sweep()\n",
        "",
        "service/test_erasing.py::test_what_a_reader_kept_is_erased_when_it_has_ended",
        "service/test_erasing.py::test_space_comes_back_while_turns_are_served",
    ),
    protection(
        "an engine that says nothing is killed",
        "service/heartbeat.py",
        "        if self.silent_seconds > patience.silent_seconds_max:\n",
        "        if self.silent_seconds < 0:\n",
        "service/test_hung_engine.py::test_an_engine_that_is_stopped_is_killed_and_started_again",
        "service/test_heartbeat.py::test_silence_is_a_hang_after_so_many_seconds_of_the_services_own",
    ),
    protection(
        "an engine whose main thread stands still is killed",
        "service/heartbeat.py",
        "        if 0 < patience.round_seconds_max < self.round_seconds:\n",
        "        if self.round_seconds < 0:\n",
        "service/test_hung_engine.py::test_an_engine_whose_main_thread_hangs_is_killed_and_started_again",
    ),
    protection(
        "seconds of silence are counted by the service's own ticks",
        "service/engine_client.py",
        "            await asyncio.sleep(self._patience.tick_seconds)\n",
        "            before = self._loop.time()\n"
        "            await asyncio.sleep(self._patience.tick_seconds)\n"
        "            heartbeat.silent_seconds += self._loop.time() - before - self._patience.tick_seconds\n",
        "service/test_hung_engine.py::test_a_service_that_was_stopped_leaves_its_engine_alone",
    ),
    protection(
        "a long iteration publishes signs of life",
        "launch/engine_process.py",
        "pack_events(events) if events else pack_alive(engine.num_rounds)",
        'pack_events(events) if events else b""',
        "service/test_hung_engine.py::test_an_iteration_that_takes_longer_than_a_heartbeat_is_left_alone",
        "service/test_hung_engine.py::test_an_idle_engine_is_left_alone",
    ),
    protection(
        "a reader thread of the engine that fails ends it",
        "launch/engine_process.py",
        "            traceback.print_exc()\n"
        "            status = DeviceError.exit_code\n"
        "        os._exit(status)\n",
        "            traceback.print_exc()\n            return\n        os._exit(status)\n",
        "service/test_hung_engine.py::test_an_engine_that_fails_to_take_a_message_is_started_again",
    ),
    protection(
        "an engine's last words are heard though its pipe is reset",
        "service/engine_client.py",
        "        if isinstance(exc, ConnectionResetError):\n",
        "        if isinstance(exc, BrokenPipeError):\n",
        "service/test_hung_engine.py"
        "::test_the_last_words_of_an_engine_that_left_something_unread_are_heard",
    ),
    protection(
        "a supervisor that fails ends the service",
        "service/engine_client.py",
        "            self._on_failure(error)\n",
        "",
        "service/test_hung_engine.py::test_a_supervisor_that_fails_ends_the_service",
        "service/test_hung_engine.py::test_a_service_whose_supervisor_failed_exits_with_a_message",
    ),
    protection(
        "a start that fails for an unforeseen reason is tried again",
        "service/engine_client.py",
        "                except Exception:\n"
        '                    log.exception("the engine did not start")\n'
        "                    continue\n",
        "",
        "service/test_hung_engine.py::test_an_unforeseen_failure_of_a_start_is_tried_again",
    ),
    protection(
        "a turn whose end fails for an unforeseen reason has one",
        "service/conversations.py",
        "            with contextlib.suppress(Exception):\n"
        "                await self._threads.in_store(live.tenant, self._history.interrupt, live.turn_id)\n"
        '            self._fail(live, TurnFailed("INTERNAL", "the turn could not be ended"))\n',
        "            return\n",
        "service/test_hung_engine.py::test_a_turn_whose_end_fails_unforeseen_has_one",
    ),
    protection(
        "a background task that fails ends the service",
        "service/threads.py",
        '            log.error("a task of the daemon failed", exc_info=error)\n'
        "            self._on_failure(error)\n",
        '            log.error("a task of the daemon failed", exc_info=error)\n',
        "service/test_hung_engine.py::test_a_task_of_the_daemon_that_fails_unforeseen_ends_the_service",
    ),
    protection(
        "systemd hears of a service only if its store answers",
        "launch/systemd.py",
        "        await answers()\n",
        "",
        "cli/test_serve.py::test_a_service_whose_store_does_not_answer_tells_systemd_nothing",
    ),
    protection(
        "systemd hears of a service again and again",
        "launch/systemd.py",
        '        notify("WATCHDOG=1")\n',
        "",
        "cli/test_serve.py::test_systemd_hears_of_a_service_as_long_as_it_answers",
    ),
    protection(
        "a turn that kills the engine fails after three deaths",
        "service/suspects.py",
        "        if num_deaths >= DEATHS_MAX:\n",
        "        if num_deaths >= 1000:\n",
        "service/test_suspects.py::test_a_turn_that_kills_the_engine_fails_after_three_deaths",
    ),
    protection(
        "turns that may have killed the engine are tried alone",
        "service/suspects.py",
        "        return self._is_grave(live) and any(\n",
        "        return False and any(\n",
        "service/test_suspects.py::test_turns_that_may_both_have_killed_the_engine_are_tried_one_after_the_other",
    ),
    protection(
        "an engine that fails has had only the turns that it ended itself",
        "service/daemon.py",
        "            if had_the_rest and self._dies_of(live):\n",
        "            if self._dies_of(live):\n",
        "service/test_suspects.py"
        "::test_a_turn_that_comes_when_the_engine_has_failed_has_no_part_in_it",
    ),
    protection(
        "an engine's start has descriptors in reserve",
        "service/spare_descriptors.py",
        "        while len(self._held) < self._count:\n",
        "        while len(self._held) < 0:\n",
        "service/test_exhaustion.py::test_an_engine_starts_again_though_connections_have_all_descriptors",
        "service/test_exhaustion.py::test_descriptors_are_held_in_reserve_and_given_back",
    ),
    protection(
        "what waits for an engine that reads nothing is limited",
        "service/engine_client.py",
        "        if num_unsent > UNSENT_BYTES_MAX and not isinstance(message, Freeing):\n",
        "        if num_unsent < 0:\n",
        "service/test_exhaustion.py::test_what_waits_for_a_stopped_engine_is_bounded",
    ),
    protection(
        "whoever brings a message to a full mailbox waits",
        "launch/engine_process.py",
        "                mailbox.put_when_there_is_room(message_of(frame))\n",
        "                mailbox.put(message_of(frame))\n",
        "service/test_exhaustion.py::test_more_messages_than_the_mailbox_takes_end_no_engine",
    ),
    protection(
        "an engine that ended is started again",
        "service/engine_client.py",
        "            self._on_down(reason)\n",
        "            self._on_down(reason)\n            return\n",
        "service/test_daemon.py::test_an_engine_that_is_killed_costs_recompute_and_nothing_else",
        "service/test_withstand.py::test_a_device_without_memory_costs_the_running_turns_a_repetition",
        "service/test_withstand.py::test_a_copy_that_fails_ends_the_engine_and_no_conversation",
    ),
    protection(
        "the turns of an engine that ended fail at once",
        "service/daemon.py",
        "        self.threads.spawn(self.conversations.interrupt_all(failure))\n",
        "",
        "service/test_daemon.py::test_an_engine_that_is_killed_costs_recompute_and_nothing_else",
    ),
    protection(
        "a service that stood still says so",
        "service/daemon.py",
        "            if late > LATE_SECONDS:\n",
        "            if late > 1000 * LATE_SECONDS:\n",
        "service/test_withstand.py::test_a_service_that_stood_still_says_so_and_goes_on",
    ),
    Protection(
        "no deadline goes by the wall clock",
        (
            Change(
                "pensieve/service/daemon.py",
                "        now = self._loop.time()\n        refusal = ",
                "        now = time.time()\n        refusal = ",
            ),
            Change(
                "pensieve/launch/engine.py",
                "        return time.monotonic()\n",
                "        return time.time()\n",
            ),
        ),
        (
            "service/test_withstand.py::test_the_wall_clock_is_asked_for_records_and_for_nothing_else",
        ),
    ),
    protection(
        "a daemon that stops finishes its turns",
        "service/daemon.py",
        "        while self.num_turns and self._loop.time() < deadline:\n",
        "        while self.num_turns < 0:\n",
        "cli/test_serve.py::test_sigterm_drains_and_the_second_one_hurries",
        "service/test_daemon.py::test_draining_takes_no_new_turn_and_finishes_the_running_ones",
    ),
    protection(
        "another tokenizer's log is made anew",
        "service/history.py",
        "        if conversation.fingerprint != self._fingerprint:\n"
        "            return self._outdated(conversation)\n"
        "        is_new",
        "        is_new",
        "cli/test_chat.py::test_another_tokenizer_retokenises_the_text_and_says_so",
    ),
    protection(
        "a history of another tokenizer is tokenized beside the store thread",
        "service/conversations.py",
        "        tokens = await self._threads.in_text_pool(tenant, outdated.tokens)\n",
        "        tokens = await self._threads.in_store(tenant, outdated.tokens)\n",
        "service/test_fairness.py::test_a_history_of_another_tokenizer_keeps_nobody_else_waiting",
    ),
    protection(
        "a conversation that has changed meanwhile gets no tokens of the one before",
        "service/history.py",
        "        if self._store.get_conversation(conversation_id, tenant=tenant) != conversation:\n"
        "            return\n",
        "",
        "service/test_fairness.py"
        "::test_a_conversation_that_was_made_anew_gets_no_tokens_of_the_old_one",
    ),
    protection(
        "admin without a daemon is one line and an exit code",
        "cli/main.py",
        "        return error.exit_code\n",
        "        return 0\n",
        "cli/test_serve.py::test_admin_without_a_daemon_says_so",
    ),
    protection(
        "an end takes out its own turn's entry",
        "service/turns.py",
        "        if self._of_request.get(request) is live:",
        "        if request in self._of_request:",
        "service/test_request_ids.py"
        "::test_a_request_id_may_be_that_of_a_turn_that_is_ending_in_a_deleted_conversation",
    ),
    protection(
        "a request that comes again waits for its first call",
        "service/daemon.py",
        "        await conversations.arriving.gone("
        "ask.tenant, ask.conversation_id, ask.request_id)\n",
        "",
        "service/test_request_ids.py::test_who_says_the_same_again_waits_for_the_first_call",
    ),
    protection(
        "lookups are counted by tenant",
        "service/conversations.py",
        "        if not ask.request_id or self._num_lookups[ask.tenant] == LOOKUPS_MAX:\n",
        "        if not ask.request_id or sum(self._num_lookups.values()) >= LOOKUPS_MAX:\n",
        "service/test_request_ids.py::test_lookups_of_one_tenant_leave_another_its_own",
    ),
)
