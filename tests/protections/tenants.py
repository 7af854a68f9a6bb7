"""Protections of tenants from each other: limits, the fair queue, what is paid for, the audit log."""

from tests.protections import Change, Protection, protection

PROTECTIONS = (
    protection(
        "the next turn is that of the share that has used least",
        "core/prefill_order.py",
        "            queued.used(turn),\n            -turn.level,\n",
        "            -turn.level,\n",
        "core/test_fair_queue.py::test_a_flood_delays_another_share_by_one_turn",
        "core/test_fair_queue.py::test_a_flood_of_a_high_priority_moves_nobody_else",
        "service/test_tenants.py::test_a_flood_pushes_nobody_behind_its_backlog",
    ),
    protection(
        "what a share uses counts by its weight",
        "core/fair_queue.py",
        "        share.used += num_tokens / share.weight\n",
        "        share.used += num_tokens\n",
        "core/test_fair_queue.py::test_what_waiting_shares_get_is_as_their_weights",
        "service/test_tenants.py"
        "::test_tenants_that_all_have_more_than_can_run_get_it_by_their_weights",
    ),
    protection(
        "a share that did not wait has saved up nothing",
        "core/fair_queue.py",
        "            share.used = max(share.used, self._floor(share))\n",
        "",
        "core/test_fair_queue.py::test_who_did_not_ask_has_saved_up_nothing",
    ),
    protection(
        "a long prompt holds up its own share alone",
        "core/scheduler.py",
        "            if first is not None and (turn is None or used(turn) > used(first)):\n",
        "            if first is not None:\n",
        "core/test_fair_queue.py::test_a_long_prompt_holds_up_its_own_share_alone",
        "core/test_fair_queue.py::test_two_long_prompts_of_two_shares_grow_alike",
    ),
    protection(
        "a line that was passed often enough is next",
        "core/fair_queue.py",
        "if self.passed.get(line, 0) >= _passes_allowed(first, line)",
        "if self.passed.get(line, 0) < 0",
        "core/test_preemption.py::test_low_priorities_end_beside_a_stream_of_high_ones",
        "core/test_prefill_order.py::test_short_prompts_pass_long_ones_and_not_for_ever",
    ),
    protection(
        "a higher level takes the place of a lower one",
        "core/preemption.py",
        "        if turn.warm or waiting.level > turn.level:\n",
        "        if turn.warm:\n",
        "core/test_preemption.py::test_a_higher_priority_waits_for_at_most_two_iterations",
        "core/test_preemption.py::test_the_lowest_and_latest_gives_way_and_is_back_first",
    ),
    protection(
        "who gave way rises",
        "core/turn.py",
        "            self.level += 1\n",
        "            self.level += 0\n",
        "core/test_preemption.py::test_who_gave_way_rises_so_nobody_gives_way_for_ever",
    ),
    protection(
        "a share that holds most gives pages back",
        "core/preemption.py",
        "would_hold < held[share])\n",
        "would_hold < 0)\n",
        "core/test_preemption.py::test_a_share_that_holds_everything_gives_back_a_part",
        "core/test_preemption.py::test_a_flood_at_the_highest_priority_leaves_others_their_share",
    ),
    protection(
        "a part of the prompts' tokens is for the one that came first",
        "core/iteration_draft.py",
        "HELD_BACK = 0.25\n",
        "HELD_BACK = 0.0\n",
        "core/test_prefill_order.py::test_what_is_held_back_for_the_first_that_came_is_a_quarter",
    ),
    protection(
        "who does not fit into memory is passed by a few only",
        "core/scheduler.py",
        "turn.num_passed < PASSES_MAX for turn in self.turns\n",
        "turn.num_passed < 1000 for turn in self.turns\n",
        "core/test_admission.py"
        "::test_who_does_not_fit_keeps_a_bounded_number_of_others_waiting_and_is_kept_by_one",
    ),
    protection(
        "the shortest remaining prompt goes first",
        "core/prefill_order.py",
        "    return -turn.level, num_missing(turn), turn.arrival\n",
        "    return -turn.level, 0, turn.arrival\n",
        "core/test_prefill_order.py"
        "::test_the_shortest_remaining_goes_first_and_the_first_that_came_goes_on",
    ),
    protection(
        "the last places to wait are left to others",
        "service/admission.py",
        "        if len(self.allowances) > 1 and load.num_turns_of_tenant > ROOM_SHARE * num_left:\n",
        "        if load.num_turns_of_tenant < 0:\n",
        "service/test_tenants.py::test_a_flood_leaves_others_room_to_begin",
    ),
    protection(
        "what would store more than storage_bytes is refused",
        "service/history.py",
        "(taken := self._store.stored_bytes(tenant)) >= most:\n",
        "(taken := self._store.stored_bytes(tenant)) < 0:\n",
        "service/test_tenants.py"
        "::test_a_tenant_at_its_storage_limit_may_delete_and_read_and_nothing_that_stores",
        "service/test_tenants.py"
        "::test_a_reply_that_was_stored_is_repeated_and_a_turn_that_runs_is_stored_above_the_limit",
    ),
    protection(
        "what is wiped is stored no longer",
        "store/bodies.py",
        "        stored_bytes.count(conn, tenant, -num_bytes)\n",
        "",
        "store/test_stored_bytes.py"
        "::test_each_thing_that_is_stored_counts_once_until_it_is_deleted",
        "store/test_stored_bytes.py::test_whatever_is_done_the_count_is_what_the_records_add_up_to",
    ),
    protection(
        "requests are counted",
        "service/grpc/calls.py",
        "        exceeded = allowance.calls_exceeded(allowed) or allowance.request(now)\n",
        "        exceeded = allowance.calls_exceeded(allowed)\n",
        "service/test_tenants.py::test_requests_are_counted_whatever_they_ask",
    ),
    protection(
        "a tenant beyond its limits is told so at a pace",
        "service/limits.py",
        "        wait = min(self.seconds_until(1.0, now), PAUSE_SECONDS_MAX)\n",
        "        wait = 0.0\n",
        "service/test_limits.py"
        "::test_refusals_beyond_a_burst_are_told_at_a_pace_of_a_tenant_beyond_its_limits",
        "service/test_tenants.py"
        "::test_who_is_beyond_its_limits_is_told_so_at_a_pace_and_nobody_else_waits",
    ),
    protection(
        "calls of a tenant in debt wait for their pace",
        "service/grpc/calls.py",
        "        await self._pause(allowance.seconds_to_begin(now))\n",
        "",
        "service/test_tenants.py"
        "::test_calls_of_a_tenant_in_debt_begin_at_a_pace_and_nobody_else_waits",
    ),
    protection(
        "calls of a tenant in debt have a pace",
        "service/limits.py",
        "        return 0.0 if self.in_debt(now) is None else self._calls.pause(now)\n",
        "        return 0.0\n",
        "service/test_limits.py::test_calls_of_a_tenant_in_debt_begin_at_a_pace",
    ),
    protection(
        "errors wait for their pace",
        "service/grpc/calls.py",
        "        await self._pause(self._allowance.seconds_to_refuse(error, _now()))\n",
        "        pass\n",
        "service/test_tenants.py"
        "::test_who_is_beyond_its_limits_is_told_so_at_a_pace_and_nobody_else_waits",
    ),
    protection(
        "calls at once are counted",
        "service/grpc/calls.py",
        "        exceeded = allowance.calls_exceeded(allowed) or allowance.request(now)\n",
        "        exceeded = allowance.request(now)\n",
        "service/test_tenants.py::test_calls_at_once_are_counted_until_they_have_ended",
    ),
    protection(
        "a call that would begin a turn is refused like others",
        "service/admission.py",
        "return allowance.exceeded(load.num_turns_of_tenant, now) or allowance.calls_exceeded()",
        "return allowance.exceeded(load.num_turns_of_tenant, now)",
        "service/test_tenants.py::test_calls_at_once_are_counted_until_they_have_ended",
    ),
    protection(
        "a call that has ended counts no longer",
        "service/grpc/calls.py",
        "        self._allowance.num_calls -= 1\n",
        "",
        "service/test_tenants.py::test_calls_at_once_are_counted_until_they_have_ended",
        "service/test_tenants.py::test_calls_that_are_cancelled_at_once_count_no_longer",
    ),
    protection(
        "a client whose connection broke is let in beside its old call",
        "service/grpc/calls.py",
        "        allowed = 2 if method in (SEND_METHOD, CANCEL_METHOD) else 1\n",
        "        allowed = 1\n",
        "service/test_tenants.py"
        "::test_a_client_whose_connection_broke_comes_back_though_its_old_call_counts",
    ),
    protection(
        "a warm is refused like a turn",
        "service/daemon.py",
        "        if (exceeded := self.admission.exceeded(tenant, load, now)) is not None:\n"
        "            self.meter.refused(exceeded)\n"
        "            raise exceeded\n",
        "",
        "service/test_tenants.py::test_a_warm_counts_as_a_turn_and_is_paid_for",
        "service/test_tenants.py::test_warms_take_places_among_those_who_wait",
    ),
    protection(
        "a warm is paid for",
        "service/conversations.py",
        "                    self._charge_tokens(tenant, usage.new_tokens + usage.recomputed_tokens)\n",
        "",
        "service/test_tenants.py::test_a_warm_counts_as_a_turn_and_is_paid_for",
    ),
    protection(
        "warms end with their engine",
        "service/daemon.py",
        "        self.conversations.turns.engine_lost()\n",
        "",
        "service/test_tenants.py::test_warms_that_die_with_the_engine_count_no_more",
    ),
    protection(
        "who is in debt changes nothing",
        "service/daemon.py",
        "            raise debt\n",
        "            pass\n",
        "service/test_tenants.py"
        "::test_what_changes_the_history_is_paid_for_and_a_tenant_in_debt_may_read_and_delete",
    ),
    protection(
        "a system prompt is paid for",
        "service/conversations.py",
        "        self._charge_tokens(settings.tenant, num_tokens)\n",
        "",
        "service/test_tenants.py"
        "::test_what_changes_the_history_is_paid_for_and_a_tenant_in_debt_may_read_and_delete",
    ),
    Protection(
        "a text that is tokenized and does not fit is paid for, wherever that is noticed",
        (
            Change(
                "pensieve/service/conversations.py",
                "            self._charge_tokens(ask.tenant, sum(map(len, prompt)))\n",
                "",
            ),
            Change(
                "pensieve/service/conversations.py",
                "            self._charge_tokens(tenant, full.tokens)\n",
                "",
            ),
        ),
        ("service/test_tenants.py::test_a_text_that_is_tokenized_and_does_not_fit_is_paid_for",),
    ),
    protection(
        "answers that nobody reads are bounded",
        "service/grpc/calls.py",
        "        if (exceeded := self._allowance.unread_exceeded(num_bytes)) is not None:\n",
        "        if (exceeded := self._allowance.unread_exceeded(0)) is not None:\n",
        "service/test_tenants.py::test_what_a_tenants_clients_do_not_read_is_bounded",
    ),
    protection(
        "a piece of a stream waits for room",
        "service/grpc/calls.py",
        "        while allowance.num_unread_bytes and allowance.unread_exceeded(num_bytes) is not None:\n",
        "        while num_bytes < 0:\n",
        "service/test_tenants.py"
        "::test_a_piece_of_a_stream_waits_for_room_and_a_large_one_alone_goes",
    ),
    protection(
        "limits that change are in force",
        "service/limits.py",
        "        self.limits = limits\n        self.tokens.change(",
        "        self.tokens.change(",
        "service/test_tenants.py"
        "::test_limits_that_change_hold_at_once_also_for_a_tenant_with_running_turns",
    ),
    protection(
        "the store hears of limits that change",
        "service/daemon.py",
        "        self.threads.spawn(self._limit_storage())\n",
        "",
        "service/test_tenants.py"
        "::test_limits_that_change_hold_at_once_also_for_a_tenant_with_running_turns",
    ),
    protection(
        "a debt outlasts a change of limits",
        "service/limits.py",
        "        self.saved = min(self.saved, self.most) if had_rate else self.most\n",
        "        self.saved = self._most\n",
        "service/test_tenants.py::test_a_debt_outlasts_a_change_of_limits",
    ),
    protection(
        "lines of the audit log that are lost are counted",
        "service/audit_log.py",
        "            self._lose(len(lines))\n",
        "",
        "service/test_audit.py::test_a_full_disk_is_reported_once_and_what_is_lost_is_counted",
    ),
    protection(
        "no part of a line stays in the audit log",
        "service/audit_log.py",
        "            os.ftruncate(self._file, before)  # the disk is full: no part of a line stays\n",
        "",
        "service/test_audit.py::test_a_full_disk_is_reported_once_and_what_is_lost_is_counted",
    ),
    protection(
        "nobody waits for the disk of the audit log",
        "service/audit_log.py",
        "            self._lines.put_nowait(json.dumps(entry))\n",
        "            self._lines.put(json.dumps(entry))\n",
        "service/test_audit.py::test_a_disk_that_stands_still_keeps_nobody",
    ),
    protection(
        "lines that wait for the disk of the audit log are bounded",
        "service/audit_log.py",
        " = Queue(LINES_MAX)\n",
        " = Queue()\n",
        "service/test_audit.py::test_a_disk_that_stands_still_keeps_nobody",
    ),
    protection(
        "an audit log that was moved away is made anew",
        "service/audit_log.py",
        "        if self._file < 0 or self._was_moved():\n",
        "        if self._file < 0:\n",
        "service/test_audit.py::test_a_file_that_is_moved_away_is_made_anew",
    ),
    protection(
        "the audit log is its owner's alone",
        "service/audit_log.py",
        "        os.fchmod(self._file, 0o600)\n",
        "",
        "service/test_audit.py::test_the_file_is_its_owners_alone_and_appended_to",
    ),
    protection(
        "a line break in a name is quoted in the audit log",
        "service/audit_log.py",
        "            self._lines.put_nowait(json.dumps(entry))\n",
        '            self._lines.put_nowait(json.dumps(entry).replace("\\\\n", "\\n"))\n',
        "service/test_audit.py::test_each_line_is_one_object_whatever_is_quoted",
        "service/test_audit.py::test_a_name_with_line_breaks_makes_no_line_of_its_own",
    ),
    protection(
        "of many refusals a few are written down",
        "service/grpc/audit.py",
        "        if self._refusals.seconds_until(1.0, self._now()):\n",
        "        if self._refusals is None:\n",
        "service/test_audit.py::test_somebody_without_a_token_does_not_fill_the_disk",
    ),
)
