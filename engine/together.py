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

    Blocks of the other kind may be in this one, and one rank have raised before another comes to them. Nothing else
    in it may wait for a rank that may have raised.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if mesh.parallel.ranks > 1:
        is_own = error is not None and not isinstance(error, LostContact)
        first = mesh.world_rank == 0
        try:
            reasons = _when_all_are_here(mesh, (FIRST if first else 1) * is_own)
        except RuntimeError:
            # Somebody is gone, who may not have come here. One's own reason says more.
            if error is None:
                raise
        else:
            if reasons and not (is_own and (first or reasons < FIRST)):
                raise LostContact("another rank says why") from error
    if error is not None:
        raise error


def _when_all_are_here(mesh: Mesh, value: int) -> int:
    """The sum of what all say at the end of this block. Whoever is at the end of an inner one learns that it failed."""
    here = 0
    with mesh.exchange():
        while here < mesh.parallel.ranks:
            said = torch.tensor(HERE + value)
            dist.all_reduce(said)
            here, values = divmod(int(said), HERE)
    return values


FIRST = 2**20
"""More than there are ranks."""
HERE = FIRST**2
"""More than all of them can say."""
