"""The Jinja environment of chat templates: what templates may use, and a bound on their time.

The environment is the one templates are written for: sandboxed and immutable, blocks trimmed, loop
controls, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, and
``{% generation %}`` as a plain block. Knows nothing of messages.

Time. A template comes from a checkpoint, so it is as trusted as the weights, but what it loops over
comes from clients. Every turn of a loop and every call of a macro looks at a deadline: the check is
put into the template's syntax tree when it is parsed. A template can run for ever only through
those two, so rendering ends in time, on any thread and without signals. It does not bound a single
slow operation (a huge multiplication, say), which the sandbox allows to nobody but the template's
author: templates sent by clients are therefore rendered in a process apart (``template_process``).
"""

import json
import threading
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateTimeout(Exception):
    """Rendering went over its time."""


class _Deadline(threading.local):
    at = float("inf")


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here a plain block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Parses and runs chat templates. The deadline is the calling thread's own."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._deadline = _Deadline()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
        repeated += tree.find_all(nodes.Macro)
        for node in repeated:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        return tree

    def check_time(self) -> None:
        """Raise TemplateTimeout when the deadline has passed; called from within templates."""
        if time.monotonic() > self._deadline.at:
            raise TemplateTimeout

    def run(self, template: Template, variables: dict[str, Any], seconds: float) -> str:
        """Return *template* rendered with *variables*; TemplateTimeout if it takes too long."""
        self._deadline.at = time.monotonic() + seconds
        try:
            return template.render(variables)
        finally:
            self._deadline.at = float("inf")


@lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Return the compiled template; TemplateSyntaxError if it is not one."""
    return ENVIRONMENT.from_string(source)


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template; TemplateSyntaxError if it is not one."""
    return ENVIRONMENT.parse(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


ENVIRONMENT = TemplateEnvironment()
