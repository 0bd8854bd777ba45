"""Worlds of ranks that stay up and run one test case after another; torch is imported once for all of them.

A case is a function at a module's top level; each rank calls it with the same arguments, and `run` returns each answer.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

PRELOADED = ["torch", "torch.distributed", "engine.trainer"]
"""Two seconds of a core to import: so that it is done once, in a process all ranks are forked from. That of the
tests would not do, as it has threads."""
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""A rank that waits longer for the others raises."""


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message is its traceback."""


class World:
    """`ranks` processes that have formed a gloo world, one thread each. They start with the first case."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._meeting: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Callable[..., Any], *args: Any, seconds: float = 120, **kwargs: Any) -> list[Any]:
        """What `case(*args, **kwargs)` returns on each rank, in rank order.

        Raises RankFailed with the first failing rank's traceback; the next case then starts the world anew.
        """
        if not self._processes:
            self._start()
        order = pickle.dumps((sys.path, pickle.dumps((case, args, kwargs))))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(order)
            return self._answers(monotonic() + seconds)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if kill:
                process.kill()
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()
        if self._meeting is not None:
            self._meeting.cleanup()
        self._processes, self._pipes, self._meeting = [], [], None

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
        self._meeting = tempfile.TemporaryDirectory(prefix="world-")
        address = (Path(self._meeting.name) / "rendezvous").as_uri()
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, self.ranks, address), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                late = [rank for rank in range(self.ranks) if rank not in answers]
                raise RankFailed(f"ranks {late} did not answer in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    fine, answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RankFailed(f"rank {rank} of {self.ranks} died") from None
                if not fine:
                    raise RankFailed(f"rank {rank} of {self.ranks} raised:\n{answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(self.ranks)]


def _rank(pipe: Connection, rank: int, ranks: int, address: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", ENGINE_RENDEZVOUS=address
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)
    try:
        while True:
            try:
                path, order = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            pipe.send_bytes(_answer(path, order))
    finally:
        dist.destroy_process_group()


def _answer(path: list[str], order: bytes) -> bytes:
    # The test module may have been found through a path that pytest added after this rank was started.
    sys.path[:] = path
    try:
        case, args, kwargs = pickle.loads(order)
        return pickle.dumps((True, case(*args, **kwargs)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
