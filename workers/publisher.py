"""Upload the checkpoints of one attempt in the background, one after another, while it trains on."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import structlog

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that waits for its upload."""

    step: int
    folder: Path
    metrics: Mapping[str, Any]
    best_step: int | None = None
    """Step of the one to keep besides the newest, as of this one."""
    seq: int = 0
    """Of the event that told of it."""


def superfluous(waiting: Sequence[Saved], *, keep: int) -> list[Saved]:
    """Of those that wait, oldest first, all but the `keep` newest, the newest's best, and the best that each names."""
    others = [saved for saved in waiting if saved.step != waiting[-1].best_step]
    left_out = others[: max(0, len(others) - keep)]
    named = {saved.best_step for saved in waiting if saved not in left_out}
    return [saved for saved in left_out if saved.step not in named]


class Publisher:
    """`publish` uploads one. When it fails, `failed` hears why, and the next is tried as if nothing had been."""

    def __init__(
        self,
        outbox: Path,
        *,
        keep: int,
        publish: Callable[[Saved], None],
        failed: Callable[[Saved, Exception], None],
    ) -> None:
        self._outbox = outbox
        self._keep = keep
        self._publish = publish
        self._failed = failed
        self._waiting: deque[Saved] = deque()
        self._changed = Condition()
        self._busy = False
        self._closed = False
        self.listed: int | None = None
        """Step of the one that was published last, and that the run has not gone back from."""
        self._limit = inf
        """The least step that was gone back to since the upload under way began."""
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="publisher", daemon=True)
        self._thread.start()

    def add(
        self, step: int, folder: Path, metrics: Mapping[str, Any], *, best_step: int | None = None, seq: int = 0
    ) -> None:
        """Queue the checkpoint in `folder`. Where uploads fall behind, the oldest that wait are left out.

        One that is kept has its best kept too: by the time it is published, it would else name one that is nowhere.
        """
        # The engine keeps its newest few only; a second name for each file keeps the bytes until they are uploaded.
        # By a name of its own, as a run that went back saves a step anew.
        linked = self._outbox / f"{folder.name}-{seq}"
        try:
            shutil.copytree(folder, linked, copy_function=_link)
        except OSError as error:
            # Mostly because it is gone already, and a newer one is there.
            shutil.rmtree(linked, ignore_errors=True)
            log.warning("checkpoint not taken for its upload", step=step, error=str(error))
            return
        with self._changed:
            self._waiting.append(Saved(step, linked, metrics, best_step, seq))
            for left_out in superfluous(self._waiting, keep=self._keep):
                self._waiting.remove(left_out)
                shutil.rmtree(left_out.folder)
                log.warning("checkpoint left out", step=left_out.step, reason="uploads are slower than the training")
            self._changed.notify_all()

    def gone_back(self, step: int) -> None:
        """The run goes on from this step: what waits and lies beyond is not uploaded, and what is listed of it void."""
        with self._changed:
            for left in [saved for saved in self._waiting if saved.step > step]:
                self._waiting.remove(left)
                shutil.rmtree(left.folder)
            self._limit = min(self._limit, step)
            self.listed = None if self.listed is None else min(self.listed, step)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until nothing is left to upload. How long is the storage's say: wait where you can be interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._busy))

    def close(self) -> None:
        """Begin nothing more; who waits in `flush` returns. An upload under way goes on; its row will be refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (saved := self._next()) is not None:
            try:
                self._publish(saved)
            except Exception as error:  # the thread's edge: whatever storage and database may raise
                log.warning("checkpoint not published", step=saved.step, exc_info=True)
                self._failed(saved, error)
            else:
                with self._changed:
                    self.listed = int(min(saved.step, self._limit))
                log.info("checkpoint published", step=saved.step)
            shutil.rmtree(saved.folder, ignore_errors=True)

    def _next(self) -> Saved | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            if self._closed:
                return None
            self._busy, self._limit = True, inf
            return self._waiting.popleft()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # Not every file system has second names.
        shutil.copyfile(source, target)
