"""Filters such as `label[team]=a`, for which FastAPI has no kind of parameter."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from fastapi import Request

from core.errors import InvalidRequest
from core.spec import MOST_LABELS


def wanted_by(word: str) -> Callable[[Request], Awaitable[dict[str, str]]]:
    """What a query asks for by `word[name]=value`. InvalidRequest where no job can have that.

    Whatever begins so is meant as a filter: left out, the answer would be jobs that nobody asked for.
    """
    pattern = re.compile(rf"{word}\[(.{{1,64}})\]", re.DOTALL)

    # A coroutine, so that FastAPI needs no thread for it.
    async def of_query(request: Request) -> dict[str, str]:
        labels: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if not name.startswith(f"{word}["):
                continue
            match = pattern.fullmatch(name)
            if match is None:
                raise InvalidRequest(
                    f"Write `{word}[name]=value`, with a name of 1 to 64 characters, not {name[:80]!r}.", param=word
                )
            if labels.setdefault(match[1], value) != value:
                raise InvalidRequest(f"A job has one value of {match[1]!r}; ask for one.", param=word)
        if len(labels) > MOST_LABELS:
            raise InvalidRequest(f"A job has at most {MOST_LABELS} labels; ask for fewer.", param=word)
        return labels

    return of_query
