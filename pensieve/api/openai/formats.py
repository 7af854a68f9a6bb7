"""Read the required form of a reply and of its tool calls, as a `Constraint`.

    response_format        {"type": "json_schema", "json_schema": {"name", "schema", …}}, or a json_object
    text.format            the same for a response, without the inner object
    output_config.format   {"type": "json_schema", "schema"} of Anthropic's API
    structured_outputs     of vLLM: one of json, json_object, regex, choice, grammar
    guided_json, guided_regex, guided_choice, guided_grammar    older names of these in vLLM

    strict                 of a tool: the arguments of its calls match its schema
    tool_choice            auto; none; required: only calls; a name: only calls of this tool;
                           allowed_tools: only these tools
    parallel_tool_calls    false: at most one call

The schema of a reply is always enforced, even if it is not `strict`. A body with two forms is refused. If a
body has a form and tools, the reply either has the form or calls tools. Text and thinking before a call are
not constrained, unless a call is required. The arguments of a tool that is not `strict` may be any object. If
a call is required, these arguments match the tool's schema as far as possible. If the model's tool calls are
not JSON (text/tool_calls/), parameters that need a constraint on calls are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pensieve.api.json_fields import Fields, Refusal, quoted
from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.text.tool_calls import CallStyle

FORMATS = ("text", "json_object", "json_schema")
OPEN_NAMES = {
    "json": ConstraintKind.JSON_SCHEMA,
    "json_object": ConstraintKind.JSON_OBJECT,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICE,
    "grammar": ConstraintKind.GRAMMAR,
}
COMPOSED = (  # forms that can be combined with tool calls
    ConstraintKind.JSON_SCHEMA,
    ConstraintKind.JSON_OBJECT,
    ConstraintKind.REGEX,
    ConstraintKind.CHOICE,
)
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "deprecated"})
NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})
INNER_SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf"}
)


class FormatFields(NamedTuple):
    constraint: Constraint | None = None
    # maps each field of the constraint to its name in the request body
    params: Mapping[str, str] = {}


def refuse_form(form: FormatFields) -> None:
    """Refuse a required form with prefill, because the form would apply only to the continuation."""
    if form.constraint is not None:
        where = next(iter(form.params.values()), "response_format")
        problem = "cannot be combined with a reply that the client has begun"
        raise Refusal(where, problem, "unsupported_parameter")


def take_response_format(fields: Fields) -> FormatFields:
    """Read the form of a chat completion or a completion."""
    found = [
        *_read_format(fields.fields("response_format"), "json_schema"),
        *_read_open_names(fields.fields("structured_outputs"), ""),
        *_read_open_names(fields, "guided_"),
    ]
    return _only_one(found)


def take_text_format(text: Fields) -> FormatFields:
    return _only_one(_read_format(text.fields("format"), ""))


def take_output_format(config: Fields) -> FormatFields:
    """Read the form of Anthropic's API: a schema without a name."""
    given = config.fields("format")
    if given is None:
        return FormatFields()
    kind = given.needed_text("type")
    if kind != "json_schema":
        problem = f"{quoted(kind)} is not json_schema"
        raise Refusal(given.where("type"), problem, "unsupported_parameter")
    found = _read_schema(given)
    given.end()
    return _only_one([found])


class _Form(NamedTuple):
    where: str
    constraint: Constraint


def _only_one(found: list[_Form]) -> FormatFields:
    if not found:
        return FormatFields()
    if len(found) > 1:
        raise Refusal(found[1].where, f"cannot be combined with {found[0].where}: use one of them")
    ((where, constraint),) = found
    if (problem := constraint.problem()) is not None:
        raise Refusal(where, problem)
    return FormatFields(constraint, {f"constraint.{constraint.kind.value}": where})


def _read_format(given: Fields | None, inside: str) -> list[_Form]:
    """Read a format. `inside`: the member that contains the schema and its name; may be empty."""
    if given is None:
        return []
    kind = given.needed_text("type")
    if kind not in FORMATS:
        problem = f"{quoted(kind)} is not one of {', '.join(FORMATS)}"
        raise Refusal(given.where("type"), problem, "unsupported_parameter")
    found: list[_Form] = []
    if kind == "json_object":
        found.append(_Form(given.where("type"), Constraint(ConstraintKind.JSON_OBJECT)))
    elif kind == "json_schema":
        found.append(_read_named_schema(given, inside))
    given.end()
    return found


