"""A folder beside a run for what a command makes on its way. It goes with it, or where it was killed with the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from engine.mesh import Mesh
from engine.together import together

PREFIX = ".evaluation-"


@contextmanager
def workshop(run_dir: Path, mesh: Mesh) -> Iterator[Path]:
    """A folder that all ranks see, for as long as they need it. Rank 0 makes and removes it."""
    mine = None
    with together(mesh):
        if mesh.world_rank == 0:
            sweep(run_dir)
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
    with _alone(run_dir):
        for left in run_dir.glob(f"{PREFIX}*"):
            if (held := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _made(run_dir: Path) -> tuple[Path, int | None]:
    """A new folder, and what keeps it from `sweep` for as long as this process lives."""
    with _alone(run_dir):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run_dir))
        return folder, _lock(folder)


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Nobody else makes or removes such a folder meanwhile: one that is just made is not locked yet."""
    held = _lock(run_dir, wait=True)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """What keeps others from it until it is closed; None where another has that, or its file system has no such thing.

    Over NFS a folder can't be locked: what is left there stays.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
