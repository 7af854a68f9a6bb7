"""Replies match their constraints, whatever happens to their turns. Impossible constraints are refused."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.client import Client
from pensieve.conversations.constraints import KNOWN_MAX, ConstraintChecker
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.constraint import Constraint, ConstraintKind, choice_of
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import InvalidArgument, TurnFailed
from pensieve.sampling import Sampling
from pensieve.text import Message, Tokenizer
from pensieve.text.grammars import Grammars
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.in_process import Runtime
from tests.conversations.rig import figures, finish, started, step, write_model
from tests.conversations.rig_daemon import DaemonRig
from tests.conversations.schemas import is_valid, random_root_schema
from tests.text.families import QWEN_2_5

ENGINE = (sys.executable, "-m", "pensieve.launch.engine_process")
Kind = ConstraintKind
CALLED = {
    "form": "hermes",
    "tools": [
        {
            "name": "look",
            "schema": {
                "type": "object",
                "properties": {"at": {"enum": ["Oslo", "Rome"]}},
                "required": ["at"],
                "additionalProperties": False,
            },
            "is_lenient": False,
        }
    ],
    "must": True,
    "single": True,
    "reply": None,
}
SPACED = ("<tool_call>", "{", '"name"', ":", '"look"', ",", '"arguments"', ":", "{", '"at"', ":")
FORMS = {  # constraints other than schemas, and the regular expression that their replies match
    "regex": (Constraint(Kind.REGEX, "[0-9]{3,8}-[a-f]{2,9}"), "[0-9]{3,8}-[a-f]{2,9}"),
    "choice": (choice_of(("yes", "no", 'it "is"')), 'yes|no|it "is"'),
    "grammar": (
        Constraint(Kind.GRAMMAR, 'start: "<" WORD (";" WORD)~1..3 ">"\nWORD: /[A-Z]{2,5}/'),
        "<[A-Z]{2,5}(;[A-Z]{2,5}){1,3}>",
    ),
    "calls": (
        Constraint(Kind.TOOL_CALLS, json.dumps(CALLED)),
        r"\s*".join(["", *map(re.escape, SPACED), '"(Oslo|Rome)"', "}", "}", "</tool_call>", ""]),
    ),
}


def sampling(seed: int, **options: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "seed": seed + 1, "max_tokens": 250, **options})


def schema_constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint(Kind.JSON_SCHEMA, json.dumps(schema))


class ConstrainedTurns:
    """Turns with constraints, which are the same in every runtime."""

    def __init__(self, num_schemas: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.schemas = [random_root_schema(chance) for _ in range(num_schemas)]
        self.constraints = [schema_constraint(each) for each in self.schemas]
        self.constraints += [constraint for constraint, _ in FORMS.values()]

    def send(self, runtime: Runtime, number: int, request_id: str = "") -> LiveTurn:
        return runtime.conversations.send(
            f"c{number}",
            "Say something of Oslo.",
            sampling=sampling(number, temperature=number % 3 * 0.7, logprobs=number % 2 or None),
            constraint=self.constraints[number],
            request_id=request_id,
        )

    def send_all(self, runtime: Runtime) -> list[LiveTurn]:
        for number in range(len(self.constraints)):
            runtime.conversations.create(f"c{number}")
        return [self.send(runtime, number) for number in range(len(self.constraints))]

    def check_replies(self, turns: list[LiveTurn]) -> int:
        """Check each finished reply against its constraint. Return how many replies finished."""
        whole = 0
        for number, turn in enumerate(turns):
            assert turn.finish in (FinishReason.STOP, FinishReason.LENGTH), turn.failure
            if turn.finish is FinishReason.LENGTH:
                continue
            whole += 1
            if number < len(self.schemas):
                assert is_valid(json.loads(turn.text), self.schemas[number]), turn.text
            else:
                pattern = list(FORMS.values())[number - len(self.schemas)][1]
                assert re.fullmatch(pattern, turn.text), turn.text
        return whole


def replies_of(turns: list[LiveTurn]) -> list[tuple[list[int], str]]:
    return [(list(turn.reply.token_ids), turn.text) for turn in turns]


ROOMY = {"device_cache": "16000t", "host_cache": "64t", "turns_max": "64"}
TIGHT = {"device_cache": "320t", "host_cache": "160t", "turns_max": "12"}


@pytest.mark.parametrize("model", ["builtin", "random"])
def test_every_reply_matches_its_constraint_under_memory_pressure(
    model: str, tmp_path: Path
) -> None:
    """Turns are suspended, moved and recomputed. The tokens equal the tokens without memory pressure."""
    path = MODEL_PATH
    if model == "random":
        path = write_model(tmp_path / "model", QWEN_2_5)
    wanted = ConstrainedTurns(20, seed=7)
    with started(path, tmp_path / "roomy", **ROOMY) as runtime:
        finish(runtime, turns := wanted.send_all(runtime))
        assert wanted.check_replies(turns) > 0.7 * len(turns)
        assert figures(runtime)["suspensions"] == 0
    with started(path, tmp_path / "tight", **TIGHT) as runtime:
        finish(runtime, again := wanted.send_all(runtime))
        assert figures(runtime)["suspensions"] > 0
    assert replies_of(again) == replies_of(turns)


def test_a_constrained_turn_restarted_after_a_crash_has_the_same_reply(tmp_path: Path) -> None:
    """The process ends during replies. The next process gets each request twice, and replays the second."""
    wanted = ConstrainedTurns(3, seed=3)
    with started(MODEL_PATH, tmp_path / "whole") as runtime:
        finish(runtime, whole := wanted.send_all(runtime))
    with started(MODEL_PATH, tmp_path / "data") as runtime:
        for number in range(len(wanted.constraints)):
            runtime.conversations.create(f"c{number}")
            wanted.send(runtime, number, "r")
        for _ in range(6):
            step(runtime)
    with started(MODEL_PATH, tmp_path / "data") as runtime:
        numbers = range(len(wanted.constraints))
        again = [wanted.send(runtime, number, "r") for number in numbers]
        finish(runtime, again)
        assert replies_of(again) == replies_of(whole)
        replays = [wanted.send(runtime, number, "r") for number in numbers]
        assert all(each.replayed for each in replays)
        assert replies_of(replays) == replies_of(whole)


def test_constrained_turns_do_not_change_the_replies_of_other_turns(tmp_path: Path) -> None:
    def free(runtime: Runtime) -> list[LiveTurn]:
        for number in range(6):
            runtime.conversations.create(f"free{number}")
        options = [
            sampling(number, max_tokens=40, temperature=number % 2 * 1.0, ignore_eos=True)
            for number in range(6)
        ]
        return [
            runtime.conversations.send(f"free{number}", "Tell me more.", sampling=each)
            for number, each in enumerate(options)
        ]

    with started(MODEL_PATH, tmp_path / "alone", **ROOMY) as runtime:
        finish(runtime, alone := free(runtime))
    wanted = ConstrainedTurns(6, seed=5)
    with started(MODEL_PATH, tmp_path / "beside", **ROOMY) as runtime:
        held = wanted.send_all(runtime)
        finish(runtime, [*(beside := free(runtime)), *held])
    assert replies_of(beside) == replies_of(alone)
    assert wanted.check_replies(held) > 0


def test_requests_are_the_same_only_if_their_constraints_are() -> None:
    def ask(constraint: Constraint | None, given: dict[str, Any] | None = None) -> TurnRequest:
        options = TurnOptions(Sampling(), constraint=constraint)
        return TurnRequest("c", (Message("user", "hi"),), options, given_sampling=given)

    for given in (None, {}, {"seed": 7}):
        one = ask(choice_of(("a", "b")), given)
        assert one.has_same_content_as(ask(choice_of(("a", "b")), given))
        assert not one.has_same_content_as(ask(choice_of(("a", "c")), given))
        assert not one.has_same_content_as(ask(None, given))
        assert "constraint" not in ask(None, given).stored_sampling


def test_a_checked_constraint_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_once = Grammars.compile

    def record_compile(self: Grammars, kind: str, text: str) -> Any:
        compiled.append(text)
        return compile_once(self, kind, text)

    monkeypatch.setattr(Grammars, "compile", record_compile)
    constraints = ConstraintChecker(Tokenizer.load(MODEL_PATH))
    options = TurnOptions(constraint=Constraint(Kind.REGEX, "a+"))
    assert not constraints.knows(options)
    for _ in range(3):
        constraints.check(options)
    assert constraints.knows(options)
    assert compiled == ["a+"]
    for number in range(KNOWN_MAX):
        constraints._known["regex", f"{number}"] = None
    constraints.check(TurnOptions(constraint=Constraint(Kind.REGEX, "b+")))
    assert not constraints.knows(options)
    assert len(constraints._known) == KNOWN_MAX


def test_a_constraint_with_ignore_eos_is_refused() -> None:
    options = TurnOptions(Sampling(ignore_eos=True), constraint=choice_of(("a",)))
    with pytest.raises(InvalidArgument, match=r"sampling\.ignore_eos"):
        ConstraintChecker(Tokenizer.load(MODEL_PATH)).check(options)
    ConstraintChecker(Tokenizer.load(MODEL_PATH)).check(replace(options, sampling=Sampling()))


def schema_with_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{each}": {} for each in range(number)}}


IMPOSSIBLE: dict[str, tuple[Any, str | None]] = {
    "nested": ({"json_schema": '{"items":' * 3_000 + "{}" + "}" * 3_000}, "json_schema"),
    "enum of 50,000": ({"json_schema": json.dumps({"enum": [*range(50_000)]})}, None),
    "a megabyte": ({"json_schema": json.dumps(schema_with_properties(100_000))}, None),
    "many properties": ({"json_schema": json.dumps(schema_with_properties(3_000))}, "json_schema"),
    "unknown reference": ({"json_schema": '{"$ref": "#/none"}'}, "json_schema"),
    "reference to a file": ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "json_schema"),
    "circular reference": ({"json_schema": '{"$ref": "#"}'}, "json_schema"),
    "no JSON": ({"json_schema": "{"}, "json_schema"),
    "no regex": ({"regex": "(a"}, "regex"),
    "back-reference": ({"regex": r"(a)\1"}, "regex"),
    "no grammar": ({"grammar": "start: none"}, "grammar"),
    "no choice": ({"choice": pb.Choices()}, "choice"),
}
COSTLY: dict[str, Any] = {
    "nested repetition": {"regex": "((a+)+)+b"},
    "counts": {"regex": "(a{1000}){1000}"},
    "200 patterns": {
        "json_schema": json.dumps(
            {"anyOf": [{"type": "string", "pattern": f"^[ab]*{n}[a-z]+$"} for n in range(200)]}
        )
    },
    "900 properties": {"json_schema": json.dumps(schema_with_properties(900))},
    "ambiguous": {"grammar": 'start: x\nx: "a" | x x | "a" x'},
}


def test_impossible_and_costly_constraints_do_not_disturb_another_stream(tmp_path: Path) -> None:
    """Meanwhile another stream continues, and gives the same tokens as when it runs alone."""
    written = {"device_cache": "4000t", "host_cache": "400t"}
    talk: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 300, "ignore_eos": True}
    with DaemonRig(tmp_path / "data", program=ENGINE, written=written) as rig:
        with Client(rig.server.address) as client:
            alone = client.conversation("alone").ask("Hello.", **talk)
            said: list[Any] = []
            failed: dict[str, str] = {}
            speaker = threading.Thread(
                target=lambda: said.append(client.conversation("beside").ask("Hello.", **talk))
            )
            speaker.start()
            for number, (given, field) in enumerate(IMPOSSIBLE.values()):
                request = pb.SendMessageRequest(
                    conversation_id=f"h{number}",
                    messages=[pb.NewMessage(role=pb.ROLE_USER, content="hi")],
                    create_if_missing=True,
                    constraint=pb.Constraint(**given),
                )
                with pytest.raises(grpc.RpcError) as caught:
                    list(rig.stub.SendMessage(request))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, number
                if field is not None:
                    assert f"constraint.{field}" in str(caught.value.details())
            for name, given in COSTLY.items():
                try:
                    reply = client.conversation().ask("Hi.", constraint=given, max_tokens=20)
                except TurnFailed as error:
                    failed[name] = error.reason
                else:
                    assert reply.token_ids, name
            speaker.join()
            assert set(failed.values()) <= {"CONSTRAINT_FAILED"}
            assert "900 properties" not in failed
            assert said[0].token_ids == alone.token_ids
        assert rig.daemon.engine.num_restarts == 0


def test_the_sdk_sends_each_kind_of_constraint(tmp_path: Path) -> None:
    written = {"device_cache": "2000t", "host_cache": "400t"}
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    }
    with (
        DaemonRig(tmp_path / "data", program=ENGINE, written=written) as rig,
        Client(rig.server.address) as client,
    ):
        conversation = client.conversation("c")

        def reply_to(**given: Any) -> str:
            constraint: Any = given
            reply = conversation.ask("And now?", constraint=constraint, max_tokens=120)
            assert reply.finish_reason == "stop"
            return reply.text

        for given in (schema, json.dumps(schema)):
            assert json.loads(reply_to(json_schema=given))["city"] in ("Oslo", "Rome")
        assert reply_to(choice=["left", "right"]) in ("left", "right")
        assert re.fullmatch("[0-9]{4}", reply_to(regex="[0-9]{4}"))
        assert reply_to(grammar='start: "a" "b"') == "ab"
        assert conversation.ask("Then?", constraint={"json_object": True}).text.startswith("{")
        wrong: Any
        for wrong in ({}, {"regex": "a", "grammar": "b"}, {"poem": "roses"}, {"choice": "ab"}):
            with pytest.raises(InvalidArgument, match="constraint"):
                conversation.ask("And?", constraint=wrong)
