"""Which of a run's processes this is, as our launcher or torchrun said. The engine reads its environment here only."""

from __future__ import annotations

import os
from dataclasses import dataclass

RENDEZVOUS = "ENGINE_RENDEZVOUS"
"""Variable with the address where ranks meet (`file:///…`), set by our launcher."""

NICE = "ENGINE_NICE"
"""Variable that says how much a rank gives way to other processes once it trains, set by our launcher."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that says how many queues the streams of a CUDA device have, read when a process first uses one."""
MOST_QUEUES = 32
"""That CUDA gives a device. Streams that share one wait behind each other: there a pipeline's early receive would hold
up the kernels that its message waits for."""


@dataclass(frozen=True)
class Standing:
    """One process among the ranks."""

    world_rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this host; its number of device."""
    rendezvous: str | None
    """The address where ranks meet; None: torchrun's `env://`, or nobody to meet."""

    queues: str | None = None
    """What `QUEUES` says; None: nothing."""
    nice: int = 0
    """How much it gives way to other processes, as the command `nice` means it."""

    @property
    def launched(self) -> bool:
        """Our launcher looks after this rank."""
        return self.rendezvous is not None


def standing() -> Standing:
    """Of this process; a run of one rank where nobody said."""
    return Standing(
        world_rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        rendezvous=os.environ.get(RENDEZVOUS),
        queues=os.environ.get(QUEUES),
        nice=int(os.environ.get(NICE, "0")),
    )
