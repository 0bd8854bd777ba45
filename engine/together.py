"""What one rank does for all, or each does alone, fails on all of them: none waits for one that has raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.failure import LostContact
from engine.mesh import Mesh


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """All ranks leave the block, once each has done its part; or each raises, with its own error where it has one."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if mesh.parallel.ranks > 1:
        # On the host: the error may be that the device is full, or dead.
        raised_anywhere = torch.tensor(int(error is not None))
        with mesh.exchange():
            dist.all_reduce(raised_anywhere)
        if error is None and raised_anywhere:
            raise LostContact(f"{raised_anywhere.item()} of {mesh.parallel.ranks} ranks failed")
    if error is not None:
        raise error


@contextmanager
def said_once(mesh: Mesh) -> Iterator[None]:
    """Likewise; but what rank 0 raises is its alone, as it will be the same for all. Others raise where it does not.

    Such blocks may be in this one as well: what is exchanged here is of the same kind.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if mesh.parallel.ranks > 1:
        is_own = error is not None and not isinstance(error, LostContact)
        raised_anywhere = torch.tensor((FIRST if mesh.world_rank == 0 else 1) * is_own)
        try:
            with mesh.exchange():
                dist.all_reduce(raised_anywhere)
        except RuntimeError:
            # Somebody is gone, who may not have come here. One's own reason says more.
            if error is None:
                raise
        else:
            if (raised_anywhere and error is None) or (raised_anywhere >= FIRST and mesh.world_rank > 0):
                raise LostContact("another rank says why") from error
    if error is not None:
        raise error


FIRST = 2**32
"""More than there are ranks."""