def _read_named_schema(given: Fields, inside: str) -> _Form:
    described = given
    if inside:
        inner = given.fields(inside)
        if inner is None:
            raise Refusal(given.where(inside), "is required", "missing_required_parameter")
        described = inner
    described.needed_text("name")
    described.text("description")
    described.flag("strict")
    found = _read_schema(described)
    if inside:
        described.end()
    return found


def _read_schema(described: Fields) -> _Form:
    where, schema = described.where("schema"), described.object("schema")
    if schema is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    return _Form(where, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


def _read_open_names(given: Fields | None, prefix: str) -> list[_Form]:
    if given is None:
        return []
    found = []
    for name, kind in OPEN_NAMES.items():
        where = given.where(f"{prefix}{name}")
        if (text := _text(kind, given, f"{prefix}{name}")) is not None:
            found.append(_Form(where, Constraint(kind, text)))
    if not prefix:
        given.end()
    return found


def _text(kind: ConstraintKind, given: Fields, name: str) -> str | None:
    """Return the text of a constraint. None if the body does not have it."""
    if kind is ConstraintKind.JSON_OBJECT:
        return "" if given.flag(name) else None
    if kind is ConstraintKind.CHOICE:
        choices = given.items(name)
        return None if choices is None else json.dumps(choices)
    if kind is not ConstraintKind.JSON_SCHEMA:
        return given.text(name)
    schema: Any = given.take(name)
    return schema if schema is None or isinstance(schema, str) else json.dumps(schema)


@dataclass(frozen=True, slots=True)
class ToolRules:
    """The tools of a body, and the rules for their calls."""

    tools: tuple[Mapping[str, Any], ...] = ()  # in the shape of a chat completion, for the template
    # index of each strict tool -> path of its `strict` flag in the request body
    strict: Mapping[int, str] | None = None
    callable: frozenset[str] | None = None  # names; None: all
    # path, in the request body, of the tool choice that requires or restricts calls; "": there is none
    where: str = ""
    requires_call: bool = False
    # path, in the request body, of the flag that limits the reply to one call; "": no limit
    single: str = ""

    @property
    def param(self) -> str:
        """Return the name of a parameter that needs a constraint on calls. Empty if there is none."""
        needs = (self.where, *(self.strict or {}).values(), self.single)
        return next((each for each in needs if each), "")

    def constrain(self, form: FormatFields, style: CallStyle | None) -> FormatFields:
        """Return the constraint for replies that have `form` or call tools. Raises Refusal if impossible."""
        if not self.tools:
            return form
        known = None if style is None else style.form
        kind = None if form.constraint is None else form.constraint.kind
        if not self.param:
            if kind not in COMPOSED or known is None:
                return form
        elif known is None:
            problem = "is not supported for this model, whose tool calls are not JSON"
            raise Refusal(self.param, problem, "unsupported_parameter")
        elif kind is not None and kind not in COMPOSED and not self.requires_call:
            problem = "cannot be combined with a grammar"
            raise Refusal(self.param, problem, "unsupported_parameter")
        assert known is not None
        constraint = self._constraint(known, form.constraint)
        if (found := constraint.problem()) is not None:
            raise Refusal("tools", found)
        return FormatFields(
            constraint, {**form.params, f"constraint.{constraint.kind.value}": "tools"}
        )

    def _constraint(self, form: str, reply: Constraint | None) -> Constraint:
        tools = []
        for number, tool in enumerate(self.tools):
            function = tool["function"]
            if self.callable is not None and function["name"] not in self.callable:
                continue
            is_strict = number in (self.strict or {})
            schema = None
            if is_strict or self.requires_call:
                schema = _arguments(
                    function.get("parameters"), self._schema_path(number, is_strict)
                )
            tools.append({"name": function["name"], "schema": schema, "is_lenient": not is_strict})
        inner = None if reply is None or self.requires_call else [reply.kind.value, reply.text]
        wanted = {
            "form": form,
            "tools": tools,
            "must": self.requires_call,
            "single": bool(self.single),
            "reply": inner,
        }
        return Constraint(ConstraintKind.TOOL_CALLS, json.dumps(wanted))

    def _schema_path(self, number: int, is_strict: bool) -> str:
        return (self.strict or {})[number] if is_strict else self.where or "tools"


def take_choice(fields: Fields, rules: ToolRules, *, is_nested: bool) -> ToolRules:
    """Read `tool_choice` and `parallel_tool_calls`. `is_nested`: names of tools are inside `function`."""
    where = fields.where("tool_choice")
    choice = fields.take("tool_choice")
    if not fields.flag("parallel_tool_calls", True) and rules.tools:
        rules = replace(rules, single=fields.where("parallel_tool_calls"))
    if isinstance(choice, Mapping):
        return _read_choice_object(Fields(choice, where), where, rules, is_nested)
    if choice not in (None, "auto", "none", "required"):
        raise Refusal(where, "must be 'auto', 'none', 'required' or name a tool")
    if choice == "none":
        return ToolRules()
    return require_call(rules, where) if choice == "required" else rules


def require_call(rules: ToolRules, where: str, names: Sequence[str] | None = None) -> ToolRules:
    """Require a call. With `names`, require a call of one of these tools."""
    if not rules.tools:
        raise Refusal(where, "needs tools")
    return replace(allow_only(rules, where, names), requires_call=True)


def allow_only(rules: ToolRules, where: str, names: Sequence[str] | None) -> ToolRules:
    """Allow only calls of the tools in `names`. None: calls of all tools."""
    if names is None:
        return replace(rules, where=where)
    known = {each["function"]["name"] for each in rules.tools}
    for name in names:
        if name not in known:
            raise Refusal(where, f"{quoted(name)} is not one of the tools")
    return replace(rules, callable=frozenset(names), where=where)


def _read_choice_object(choice: Fields, where: str, rules: ToolRules, is_nested: bool) -> ToolRules:
    kind = choice.needed_text("type")
    if kind == "function":
        name = _name(choice, is_nested)
        choice.end()
        return require_call(rules, where, [name])
    if kind != "allowed_tools":
        problem = f"{quoted(kind)} is not one of function, allowed_tools"
        raise Refusal(choice.where("type"), problem, "unsupported_parameter")
    inner = (choice.fields("allowed_tools") or choice) if is_nested else choice
    mode, given = inner.needed_text("mode"), inner.items("tools") or ()
    if mode not in ("auto", "required"):
        raise Refusal(inner.where("mode"), f"{quoted(mode)} is not one of auto, required")
    names = []
    for number, each in enumerate(given):
        tool = Fields(each, f"{inner.where('tools')}[{number}]")
        tool.only("type", "function")
        names.append(_name(tool, is_nested))
        tool.end()
    if not names:
        raise Refusal(inner.where("tools"), "must name a tool")
    inner.end()
    choice.end()
    return (
        require_call(rules, where, names) if mode == "required" else allow_only(rules, where, names)
    )


def _name(fields: Fields, is_nested: bool) -> str:
    if not is_nested:
        return fields.needed_text("name")
    function = fields.fields("function")
    if function is None:
        raise Refusal(fields.where("function"), "is required", "missing_required_parameter")
    name = function.needed_text("name")
    function.end()
    return name


def _arguments(parameters: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, without annotations."""
    if parameters is None:
        return dict(NO_ARGUMENTS)
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list | tuple) and "object" in kinds):
        raise Refusal(where, "needs a tool whose parameters are an object")
    found: dict[str, Any] = _bare(parameters)
    if "$ref" in found:  # a recursive reference must be the only keyword
        return found
    return {**found, "type": "object"}


def _bare(schema: Any) -> Any:
    """Return a schema without annotations, at any depth."""
    if isinstance(schema, list | tuple):
        return [_bare(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ANNOTATIONS:
            continue
        if name in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[name] = {key: _bare(each) for key, each in value.items()}
        else:
            found[name] = _bare(value) if name in INNER_SCHEMAS else value
    return found
