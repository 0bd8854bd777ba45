"""Filters such as `label[team]=a`, for which FastAPI has no kind of parameter."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from fastapi import Request

from core.errors import InvalidRequest
from core.spec import MOST_LABELS


def wanted_by(word: str) -> Callable[[Request], Awaitable[dict[str, str]]]:
    """What a query asks for by `word[name]=value`. InvalidRequest where it is more than a job can have."""
    pattern = re.compile(rf"{word}\[(.{{1,64}})\]")

    # A coroutine, so that FastAPI needs no thread for it.
    async def of_query(request: Request) -> dict[str, str]:
        found = ((pattern.fullmatch(name), value) for name, value in request.query_params.items())
        labels = {match.group(1): value for match, value in found if match}
        if len(labels) > MOST_LABELS:
            raise InvalidRequest(f"A job has at most {MOST_LABELS} labels; ask for fewer.", param=word)
        return labels

    return of_query
