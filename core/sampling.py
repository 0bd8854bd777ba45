"""Ask a sampler for text: a request in one Redis list, its answer in another. Answering is the workers' business."""

from __future__ import annotations

import json
import secrets
from typing import Any, cast

import redis
from redis.exceptions import RedisError

from core.errors import Unavailable

REQUESTS = "trainshed:samples"
"""List of requests, each a JSON object with an `id` and an `answer_to`."""
ALIVE = "trainshed:sampler"
"""Key that samplers set anew, with an expiry, while they live."""
ALIVE_SECONDS = 15
ANSWER_SECONDS = 60
"""How long an answer that nobody fetches is kept."""

_CONNECT_SECONDS = 1.0


def answers(request_id: str) -> str:
    """List that gets the one answer to this request."""
    return f"trainshed:sample:{request_id}"


class Sampler:
    """The asking side."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, request: dict[str, Any], *, timeout: float = 60.0) -> dict[str, Any]:
        """The sampler's answer to `request`. Unavailable when none lives, or answers within `timeout` seconds.

        The request carries its deadline (`expires_in`, seconds), so that nobody works for one who has left.
        """
        id_ = secrets.token_hex(8)
        message = json.dumps(request | {"id": id_, "expires_in": timeout})
        try:
            with redis.Redis.from_url(
                self._url, socket_timeout=timeout + 5, socket_connect_timeout=_CONNECT_SECONDS
            ) as client:
                if not client.exists(ALIVE):
                    raise Unavailable("No sampler is online: start one with `trainshed serve` or `trainshed worker`.")
                client.lpush(REQUESTS, message)
                answer = client.blpop([answers(id_)], timeout=timeout)
                if answer is None:
                    client.lrem(REQUESTS, 1, message)
                    raise Unavailable(f"No answer came within {timeout:g} s; the sampler may be busy. Try again.")
        except (RedisError, OSError) as error:
            raise Unavailable("The broker that requests to the sampler go through is away; try again.") from error
        return cast("dict[str, Any]", json.loads(cast("tuple[bytes, bytes]", answer)[1]))

    def is_alive(self) -> bool:
        """Whether a sampler has said lately that it lives."""
        try:
            with redis.Redis.from_url(self._url, socket_timeout=1, socket_connect_timeout=_CONNECT_SECONDS) as client:
                return bool(client.exists(ALIVE))
        except (RedisError, OSError):
            return False
