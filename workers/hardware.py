"""What this host offers: GPUs as `nvidia-smi` lists them, else its cores as slots."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import structlog

from core.settings import Settings, visible_gpus
from engine.plan.cluster import as_facts, known

log = structlog.get_logger(__name__)

SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 20
"""It takes seconds on a host whose driver keeps no GPU awake."""


@dataclass(frozen=True)
class Hardware:
    """Slots, all alike."""

    device: Literal["cpu", "cuda"]
    num_slots: int
    slot_memory_bytes: int | None = None
    slot_peak_flops: float | None = None
    rates: dict[str, Any] | None = None
    """What a data sheet says of a slot, see `engine.plan.cluster.as_facts`; None where there is none."""
    starts_at_once: int | None = None
    """Ranks that it starts at once; None: as many as it has slots for."""


def survey(settings: Settings) -> Hardware:
    """The GPUs that this process may use; where there are none, cores. `settings.slots` says how many of them count.

    To start a rank keeps a core busy for seconds, so unless `settings.starts_at_once` says otherwise, no more are
    started at once than there are cores.
    """
    return replace(slots_of(settings), starts_at_once=settings.starts_at_once or cores())


def slots_of(settings: Settings) -> Hardware:
    gpus = parse(_smi(), visible_gpus())
    if gpus is not None:
        if settings.slots is None or settings.slots >= gpus.num_slots:
            return gpus
        return replace(gpus, num_slots=settings.slots)
    slots = settings.slots or cores()
    return Hardware("cpu", slots, slot_memory_bytes=psutil.virtual_memory().total // slots)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(listing: str, visible: list[str] | None) -> Hardware | None:
    """GPUs from `nvidia-smi`'s lines, limited to those `visible` by index or UUID; None when that leaves none."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    if visible is not None:
        rows = [row for row in rows if row[0] in visible or any(row[1].startswith(name) for name in visible)]
    if not rows:
        return None
    memories = [int(memory) * 1024**2 for _, _, _, memory in rows if memory.isdigit()]
    return Hardware(
        "cuda",
        len(rows),
        min(memories, default=None),
        min((flops for row in rows if (flops := _peak(row[2])) is not None), default=None),
        _rates([row[2] for row in rows]),
    )


def _rates(names: list[str]) -> dict[str, Any] | None:
    """Of the slowest, as a data sheet says; None where one has none."""
    found = [known(name) for name in names]
    entries = [entry for entry in found if entry is not None]
    if len(entries) < len(found):
        return None
    return as_facts(*min(entries, key=lambda entry: entry[0].flops["bf16"]))


def _peak(name: str) -> float | None:
    entry = known(name)
    return entry[0].flops["bf16"] if entry is not None else None


def _smi() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=SMI_SECONDS).stdout
    except FileNotFoundError:
        return ""
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("nvidia-smi gave no answer; this host offers its cores", error=str(error))
        return ""
