"""A small scripted daemon, which works correctly or fails on demand.

It keeps conversations, revisions and request_ids like the real daemon. Its replies are the words of the
message. `mishaps` lists the faults of the next streams, one fault for each stream. A stream without a mishap
succeeds. Errors are built here by hand, so that the SDK is tested against the protocol, and not against the
daemon's own translation of errors.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import grpc

from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, jobs_pb2_grpc, status_pb2
from tests.client.scripted_jobs import ScriptedJobs
from tests.client.scripted_prefixes import FakePrefixes

TYPE_PREFIX = "type.googleapis.com/google.rpc."
PAGE_SIZE = 2


@dataclass(frozen=True)
class Refusal:
    """A gRPC error status with details."""

    code: str
    reason: str = ""
    causes: dict[str, str] = field(default_factory=dict)
    retry_seconds: float | None = None
    violation: tuple[str, str] | None = None
    text: str = "because"

    def trailing(self) -> tuple[tuple[str, bytes], ...]:
        status = status_pb2.Status(message=self.text)

        def add(name: str, detail: Any) -> None:
            status.details.add(type_url=TYPE_PREFIX + name, value=detail.SerializeToString())

        if self.reason:
            info = status_pb2.ErrorInfo(reason=self.reason, domain="pensieve", metadata=self.causes)
            add("ErrorInfo", info)
        if self.retry_seconds is not None:
            retry = status_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(self.retry_seconds * 1000))
            add("RetryInfo", retry)
        if self.violation is not None:
            name, problem = self.violation
            bad = status_pb2.BadRequest.FieldViolation(field=name, description=problem)
            add("BadRequest", status_pb2.BadRequest(field_violations=[bad]))
        return (("grpc-status-details-bin", status.SerializeToString()),)

    def end(self, context: grpc.ServicerContext) -> NoReturn:
        if self.reason or self.retry_seconds is not None or self.violation is not None:
            context.set_trailing_metadata(self.trailing())
        context.abort(getattr(grpc.StatusCode, self.code), self.text)
        raise AssertionError("abort does not return")


AWAY = Refusal("UNAVAILABLE")


@dataclass(frozen=True)
class Mishap:
    """The fault of one stream. It happens after `after` words, or before the response `started` if -1."""

    after: int = -1
    refusal: Refusal | None = AWAY  # None: the stream ends without an error
    lost: bool = False  # the attempt is lost, too; the next attempt replies in capital letters
    stalls: bool = False  # send nothing more until the turn is cancelled or the client leaves
    words: tuple[str, ...] | None = None  # words to send instead
    on_stall: Callable[[], None] = lambda: None


@dataclass
class FakeTurn:
    turn_id: str
    request_id: str
    words: list[str]
    attempt: int = 1
    num_sent: int = 0  # words sent over any stream; a cancel keeps these
    interrupted: bool = False
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    cancelled: bool = False
    stalls: list[threading.Event] = field(default_factory=list)  # set to continue stalled streams


@dataclass
class FakeConversation:
    conversation: pb.Conversation
    messages: list[pb.Message] = field(default_factory=list)
    turns: dict[str, FakeTurn] = field(default_factory=dict)
    running: FakeTurn | None = None

    def say(self, role: pb.Role.ValueType, text: str) -> None:
        first = sum(message.num_tokens for message in self.messages)
        token_ids = [len(word) for word in text.split()]
        self.messages.append(
            pb.Message(
                index=len(self.messages),
                role=role,
                content=text,
                revision=self.conversation.revision,
                first_token=first,
                num_tokens=len(token_ids),
                token_ids=token_ids,
            )
        )


class ScriptedServer(FakePrefixes, conversation_pb2_grpc.ConversationServiceServicer):
    def __init__(
        self, listen: str = "127.0.0.1:0", history_of: ScriptedServer | None = None
    ) -> None:
        """With `history_of`, share the history of that server."""
        self.mishaps: deque[Mishap] = deque()
        self.refusals: deque[Refusal] = deque()  # for the next unary calls
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.abandoned: queue.Queue[str] = queue.Queue()  # request_ids of streams left by clients
        self.conversations: dict[str, FakeConversation] = {}
        self.declared: dict[str, pb.GetPrefixResponse] = {}
        self.homes: dict[str, str] = {}  # conversation -> home, reported as if calls were forwarded
        self.health = status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING
        self.before_cancel: Callable[..., None] = lambda: None
        self.odd = False  # send fields and values of a newer server
        self._held: threading.Event | None = None
        self._turn_ids = itertools.count(1)
        self._ending = threading.Lock()  # a turn ends only once, although several streams read it
        if history_of is not None:
            self.conversations, self.declared = history_of.conversations, history_of.declared
            self._turn_ids, self._ending = history_of._turn_ids, history_of._ending
        self._server = grpc.server(futures.ThreadPoolExecutor(24))
        conversation_pb2_grpc.add_ConversationServiceServicer_to_server(self, self._server)
        self.jobs = ScriptedJobs()
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self.jobs, self._server)
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            status_pb2.HealthCheckRequest.FromString,
            status_pb2.HealthCheckResponse.SerializeToString,
        )
        health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        self._server.add_generic_rpc_handlers((health,))
        port = self._server.add_insecure_port(listen)
        self.address = listen.replace(":0", f":{port}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def hold(self, held: threading.Event) -> None:
        """Make the next unary method set this event, and not answer."""
        self._held = held

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def requests(self, name: str) -> list[Any]:
        return [request for called, request, _ in self.calls if called == name]

    # -- turns --

    def SendMessage(
        self, request: pb.SendMessageRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SendMessageResponse]:
        self._note("SendMessage", request, context)
        mishap = self.mishaps.popleft() if self.mishaps else None
        over = threading.Event()
        context.add_callback(
            lambda: None if over.is_set() else self.abandoned.put(request.request_id)
        )
        numbers = itertools.count(1)

        def go_wrong(turn: FakeTurn | None) -> Iterator[None]:
            assert mishap is not None
            if mishap.stalls:
                stall = threading.Event()
                if not context.add_callback(stall.set):
                    return  # the client has left already
                if turn is not None:
                    turn.stalls.append(stall)
                    if turn.cancelled:
                        return
                mishap.on_stall()
                stall.wait(30)
                return
            over.set()
            if turn is not None:
                turn.interrupted = mishap.lost
            if mishap.refusal is not None:
                mishap.refusal.end(context)
            yield None

        if mishap is not None and mishap.after < 0:
            for _ in go_wrong(None):
                return
        kept, turn, replayed = self._turn(request, context, over)
        started = pb.TurnStarted(
            turn_id=turn.turn_id,
            revision=kept.conversation.revision,
            request_id=request.request_id,
            replayed=replayed,
            attempt=turn.attempt,
        )
        yield pb.SendMessageResponse(sequence=next(numbers), started=started)
        words = turn.words if mishap is None or mishap.words is None else mishap.words
        sent = []
        for place, word in enumerate(words):
            if mishap is not None and place == mishap.after:
                for _ in go_wrong(turn):
                    return
            if turn.cancelled and place >= turn.num_sent:
                break
            turn.num_sent = max(turn.num_sent, place + 1)
            text = word.upper() if turn.attempt > 1 else word
            sent.append(text)
            delta = pb.TurnDelta(text=text + " ", token_ids=[len(word)], kind=pb.PART_KIND_TEXT)
            if request.sampling.logprobs:
                delta.logprobs.add(logprob=-0.5).alternatives.add(token_id=7, logprob=-1.5)
            if self.odd:
                delta.kind = 77  # type: ignore[assignment]
                unknown = pb.SendMessageResponse(sequence=next(numbers))
                unknown.MergeFromString(b"\xca\x3e\x02hi")  # field 1001, unknown to all clients
                yield unknown
            yield pb.SendMessageResponse(sequence=next(numbers), delta=delta)
        if not context.is_active():
            return
        over.set()
        with self._ending:
            if not replayed and turn.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
                kept.running = None
                kept.conversation.revision += 1
                kept.say(pb.ROLE_USER, request.messages[0].content)
                kept.say(pb.ROLE_ASSISTANT, " ".join(sent))
                turn.words = [word.lower() for word in sent]
                turn.finish_reason = (
                    pb.FINISH_REASON_CANCELLED if turn.cancelled else pb.FINISH_REASON_STOP
                )
        completed = pb.TurnCompleted(
            finish_reason=99 if self.odd else turn.finish_reason,  # type: ignore[arg-type]
            usage=pb.Usage(prompt_tokens=3, new_tokens=3, output_tokens=len(sent)),
            revision=kept.conversation.revision,
        )
        yield pb.SendMessageResponse(sequence=next(numbers), completed=completed)

    def _turn(
        self, request: pb.SendMessageRequest, context: grpc.ServicerContext, over: threading.Event
    ) -> tuple[FakeConversation, FakeTurn, bool]:
        kept = self.conversations.get(request.conversation_id)
        if kept is None:
            if not request.create_if_missing:
                over.set()
                Refusal("NOT_FOUND", "NOT_FOUND").end(context)
            kept = self._begin(request.conversation_id)
        turn = kept.turns.get(request.request_id)
        if turn is not None:
            if turn.interrupted:
                turn.interrupted = False
                turn.attempt += 1
                turn.num_sent = 0
            return kept, turn, turn.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        revision = kept.conversation.revision
        if request.HasField("expected_revision") and request.expected_revision != revision:
            over.set()
            causes = {"expected": str(request.expected_revision), "actual": str(revision)}
            Refusal("FAILED_PRECONDITION", "STALE_REVISION", causes).end(context)
        if kept.running is not None:
            over.set()
            causes = {
                "conversation_id": request.conversation_id,
                "turn_id": kept.running.turn_id,
            }
            Refusal("ABORTED", "TURN_RUNNING", causes).end(context)
        words = request.messages[0].content.split()
        turn = FakeTurn(str(next(self._turn_ids)), request.request_id, words)
        kept.turns[request.request_id] = kept.running = turn
        return kept, turn, False

    def CancelTurn(
        self, request: pb.CancelTurnRequest, context: grpc.ServicerContext
    ) -> pb.CancelTurnResponse:
        self._note("CancelTurn", request, context)
        self.before_cancel()
        kept = self._require(request, context)
        running = kept.running
        if request.request_id:
            asked = kept.turns.get(request.request_id)
            if asked is None or asked is not running:
                reason = asked.finish_reason if asked is not None else 0
                return pb.CancelTurnResponse(finish_reason=reason)  # type: ignore[arg-type]
        if running is None or request.turn_id not in ("", running.turn_id):
            return pb.CancelTurnResponse(was_running=False)
        is_dropped = request.HasField("keep_tokens") and request.keep_tokens == 0
        running.cancelled = not is_dropped
        running.interrupted = is_dropped
        if request.HasField("keep_tokens"):  # the client has left this turn
            kept.running = None
        for stall in running.stalls:
            stall.set()
        reason = pb.FINISH_REASON_UNSPECIFIED if is_dropped else pb.FINISH_REASON_CANCELLED
        return pb.CancelTurnResponse(was_running=True, finish_reason=reason)

    def complete(self, conversation_id: str) -> None:
        """Complete the running turn without telling any client."""
        kept = self.conversations[conversation_id]
        turn, kept.running = kept.running, None
        assert turn is not None
        turn.finish_reason = pb.FINISH_REASON_STOP
        kept.conversation.revision += 1
        for role in (pb.ROLE_USER, pb.ROLE_ASSISTANT):
            kept.say(role, " ".join(turn.words))

    # -- conversations --

    def CreateConversation(
        self, request: pb.CreateConversationRequest, context: grpc.ServicerContext
    ) -> pb.CreateConversationResponse:
        self._note("CreateConversation", request, context)
        return pb.CreateConversationResponse(conversation=self._create(request, context))

    def _create(
        self, request: pb.CreateConversationRequest, context: grpc.ServicerContext
    ) -> pb.Conversation:
        if request.conversation_id in self.conversations:
            Refusal("ALREADY_EXISTS", "ALREADY_EXISTS").end(context)
        kept = self._begin(request.conversation_id)
        kept.conversation.metadata.CopyFrom(request.metadata)
        if request.system_prompt:
            kept.say(pb.ROLE_SYSTEM, request.system_prompt)
        for message in request.messages:
            kept.say(message.role, message.content)
        return kept.conversation

    def ImportConversation(
        self, requests: Iterator[pb.ImportConversationRequest], context: grpc.ServicerContext
    ) -> pb.ImportConversationResponse:
        pieces = list(requests)
        whole = pb.CreateConversationRequest()
        whole.CopyFrom(pieces[0].conversation)
        for piece in pieces:
            whole.messages.extend(piece.messages)
        self._note("ImportConversation", whole, context)
        if not pieces[-1].complete:
            Refusal("CANCELLED", "INCOMPLETE").end(context)
        return pb.ImportConversationResponse(conversation=self._create(whole, context))

    def GetConversation(
        self, request: pb.GetConversationRequest, context: grpc.ServicerContext
    ) -> pb.GetConversationResponse:
        self._note("GetConversation", request, context)
        return pb.GetConversationResponse(conversation=self._require(request, context).conversation)

    def DeleteConversation(
        self, request: pb.DeleteConversationRequest, context: grpc.ServicerContext
    ) -> pb.DeleteConversationResponse:
        self._note("DeleteConversation", request, context)
        self._require(request, context)
        del self.conversations[request.conversation_id]
        return pb.DeleteConversationResponse()

    def ListConversations(
        self, request: pb.ListConversationsRequest, context: grpc.ServicerContext
    ) -> pb.ListConversationsResponse:
        self._note("ListConversations", request, context)
        start = int(request.page_token or 0)
        end = start + PAGE_SIZE
        states = [kept.conversation for kept in self.conversations.values()][::-1]
        return pb.ListConversationsResponse(
            conversations=states[start:end],
            next_page_token=str(end) if end < len(states) else "",
        )

    def ListMessages(
        self, request: pb.ListMessagesRequest, context: grpc.ServicerContext
    ) -> pb.ListMessagesResponse:
        self._note("ListMessages", request, context)
        messages = self._require(request, context).messages
        start = int(request.page_token or 0)
        end = start + PAGE_SIZE
        page = pb.ListMessagesResponse(
            messages=messages[start:end], next_page_token=str(end) if end < len(messages) else ""
        )
        if not request.include_token_ids:
            for message in page.messages:
                del message.token_ids[:]
        return page

    def ForkConversation(
        self, request: pb.ForkConversationRequest, context: grpc.ServicerContext
    ) -> pb.ForkConversationResponse:
        self._note("ForkConversation", request, context)
        source = self._require(request, context)
        last = source.conversation.revision
        if request.HasField("at_revision"):
            last = request.at_revision
        kept = self._begin(request.new_conversation_id)
        kept.conversation.revision = last
        kept.conversation.metadata.CopyFrom(request.metadata)
        kept.messages = [each for each in source.messages if each.revision <= last]
        return pb.ForkConversationResponse(conversation=kept.conversation)

    def RewindConversation(
        self, request: pb.RewindConversationRequest, context: grpc.ServicerContext
    ) -> pb.RewindConversationResponse:
        self._note("RewindConversation", request, context)
        kept = self._require(request, context)
        kept.messages = [each for each in kept.messages if each.revision <= request.to_revision]
        kept.conversation.revision += 1
        return pb.RewindConversationResponse(conversation=kept.conversation)

    def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
        raise AssertionError("abort does not return")

    def WarmConversation(
        self, request: pb.WarmConversationRequest, context: grpc.ServicerContext
    ) -> pb.WarmConversationResponse:
        self._note("WarmConversation", request, context)
        self._require(request, context)
        return pb.WarmConversationResponse()

    def _check(
        self, request: status_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> status_pb2.HealthCheckResponse:
        self._note("Check", request, context)
        return status_pb2.HealthCheckResponse(status=self.health)

    # -- inside --

    def _note(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata())
        self.calls.append((name, request, metadata))
        if home := self.homes.get(getattr(request, "conversation_id", "")):
            context.send_initial_metadata((("pensieve-home", home),))
        held, self._held = self._held, None
        if held is not None:
            over = threading.Event()
            context.add_callback(over.set)
            held.set()
            over.wait(30)
        if name != "SendMessage" and self.refusals:
            self.refusals.popleft().end(context)

    def _refuse(self, reason: str, context: grpc.ServicerContext) -> None:
        Refusal(reason, reason).end(context)

    def _begin(self, conversation_id: str) -> FakeConversation:
        kept = FakeConversation(pb.Conversation(conversation_id=conversation_id))
        self.conversations[conversation_id] = kept
        return kept

    def _require(self, request: Any, context: grpc.ServicerContext) -> FakeConversation:
        if request.conversation_id not in self.conversations:
            Refusal("NOT_FOUND", "NOT_FOUND").end(context)
        return self.conversations[request.conversation_id]
