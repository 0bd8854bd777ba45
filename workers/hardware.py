"""What this host offers: GPUs as `nvidia-smi` lists them, else its cores as slots."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Literal

import psutil
import structlog

from core.settings import Settings, visible_gpus

log = structlog.get_logger(__name__)

SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 20
"""It takes seconds on a host whose driver keeps no GPU awake."""

PEAK_BF16_FLOPS = {
    "V100": 125e12, "T4": 65e12, "A10": 125e12, "A30": 165e12, "A40": 149.7e12, "A100": 312e12, "L4": 121e12,
    "L40S": 362e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "B200": 2250e12,
}  # fmt: skip
"""Dense, from NVIDIA's data sheets, by a part of the name; fp16 where a GPU has no bf16."""


@dataclass(frozen=True)
class Hardware:
    """Slots, all alike."""

    device: Literal["cpu", "cuda"]
    num_slots: int
    slot_memory_bytes: int | None = None
    slot_peak_flops: float | None = None


def survey(settings: Settings) -> Hardware:
    """The GPUs that this process may use; where there are none, cores. `settings.slots` says how many of them count."""
    gpus = parse(_smi(), visible_gpus())
    if gpus is not None:
        if settings.slots is None or settings.slots >= gpus.num_slots:
            return gpus
        return Hardware("cuda", settings.slots, gpus.slot_memory_bytes, gpus.slot_peak_flops)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slots = settings.slots or cores
    return Hardware("cpu", slots, slot_memory_bytes=psutil.virtual_memory().total // slots)


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
    )


def _peak(name: str) -> float | None:
    # The longest part that fits: "H200" is no "H20".
    fitting = [part for part in PEAK_BF16_FLOPS if part in name]
    return PEAK_BF16_FLOPS[max(fitting, key=len)] if fitting else None


def _smi() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=SMI_SECONDS).stdout
    except FileNotFoundError:
        return ""
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("nvidia-smi gave no answer; this host offers its cores", error=str(error))
        return ""
