"""A constraint of the wire as a value of ours; whether it can be compiled is for service/constraints.py."""

from __future__ import annotations

from pensieve.core.constraint import Constraint, ConstraintKind, choice_of
from pensieve.errors import InvalidArgument
from pensieve.service.constraints import FIELD
from pensieve.v1 import conversation_pb2 as pb


def constraint_of(request: pb.SendMessageRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    given = request.constraint
    name = given.WhichOneof("kind")
    if name is None:
        raise InvalidArgument(FIELD, "names no kind")
    if name == "choice":
        constraint = choice_of(tuple(given.choice.choices))
    elif name == "json_object":
        if not given.json_object:
            return None
        constraint = Constraint(ConstraintKind.JSON_OBJECT)
    else:
        constraint = Constraint(ConstraintKind(name), getattr(given, name))
    return constraint
