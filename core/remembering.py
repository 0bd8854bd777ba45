"""Remember what a pure function said, where its arguments are configuration, which Python's own memory can't hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

P = ParamSpec("P")
Result = TypeVar("Result")

MOST = 1024
"""Results that are kept, the last used ones: jobs that are submitted together differ in few numbers."""


class _Said:
    """Arguments, alike where their JSON is: configuration may hold mappings, which have no hash."""

    def __init__(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.given, self.named = given, named
        self.key = (*map(_plain, given), *((name, _plain(value)) for name, value in named.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Said) and self.key == other.key


def remembered(call: Callable[P, Result]) -> Callable[P, Result]:
    """`call`, asked once for the same arguments: it is pure, and nobody changes its result. Errors are not kept."""

    @lru_cache(maxsize=MOST)
    def once(said: _Said) -> Result:
        return call(*said.given, **said.named)

    @wraps(call)
    def asked(*given: P.args, **named: P.kwargs) -> Result:
        return once(_Said(given, named))

    return asked


def _plain(value: Any) -> Any:
    return (type(value), value.model_dump_json()) if isinstance(value, BaseModel) else value
