"""Protections of a history that several daemons share, and of replicas on Ray."""

from tests.protections import protection

PROTECTIONS = (
    protection(
        "a shared history: the end of a turn stays in line however long the service is away",
        "history/connection.py",
        "                if waiting.method.kind is not Kind.TURN:\n"
        "                    self._line.remove(waiting)\n",
        "                self._line.remove(waiting)\n",
        "history/test_broken_streams.py::test_a_turn_whose_end_was_given_up_before_it_was_sent_ends_and_begins_again",
    ),
    protection(
        "a shared history: after a commit that failed the sessions are read from the disk",
        "store/remote/calls.py",
        "            self._may_have_ended = True\n",
        "            pass\n",
        "history/test_resent_calls.py::test_a_session_that_may_have_ended_in_a_commit_that_failed_writes_no_more",
    ),
    protection(
        "a shared history: an end that comes again after a kill writes nothing",
        "store/remote/recalled.py",
        '    "interrupt_turn": _turn,\n',
        '    "interrupt_turn": _as_before("interrupt_turn"),\n',
        "history/test_resent_calls.py::test_an_end_that_comes_again_does_not_end_the_next_owners_attempt",
    ),
    protection(
        "a shared history: an owner whose session has ended claims nothing",
        "store/owners.py",
        "                if not is_open:\n",
        "                if False:\n",
        "history/test_resent_calls.py::test_an_owner_whose_session_has_ended_claims_nothing",
    ),
    protection(
        "a shared history: an error of the disk beside calls does not end the service",
        "history/service.py",
        "            except PensieveError as error:  # a full disk, a server that is away: tried again\n",
        "            except ZeroDivisionError as error:\n",
        "history/test_disk_errors.py::test_a_lease_that_runs_out_while_the_disk_is_full_ends_when_it_is_not",
    ),
    protection(
        "a shared history: what is deleted at another daemon is taken over first",
        "service/history.py",
        "        except OwnedElsewhere:\n",
        "        except ZeroDivisionError:\n",
        "cluster/test_elsewhere.py::test_a_conversation_is_deleted_at_any_daemon",
    ),
    protection(
        "a shared history: a message that is passed on is the same turn when it is said again",
        "service/grpc/forwarding.py",
        '            request.request_id = f"{secrets.randbits(128):032x}"  # of two tries\n',
        "            pass\n",
        "cluster/test_elsewhere.py::test_a_message_without_a_request_id_that_is_sent_twice_is_one_turn",
    ),
    protection(
        "a cluster on Ray: a context that has ended is not asked",
        "cluster/grpc_edge.py",
        "        real, self._context = self._context, RaysOwn(self._context.peer())\n",
        "        real = self._context\n",
        "cluster/test_direct.py::test_messages_and_trailing_metadata_come_from_the_daemon",
    ),
    protection(
        "HTTP: bytes of a body that nobody wants are counted once",
        "service/http/connections.py",
        "not self._is_bearable(len(piece)):\n",
        "not self._is_bearable(len(piece) + len(data)):\n",
        "service/http/test_front.py::test_a_large_body_that_nobody_wants_is_passed_over_up_to_a_limit",
    ),
)
