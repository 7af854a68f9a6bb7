"""The Jinja sandbox for chat templates, with the functions that `transformers` gives to templates.

Jinja's immutable sandbox lets a template access only its variables. Two hooks of Jinja track which characters
the template wrote (see template_text.py). The code generator turns every constant into a `TemplateText`,
which marks its characters as written by the template. The environment's `concat` joins all output of
templates, macros and blocks, and keeps these marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pensieve.text.template_text import concat, written


class _MarkingCodeGenerator(CodeGenerator):
    """Compiles a template so that each constant is a `TemplateText`."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.written({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({''.join(group)!r})"


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks replies for training. The tag has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment whose output keeps the marks of `TemplateText`."""

    code_generator_class = _MarkingCodeGenerator
    concat = staticmethod(concat)
    written = staticmethod(written)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # the optimizer would join constants and lose their marks
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception

    def options(self, source: str) -> set[str]:
        """Return the variables that a template expects.

        It never sets them, or it tests whether they are defined.
        """
        tree = self.parse(source)
        stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        tested = {
            test.node.name
            for test in tree.find_all(nodes.Test)
            if test.name == "defined" and isinstance(test.node, nodes.Name)
        }
        return jinja2.meta.find_undeclared_variables(tree) - (stored - tested)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON of a value. Unlike Jinja's own filter, it does not escape `<` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
