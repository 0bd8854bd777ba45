"""A bell per job over Redis pub/sub: "look again". It says nothing else, and a lost ring costs a reader a moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from threading import Event

import redis
import redis.asyncio
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

log = structlog.get_logger(__name__)

_PATIENCE_SECONDS = 1.0
_GLANCE_SECONDS = 0.2
"""How often a listening thread looks whether it should end."""


def channel(job_id: str) -> str:
    return f"trainshed:job:{job_id}"


class Bell:
    """Rings from any thread; listens in an event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ringing = self._client(socket_timeout=_PATIENCE_SECONDS)

    def ring(self, job_id: str) -> None:
        """Wake whoever listens to this job. Never raises: readers look again by themselves after a while."""
        try:
            self._ringing.publish(channel(job_id), b"")
        except (RedisError, OSError) as error:
            log.warning("bell not rung", job=job_id, reason=str(error))

    async def listen(self, job_id: str) -> AsyncIterator[None]:
        """Yield once when listening has begun, and then for each ring. Ends when the broker goes away.

        Look at the rows after each yield: what happened before the first one rang for nobody.
        """
        client = redis.asyncio.Redis.from_url(self._url, socket_connect_timeout=_PATIENCE_SECONDS)
        try:
            async with client.pubsub() as subscription:
                await subscription.subscribe(channel(job_id))
                async for message in subscription.listen():
                    if message["type"] in {"subscribe", "message"}:
                        yield
        except (RedisError, OSError) as error:
            log.warning("bell not heard", job=job_id, reason=str(error))
        finally:
            await client.aclose()

    def rings(self, job_id: str, *, until: Event) -> Iterator[None]:
        """`listen` for a thread: goes on through absences of the broker until `until` is set."""
        while not until.is_set():
            client = self._client(socket_timeout=None)
            try:
                with client.pubsub(ignore_subscribe_messages=True) as subscription:  # type: ignore[no-untyped-call]
                    subscription.subscribe(channel(job_id))
                    # Once at the start, and again after each absence: what rang meanwhile was heard by nobody.
                    yield
                    while not until.is_set():
                        if subscription.get_message(timeout=_GLANCE_SECONDS) is not None:
                            yield
            except (RedisError, OSError) as error:
                log.warning("bell not heard", job=job_id, reason=str(error))
                until.wait(_PATIENCE_SECONDS)
            finally:
                client.close()

    def close(self) -> None:
        self._ringing.close()

    def _client(self, *, socket_timeout: float | None) -> redis.Redis:
        return redis.Redis.from_url(
            self._url,
            socket_timeout=socket_timeout,
            socket_connect_timeout=_PATIENCE_SECONDS,
            # Once more over a fresh connection where the broker was restarted; never where it is silent.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
