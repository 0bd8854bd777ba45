"""How often a key may ask: a bucket of tokens for each, in the broker, so that all processes of the API share it.

A bucket holds a minute's worth and fills evenly. What the broker forgets is a full bucket; while it is away nobody is
held up, and the log says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import cast

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

log = structlog.get_logger(__name__)

_PATIENCE_SECONDS = 0.5
AWAY_SECONDS = 5.0
"""How long a broker that did not answer is left alone: each request would wait for it otherwise."""

# By the broker's clock: hosts of the API need not agree on the time.
_TAKE = """
local most = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at', 'refused_at')
local refused = 0
if now - (tonumber(bucket[3]) or 0) < 120 then
  refused = 1
end
local waited = math.max(0, now - (tonumber(bucket[2]) or now))
local tokens = math.min(most, (tonumber(bucket[1]) or most) + waited * most / 60)
local taken = 0
if tokens >= 1 then
  tokens = tokens - 1
  taken = 1
else
  redis.call('HSET', KEYS[1], 'refused_at', string.format('%.6f', now))
end
redis.call('HSET', KEYS[1], 'tokens', string.format('%.9f', tokens), 'at', string.format('%.6f', now))
redis.call('EXPIRE', KEYS[1], 120)
return {taken, string.format('%.9f', tokens), refused}
"""


def bucket(key_id: str) -> str:
    """Name of a key's bucket in the broker: a hash of `tokens`, `at` which time there were so many, `refused_at`."""
    return f"trainshed:bucket:{key_id}"


@dataclass(frozen=True)
class Verdict:
    """Whether a request may go on, and what its key has left."""

    per_minute: int
    allowed: bool
    tokens: float
    refused_lately: bool
    """Whether the key was told to come again later, within the last two minutes."""

    @property
    def remaining(self) -> int:
        return int(self.tokens)

    @property
    def full_in(self) -> float:
        """Seconds until the bucket is full again."""
        return (self.per_minute - self.tokens) * 60 / self.per_minute

    @property
    def retry_after(self) -> float:
        """Seconds until there is a token."""
        return max(0.0, 1 - self.tokens) * 60 / self.per_minute


class Throttle:
    """Takes tokens, from any thread."""

    def __init__(self, url: str, *, per_minute: int) -> None:
        self.per_minute = per_minute
        self._away_until = 0.0
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=_PATIENCE_SECONDS,
            socket_connect_timeout=_PATIENCE_SECONDS,
            # Once more over a fresh connection where the broker was restarted; never where it is silent.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
        self._take = self._client.register_script(_TAKE)

    def take(self, key_id: str) -> Verdict | None:
        """A token of this key's; None where nobody counts."""
        if not self.per_minute or monotonic() < self._away_until:
            return None
        try:
            answer = self._take(keys=[bucket(key_id)], args=[self.per_minute])
        except (RedisError, OSError) as error:
            self._away_until = monotonic() + AWAY_SECONDS
            log.warning("the broker is away, so requests are not limited", reason=str(error))
            return None
        taken, tokens, refused = cast("tuple[int, bytes, int]", answer)
        return Verdict(self.per_minute, allowed=bool(taken), tokens=float(tokens), refused_lately=bool(refused))

    def close(self) -> None:
        self._client.close()
