"""Protections of the sockets: what strangers and clients may send, how large it may be, who may come in."""

from tests.protections import Change, Protection, protection

PROTECTIONS = (
    protection(
        "a token is appended to a file that can be used with it",
        "cli/token.py",
        "            limits_of(tokens_of(path, before + added))\n",
        "",
        "cli/test_token.py::test_a_file_that_the_daemon_would_refuse_is_left_as_it_is",
    ),
    protection(
        "bytes that are no message are an error of the client",
        "service/grpc/auth.py",
        "    except (DecodeError, UnicodeDecodeError, ValueError):\n        raise InvalidArgument(",
        "    except InvalidArgument:\n        raise InvalidArgument(",
        "service/test_fuzz.py::test_bytes_that_are_no_request_have_their_own_code",
    ),
    protection(
        "a client that leaves while it is written to is no incident",
        "service/grpc/auth.py",
        "            except grpc.aio.InternalError:",
        "            except grpc.aio.UsageError:",
        "service/test_figures.py::test_a_client_that_leaves_while_it_is_written_to_is_no_failure_of_ours",
    ),
    protection(
        "a request's fields are measured before it is parsed",
        "service/grpc/auth.py",
        "        sizes.check(kind, raw)\n",
        "        pass\n",
        "service/test_sizes.py::test_a_field_that_is_too_large_is_refused_by_its_name",
    ),
    protection(
        "a page of messages ends by bytes",
        "store/message_rows.py",
        "    last = last_within(lengths, PAGE_BYTES_MAX)\n",
        "    last = last_within(lengths, PAGE_BYTES_MAX * 1000)\n",
        "service/test_sizes.py::test_pages_of_messages_end_by_bytes_and_leave_none_out",
    ),
    protection(
        "a page of conversations ends by bytes",
        "store/conversation_rows.py",
        "last_within(lengths[:limit], PAGE_BYTES_MAX)",
        "last_within(lengths[:limit], PAGE_BYTES_MAX * 1000)",
        "store/test_conversations.py::test_a_page_ends_by_bytes_too",
    ),
    protection(
        "what an earlier version took, and is too large, is left out of a list",
        "service/grpc/translate.py",
        "sum(each.ByteSize() for each in made) > bytes_max",
        "bytes_max < 0",
        "service/test_sizes.py::test_what_an_earlier_version_took_is_listed_without_what_is_too_large",
    ),
    protection(
        "a window of 16 KiB for what nobody reads yet",
        "service/grpc/server.py",
        "WINDOW_BYTES = 16 << 10 ",
        "WINDOW_BYTES = 4 << 20 ",
        "service/test_peers.py::test_somebody_with_a_token_has_few_bodies_on_their_way",
    ),
    protection(
        "strangers have few calls of a connection at once",
        "service/grpc/incoming.py",
        "        if calls[peer] >= self._strangers.calls_max:\n",
        "        if calls[peer] < 0:\n",
        "service/test_peers.py"
        "::test_strangers_have_few_checks_of_a_connection_until_their_answers_are_taken",
    ),
    protection(
        "strangers have few watches",
        "service/grpc/incoming.py",
        "        if self._num_watches >= self._strangers.watches_max:\n",
        "        if self._num_watches < 0:\n",
        "service/test_peers.py::test_strangers_have_few_watches_and_these_are_no_checks",
    ),
    protection(
        "a watch is no check",
        "service/grpc/incoming.py",
        "        if is_watch:\n",
        "        if not peer:\n",
        "service/test_peers.py::test_strangers_have_few_watches_and_these_are_no_checks",
    ),
    protection(
        "a stranger's body makes way for the next",
        "service/grpc/incoming.py",
        "                oldest.reschedule(0.0)\n",
        "                pass\n",
        "service/test_peers.py::test_a_strangers_body_that_does_not_end_makes_way_for_the_next",
    ),
    protection(
        "a watch without a token ends some time",
        "service/grpc/server.py",
        "            async with asyncio.timeout(seconds):\n",
        "            async with asyncio.timeout(None):\n",
        "service/test_peers.py::test_a_watch_without_a_token_ends_some_time",
    ),
    protection(
        "the operator's socket has places of its own",
        "service/grpc/auth.py",
        "LOCAL_PREFIX if _is_local(peer) else by.tenant",
        "by.tenant",
        "service/test_peers.py::test_half_open_requests_do_not_keep_the_operator_out",
    ),
    protection(
        "a tenant has few bodies on their way",
        "service/grpc/incoming.py",
        "asyncio.Semaphore(self._known.receiving_max)",
        "asyncio.Semaphore(1_000_000)",
        "service/test_peers.py::test_somebody_with_a_token_has_few_bodies_on_their_way",
    ),
    protection(
        "a body that does not end is given up, and who waits for it",
        "service/grpc/incoming.py",
        "            async with asyncio.timeout(seconds), slots:\n",
        "            async with asyncio.timeout(None), slots:\n",
        "service/test_peers.py::test_a_body_that_does_not_end_is_given_up_and_lets_the_next_one_in",
        "service/test_peers.py::test_who_waits_for_bodies_that_do_not_end_is_given_up_too",
    ),
    protection(
        "a job's file is whole when its client says so",
        "service/grpc/jobs.py",
        '    raise InvalidArgument("complete", "is missing: the file may not be whole")\n',
        "",
        "service/test_job_rpcs.py::test_a_client_that_leaves_while_it_sends_leaves_no_job",
    ),
    protection(
        "a tenant sends few files of jobs at once",
        "service/grpc/incoming.py",
        "        if self._num_sending[group] >= SENDING_MAX:\n",
        "        if self._num_sending[group] < 0:\n",
        "service/test_job_rpcs.py::test_one_tenant_sends_few_files_at_a_time",
    ),
    protection(
        "a client goes on behind the last whole line of results",
        "client/jobs.py",
        "                    request.after_line = piece.last_line\n",
        "",
        "client/test_jobs.py::test_results_go_on_where_their_stream_broke",
    ),
    protection(
        "what a tenant's requests hold while they are handled is bounded",
        "service/grpc/incoming.py",
        "        while self.bytes_held[group] > HELD_BYTES_MAX:\n",
        "        while False:\n",
        "service/test_request_ids.py::test_what_a_tenants_requests_hold_while_they_wait_is_bounded",
    ),
    protection(
        "whatever is wrong with a token file, the watching goes on",
        "service/grpc/reload.py",
        "            except Exception as error:\n",
        "            except auth.ConfigError as error:\n",
        "service/test_reload.py"
        "::test_tokens_that_could_not_be_read_for_a_moment_are_read_a_moment_later",
    ),
    protection(
        "readers that take nothing are cancelled",
        "service/sweeping.py",
        "        readers.cancel_stalled()\n",
        "",
        "service/test_stalled_readers.py::test_a_reader_that_takes_nothing_is_cancelled_though_it_answers_pings",
    ),
    protection(
        "watchers that take nothing are dropped",
        "service/grpc/admin.py",
        "asyncio.timeout(self.daemon.config.stall_seconds)",
        "asyncio.timeout(None)",
        "service/test_stalled_readers.py::test_a_watcher_that_takes_nothing_is_dropped",
    ),
    protection(
        "watchers are few",
        "service/grpc/admin.py",
        "        if self.num_watchers >= WATCHERS_MAX:\n",
        "        if self.num_watchers < 0:\n",
        "service/test_stalled_readers.py::test_watchers_are_few",
    ),
    protection(
        "connections are limited",
        "service/grpc/server.py",
        '            ("grpc.max_allowed_incoming_connections", self.connections_max),\n',
        "",
        "service/test_peers.py::test_connections_beyond_the_limit_are_closed_and_the_operator_gets_in",
    ),
    protection(
        "tokens are read again when their file changes",
        "service/grpc/reload.py",
        "                use(tokens)\n",
        "                pass\n",
        "service/test_reload.py::test_a_token_that_is_taken_out_is_refused_and_a_new_one_is_known",
    ),
    protection(
        "a token file that cannot be used is not used",
        "service/grpc/server.py",
        "        limits = auth.limits_of(tokens)\n        self.guard.use((*tokens,",
        "        self.guard.use(tokens)\n"
        "        limits = auth.limits_of(tokens)\n        self.guard.use((*tokens,",
        "service/test_reload.py::test_a_token_file_that_cannot_be_used_changes_nothing_and_is_reported",
    ),
    protection(
        "certificates are read again when their files change",
        "service/grpc/reload.py",
        "        if not self._files.has_changed():\n            return None\n",
        "        if self._files is not None:\n            return None\n",
        "service/test_reload.py::test_who_connects_is_shown_the_certificate_of_the_moment",
    ),
    protection(
        "only an IP address can be loopback",
        "service/grpc/server.py",
        'return found.is_loopback if found is not None else host.lower() == "localhost"',
        'return host.startswith("127.") or host.lower() == "localhost" or host == "[::1]"',
        "service/test_exposure.py::test_everybody_elses_address_needs_tls_and_tokens",
    ),
    protection(
        "other kinds of addresses are no hosts",
        "service/grpc/server.py",
        'NO_HOSTS = ("unix", "unix-abstract", "vsock")',
        "NO_HOSTS = ()",
        "service/test_exposure.py::test_what_is_no_host_is_no_address_even_if_it_is_insecure",
    ),
    protection(
        "half of the flags of TLS is refused",
        "service/grpc/server.py",
        "        if path is not None and listening.tls_cert is None:\n",
        "        if path is not None and listening.address is None:\n",
        "service/test_exposure.py::test_half_of_tls_is_refused_and_not_ignored",
    ),
    protection(
        "an error of the machine names no file to a client",
        "service/grpc/translate.py",
        "    if is_of_the_machine(error):\n        if isinstance(error, DiskFull)",
        "    if error is None:\n        if isinstance(error, DiskFull)",
        "service/test_exposure.py::test_an_error_of_the_machine_names_no_file_to_a_client",
    ),
    protection(
        "keepalive notices a line that is dead",
        "service/grpc/server.py",
        '            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),\n',
        "",
        "service/test_withstand.py::test_a_line_that_goes_dead_is_noticed_and_its_turn_given_back",
    ),
    protection(
        "headers are limited",
        "service/grpc/server.py",
        "HEADER_BYTES_MAX = 4 << 10",
        "HEADER_BYTES_MAX = 8 << 20",
        "service/test_withstand.py::test_a_flood_of_connections_and_headers_leaves_the_admitted_alone",
    ),
    protection(
        "a late reader gets messages of a limited size",
        "service/grpc/translate.py",
        "DELTA_BYTES_MAX = 1 << 20 ",
        "DELTA_BYTES_MAX = 1 << 30 ",
        "service/test_large_deltas.py::test_a_late_reader_gets_everything_in_messages_that_may_be_sent",
        "service/test_sizes.py::test_a_reply_that_is_read_late_comes_in_messages_that_clients_receive",
    ),
    protection(
        "conversations of another tenant do not exist",
        "store/conversation_rows.py",
        "    return digest(tenant, conversation_id)\n",
        '    return digest("", conversation_id)\n',
        "store/test_conversations.py::test_tenants_do_not_see_each_other",
        "cli/test_serve.py::test_tokens_keep_tenants_apart",
    ),
    Protection(
        "prefixes, and what is cached of them, belong to a tenant",
        (
            Change(
                "pensieve/service/prefixes.py",
                "        found = self._latest.get((tenant, prefix_id))\n",
                "        found = next((v for k, v in self._latest.items() if k[1] == prefix_id), None)\n",
            ),
            Change(
                "pensieve/service/live_turn.py",
                'return f"{tenant}/{conversation_id}" if tenant else conversation_id\n',
                "return conversation_id\n",
            ),
        ),
        (
            "service/test_timing_probe.py::test_a_guessed_text_is_the_work_of_any_other",
            "service/test_withstand.py"
            "::test_what_a_turn_costs_says_nothing_of_what_another_tenant_has_said",
        ),
    ),
    protection(
        "an id of another tenant is looked for no further than one that never was",
        "store/conversation_rows.py",
        "    if found is None:\n        raise _no_conversation(conversation_id)\n",
        "    if found is None:\n"
        '        tenants = conn.execute("SELECT DISTINCT tenant FROM conversations").fetchall()\n'
        "        for (other,) in tenants:\n"
        "            if find_conversation(conn, conversation_id, other) is not None:\n"
        '                raise NotFound("it is of another tenant")\n'
        "        raise _no_conversation(conversation_id)\n",
        "store/test_tenants.py::test_a_probe_of_another_tenants_id_is_the_work_of_one_that_never_was",
    ),
    protection(
        "an id is of an alphabet",
        "store/records.py",
        'ID_PATTERN = re.compile(r"[A-Za-z0-9._~-]{1,128}")',
        'ID_PATTERN = re.compile(r"(?s).{1,128}")',
        "service/test_withstand.py::test_an_id_with_a_line_break_reaches_no_log_line",
    ),
    protection(
        "connections to the metrics listener are counted",
        "service/metrics/listener.py",
        "        if len(self._tasks) >= CONNECTIONS_MAX:\n",
        "        if len(self._tasks) < 0:\n",
        "service/metrics/test_listener.py::"
        "test_a_client_that_says_nothing_is_closed_and_a_crowd_is_refused",
    ),
    protection(
        "a listener for metrics is on this machine alone",
        "service/grpc/server.py",
        "        if not is_loopback(host) and not listening.insecure:\n",
        "        if not host:\n",
        "service/metrics/test_listener.py::test_others_reach_it_only_where_that_is_said",
    ),
    protection(
        "a scrape from elsewhere needs an operator's token",
        "service/grpc/server.py",
        "        if self.guard.is_operator(authorization):\n",
        "        if authorization:\n",
        "service/metrics/test_listener.py::test_beyond_this_machine_an_operators_token_is_needed",
    ),
    protection(
        "a scrape does not wait for the engine without end",
        "service/metrics/scrape.py",
        "        with suppress(TimeoutError, PensieveError):\n"
        "            async with asyncio.timeout(ENGINE_SECONDS):\n"
        "                return",
        "        with suppress(TimeoutError, PensieveError):\n"
        "            async with asyncio.timeout(None):\n"
        "                return",
        "service/metrics/test_scrape.py::"
        "test_while_no_engine_answers_its_metrics_are_missing_and_the_others_are_there",
    ),
    protection(
        "a span that cannot be exported is no turn that cannot be ended",
        "launch/traces.py",
        "        except Exception:\n            log.exception(",
        "        except ConnectionError:\n            log.exception(",
        "launch/test_traces.py::test_an_exporter_that_fails_costs_no_turn",
    ),
)
