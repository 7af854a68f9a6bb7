"""A constraint of the wire as a value of ours; whether it can be compiled is for service/constraints.py."""

from __future__ import annotations

from pensieve.core.constraint import Constraint, ConstraintKind, choice_of
from pensieve.errors import InvalidArgument
from pensieve.service.constraints import FIELD
from pensieve.v1 import conversation_pb2 as pb


def constraint_of(request: pb.SendMessageRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    name = request.constraint.WhichOneof("kind")
    if name is None:
        raise InvalidArgument(FIELD, "names no kind")
    given = request.constraint
    if name == "choice":
        return choice_of(tuple(given.choice.choices))
    if name == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT) if given.json_object else None  # not wanted
    return Constraint(ConstraintKind(name), getattr(given, name))
