"""A folder beside a run for what a command makes on its way. It goes with it, or where it was killed with the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from engine.mesh import Mesh
from engine.together import together

PREFIX = ".evaluation-"
LONGEST_SECONDS = 5.0
"""That another one's clearing up is waited for."""
BETWEEN_SECONDS = 0.05


@contextmanager
def workshop(run_dir: Path, mesh: Mesh) -> Iterator[Path]:
    """A folder that all ranks see, for as long as they need it. Rank 0 makes and removes it."""
    mine = None
    with together(mesh):
        if mesh.world_rank == 0:
            mine = _made(run_dir)
    made = [None if mine is None else str(mine[0])] * mesh.parallel.ranks
    if mesh.parallel.ranks > 1:
        dist.all_gather_object(made, made[0])
    assert made[0] is not None
    try:
        yield Path(made[0])
    finally:
        if mine is not None:
            folder, held = mine
            shutil.rmtree(folder, ignore_errors=True)
            if held is not None:
                os.close(held)


def sweep(run_dir: Path) -> None:
    """Remove what commands left that were killed: the kernel let go of their folders with them."""
    with _swept(run_dir):
        pass


def _made(run_dir: Path) -> tuple[Path, int | None]:
    """A new folder, and what keeps it from `sweep` for as long as this process lives."""
    with _swept(run_dir):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run_dir))
        return folder, _lock(folder)


@contextmanager
def _swept(run_dir: Path) -> Iterator[None]:
    """What is left is gone, and nobody else sweeps meanwhile: a folder that is just made is not locked yet.

    What is left stays where somebody else is at it for too long, as a process that was stopped would be.
    """
    held = _lock(run_dir, seconds=LONGEST_SECONDS)
    try:
        if held is not None:
            for left in run_dir.glob(f"{PREFIX}*"):
                if (free := _lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(free)
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(folder: Path, *, seconds: float = 0.0) -> int | None:
    """What keeps others from it until it is closed; None where another still has that, or there is no such thing.

    Over NFS a folder can't be locked: what is left there stays.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        # It is gone, or another user's, who is to remove it.
        return None
    until = time.monotonic() + seconds
    try:
        while not (is_mine := _take(descriptor)) and time.monotonic() < until:
            time.sleep(BETWEEN_SECONDS)
    except OSError:
        is_mine = False
    if not is_mine:
        os.close(descriptor)
        return None
    return descriptor


def _take(descriptor: int) -> bool:
    """Whether its lock was free, and so is this process's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
