"""Chat templates are somebody's programs: what they may reach, and for how long they may run, beside what Jinja's own
sandbox sees to. What they may use is what `transformers` gives them. Their memory is the process's business.

Their time has a bound: turns of loops and macros are counted, and what an operation reads or makes whole is weighed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from contextvars import ContextVar
from functools import wraps
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
"""Of all loops and macros of one rendering; a conversation takes a few for each message. So many take
a second or two where they are loops, and up to ten where they are long lists that filters sort or compare."""
ITEMS_PER_TURN, CHARACTERS_PER_ITEM = 100, 32
"""What is read or made whole takes turns by its size, with what lies in it as often as it does: so many take one."""
MOST_BITS = 4096
"""Of a number that is made: one that is multiplied by itself doubles them, and soon a single product takes hours."""
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

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise SecurityError(
                f"the chat template does not end within {MOST_TURNS:,} turns of its loops and macros, or of what takes "
                "as long"
            )


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
        self.filters = {name: made if name in _AT_ONCE else _weighing(made) for name, made in self.filters.items()}
        self.tests = {name: _weighing(made) if name in _COMPARING else made for name, made in self.tests.items()}
        self.filters[_WEIGHED], self.filters[_COUNTED] = _weighed, _counted

    def turn(self) -> bool:
        """Another turn. A template can't name this, and so can't put something else in its place."""
        _turns.get().take(1)
        return True

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (getattr(__obj, "__self__", None), *args, *kwargs.values()):
            _weighed(value)
        return _weighed(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _REFUSALS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        made: str = super()._generate(_Counting().visit(source), *arguments, **options)
        return made


class _Counting(NodeTransformer):
    """Has each loop and macro take a turn before its body, and each operation some for what it reads or makes whole."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            # What it leaves out does not come to the body.
            self._counted(node)
            node.test = _placed(nodes.And(self._turn(), node.test), node)
            return node
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _placed(nodes.ExprStmt(self._turn()), node))
        counted: nodes.Node = node
        return counted

    def _turn(self) -> nodes.Expr:
        return nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.Compare():
                node.expr = _filtered(node.expr, _WEIGHED)
                for operand in node.ops:
                    operand.expr = _filtered(operand.expr, _WEIGHED)
            case nodes.Output():
                node.nodes = [_filtered(each, _WEIGHED) for each in node.nodes]
            case nodes.Getitem(arg=nodes.Slice()):
                node.node = _filtered(node.node, _COUNTED)
            case nodes.Getitem():
                node.arg = _filtered(node.arg, _WEIGHED)
            case nodes.And() | nodes.Or():
                pass
            case nodes.BinExpr() | nodes.Concat() | nodes.List() | nodes.Dict():
                return _filtered(node, _WEIGHED)
            case nodes.Tuple(ctx="load"):
                return _filtered(node, _WEIGHED)
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    """`node`, through a filter of ours; what is written in the template is as long as it is."""
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return node
    filtered: nodes.Expr = _placed(nodes.Filter(node, name, [], [], None, None), node)
    return filtered


def _placed(made: Any, where: nodes.Node) -> Any:
    for each in (made, *made.find_all(nodes.Node)):
        if each.environment is None:
            each.environment = where.environment
        if each.lineno is None:
            each.lineno = where.lineno
    return made


_WEIGHED, _COUNTED = " weighed", " counted"
"""Filters of ours: no template can write their names."""
_AT_ONCE = frozenset({"length", "count", "first", "last", "default", "d", "attr"})
"""Filters that take no longer for a long list."""
_COMPARING = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="}
)
"""Tests that read what they compare."""


def _weighing(function: Any) -> Callable[..., Any]:
    """A filter or test that takes turns for what it is given and what it makes."""
    given_first = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def weighing(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[given_first:], *kwargs.values()):
            _weighed(value)
        return _weighed(function(*args, **kwargs))

    return weighing


def _weighed(value: Any) -> Any:
    """`value`, for which turns are taken by all that it holds."""
    if type(value) is str:
        if len(value) >= ITEMS_PER_TURN * CHARACTERS_PER_ITEM:
            _turns.get().take(len(value) // (ITEMS_PER_TURN * CHARACTERS_PER_ITEM))
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise SecurityError(f"a chat template can't have a number of more than {MOST_BITS:,} bits")
    elif isinstance(value, _HOLDING):
        turns = _turns.get()
        turns.take(_weight(value, (turns.left + 1) * ITEMS_PER_TURN) // ITEMS_PER_TURN)
    return value


def _counted(value: Any) -> Any:
    """`value`, for which turns are taken by how many items it has, whatever lies in them."""
    if isinstance(value, Sized):
        items = len(value) // (CHARACTERS_PER_ITEM if isinstance(value, str | bytes) else 1)
        _turns.get().take(items // ITEMS_PER_TURN)
    return value


def _weight(value: Any, most: int) -> int:
    """Items in `value`, those within others too and as often as they are there; it stops where there are `most`."""
    items, open_ = 0, [value]
    while open_ and items < most:
        value = open_.pop()
        items += 1
        if isinstance(value, str | bytes):
            items += len(value) // CHARACTERS_PER_ITEM
        elif isinstance(value, Namespace):
            open_ += object.__getattribute__(value, "_Namespace__attrs").values()
        elif isinstance(value, dict):
            open_ += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            open_ += value
    return items


_HOLDING = (str, bytes, list, tuple, dict, Namespace)


def _refuse_long(left: Any, right: Any) -> None:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
            if len(repeated) * times > MOST_REPEATED:
                raise SecurityError(f"a chat template can't repeat something to more than {MOST_REPEATED:,} items")
            return
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS + 1:
        raise SecurityError(f"a chat template can't have a number of more than {MOST_BITS:,} bits")


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
