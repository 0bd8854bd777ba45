"""Chat templates are somebody's programs: what they may reach, and for how long they may run, beside what Jinja's own
sandbox sees to. What they may use is what `transformers` gives them. Their memory is the process's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_TURNS = 100_000
"""Of all loops and macros of one rendering; a conversation takes a few for each message. So many take a second."""
MOST_BITS = 4096
"""Of a power: there is no other operation that takes an hour of a few characters."""
MOST_REPEATED = 1_000_000
"""Characters or items that a text or a list, repeated by a number, may have."""


def program(text: str) -> jinja2.Template:
    """The template, to `run`. Raises jinja2.TemplateError."""
    return _Box().from_string(text)


def variables(text: str) -> set[str]:
    """What the template looks at."""
    return set(meta.find_undeclared_variables(_Box().parse(text)))


def run(program: jinja2.Template, **given: Any) -> str:
    """What the template makes of `given`. Raises jinja2.TemplateError, and what its own mistakes raise."""
    token = _turns.set(_Turns())
    try:
        return program.render(**given)
    finally:
        _turns.reset(token)


class _Turns:
    def __init__(self) -> None:
        self.left = MOST_TURNS


_turns: ContextVar[_Turns] = ContextVar("turns")


class _Box(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up, in which whatever could go on and on counts its turns."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        # What it returns is the caller's to say, in each rendering.
        self.globals["strftime_now"] = None
        self.globals["dict"] = _PlainDict()
        self.globals["namespace"] = _PlainNamespace

    def turn(self) -> str:
        """Another turn. A template can't name this, and so can't put something else in its place."""
        turns = _turns.get()
        turns.left -= 1
        if turns.left < 0:
            raise SecurityError(f"the chat template does not end within {MOST_TURNS:,} turns of its loops and macros")
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _REFUSALS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        made: str = super()._generate(_Counting().visit(source), *arguments, **options)
        return made


class _Counting(NodeTransformer):
    """Has each loop and macro take a turn before its body."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        taken = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(taken))
        for made in (node.body[0], *node.body[0].find_all(nodes.Node)):
            made.environment, made.lineno = node.environment, node.lineno
        counted: nodes.Node = node
        return counted


def _refuse_long(left: Any, right: Any) -> None:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
            if len(repeated) * times > MOST_REPEATED:
                raise SecurityError(f"a chat template can't repeat something to more than {MOST_REPEATED:,} items")
            return


def _refuse_huge(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MOST_BITS:
        raise SecurityError(f"a chat template can't have a number of more than {MOST_BITS:,} bits")


_REFUSALS: dict[str, Callable[[Any, Any], None]] = {"*": _refuse_long, "**": _refuse_huge}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says. Its body is rendered and the mark is not needed here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace that keeps no underscored names, through which a template could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _PlainDict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't keep {name!r} in a namespace; rename it")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
