"""Answer requests for text with models that stay loaded: `python -m workers.sampler`. `core.sampling` asks."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Semaphore
from time import monotonic
from typing import Any

import redis
import structlog
from redis.exceptions import RedisError

from core import catalog
from core import log as logging
from core.sampling import ALIVE, ALIVE_SECONDS, ANSWER_SECONDS, REQUESTS, alive, answers, wanted
from core.services import Services
from core.settings import Settings
from workers import staging
from workers.duties import Duty, beside, keep
from workers.orders import Orders, obey_signals
from workers.residents import Failed, Residents

log = structlog.get_logger(__name__)

REQUESTS_AT_ONCE = 64
"""Of all models. A model takes as many together as it has room for; the rest wait in its process."""
LONGEST_SECONDS = 600.0
"""For a request that does not say when it expires."""
LISTEN_SECONDS = 1
REST_SECONDS = 1.0
LET_GO_SECONDS = 30.0
"""How often it is looked whether what stays loaded was deleted meanwhile."""


class Unwanted(Exception):
    """Nobody waits for the answer any more, or nobody can be told."""


class Counter:
    """Takes requests from the list and puts what becomes of them where that is waited for."""

    def __init__(self, client: redis.Redis, residents: Residents) -> None:
        self.client, self.residents = client, residents
        self.name = secrets.token_hex(8)
        """Of this process: one that is started in its place knows nothing of its requests."""

    def run(self, orders: Orders) -> None:
        """Until a wish comes. Requests under way are left: whoever asked has a deadline."""
        pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="answer")
        # A request that can't be begun stays in the list: for another sampler, or for who asked to take it back.
        free = Semaphore(REQUESTS_AT_ONCE)
        while orders.wait(0) is None:
            try:
                self.say_so()
                if not free.acquire(timeout=LISTEN_SECONDS):
                    continue
                message = self.taken(free)
            except (RedisError, OSError) as error:
                log.warning("broker away", error=str(error))
                orders.wait(REST_SECONDS)
                continue
            if message is not None:
                pool.submit(self.serve, message).add_done_callback(lambda _: free.release())
        pool.shutdown(wait=False, cancel_futures=True)

    def say_so(self) -> None:
        """That this sampler lives."""
        with self.client.pipeline() as pipeline:
            pipeline.set(ALIVE, b"1", ex=ALIVE_SECONDS)
            pipeline.set(alive(self.name), b"1", ex=ALIVE_SECONDS)
            pipeline.execute()

    def taken(self, free: Semaphore) -> bytes | str | None:
        """A request, if one comes soon; else its place is `free` again."""
        message = None
        try:
            if (found := self.client.brpop([REQUESTS], timeout=LISTEN_SECONDS)) is not None:
                message = found[1]
        finally:
            if message is None:
                free.release()
        return message

    def serve(self, message: bytes | str) -> None:
        """Answer one request, with an error where there is nothing better to say."""
        try:
            request = json.loads(message)
            id_ = request["id"]
        except (ValueError, TypeError, KeyError):
            log.warning("request not understood", bytes=len(message))
            return
        try:
            self.tell(id_, {"taken": self.name})
            try:
                self.answer(id_, request)
            except Failed as error:
                self.tell(id_, {"error": {"code": error.code, "message": error.message, "param": error.param}})
            except Exception as error:  # the thread's edge: whoever asked hears of it
                if isinstance(error, Unwanted | RedisError | OSError):
                    raise
                log.exception("request failed")
                self.tell(id_, {"error": {"code": "internal", "message": f"{type(error).__name__}: {error}"}})
        except Unwanted:
            log.info("an answer is not wanted any more", request=id_)
        except (RedisError, OSError) as error:
            log.warning("answer not delivered", error=str(error))

    def answer(self, id_: str, request: dict[str, Any]) -> None:
        """Tell all that the model says. Raises Failed, and Unwanted."""
        asked = {name: value for name, value in request.items() if name not in {"model", "expires_in"}}
        deadline = monotonic() + min(float(request.get("expires_in", LONGEST_SECONDS)), LONGEST_SECONDS)
        lines = self.residents.lines(request["model"], asked, deadline=deadline, is_wanted=lambda: self.is_wanted(id_))
        # Where it is left before its end, the model is told.
        with closing(lines):
            for line in lines:
                self.tell(id_, {name: value for name, value in line.items() if name != "id"})

    def is_wanted(self, id_: str) -> bool:
        return bool(self.client.exists(wanted(id_)))

    def tell(self, id_: str, line: dict[str, Any]) -> None:
        """Put a line where it is waited for. Raises Unwanted where it isn't."""
        with self.client.pipeline() as pipeline:
            pipeline.exists(wanted(id_))
            pipeline.rpush(answers(id_), json.dumps(line))
            pipeline.expire(answers(id_), ANSWER_SECONDS)
            found, *_ = pipeline.execute()
        if not found:
            self.client.delete(answers(id_))
            raise Unwanted


def bring(services: Services) -> Callable[[str, Path], None]:
    """How a model comes to this host, by its key. Who may use it was decided where it was asked for."""

    def bring(key: str, folder: Path) -> None:
        with services.db.reading() as session:
            source = catalog.source_of(session, key)
        if source is None:
            raise Failed("there is no such model any more; it may have been removed", code="not_found", param="model")
        try:
            staging.stage_model(services, source, folder)
        except staging.Unusable as error:
            raise Failed(error.message, code=error.code, param="model") from error

    return bring


def is_gone(services: Services) -> Callable[[str], bool]:
    """Whether there is no such model, or checkpoint, any more."""

    def is_gone(key: str) -> bool:
        with services.db.reading() as session:
            return catalog.source_of(session, key) is None

    return is_gone


def connect(settings: Settings) -> redis.Redis:
    """A client that waits as long as `run` listens."""
    return redis.Redis.from_url(settings.redis, socket_timeout=LISTEN_SECONDS + 5, socket_connect_timeout=5)


def main() -> None:
    settings = Settings()
    logging.setup(settings.log_level)
    orders = Orders()
    obey_signals(orders)
    folder = settings.data_dir.absolute() / "sampler"
    # What a sampler that was killed had staged.
    shutil.rmtree(folder, ignore_errors=True)
    with Services(settings) as services, connect(settings) as client:
        residents = Residents(folder, bring(services))
        counter = Counter(client, residents)
        let_go = Duty("let go", LET_GO_SECONDS, partial(residents.let_go, is_gone(services)))
        log.info("sampler is up")
        try:
            with beside(partial(keep, [let_go]), "let go"):
                counter.run(orders)
        finally:
            residents.close()
            with suppress(RedisError, OSError):
                client.delete(ALIVE, alive(counter.name))


if __name__ == "__main__":
    main()
