"""How fast this host's slots really are: asked of the engine once, aside, and remembered beside the data.

The engine measures, in a process of its own, before the host is offered or while no job is here, which would halve what
it finds for ever. What it found goes into the node's row, where plans find it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

import structlog

from core.settings import Settings, trainer_environment
from engine.plan.cluster import from_facts
from workers.hardware import Hardware, cores

log = structlog.get_logger(__name__)

MOST_SECONDS = 120.0
"""Beginning takes far longer than measuring on a host that is busy."""
LOOK_SECONDS = 30.0
"""How often it is looked whether a host that is in use is free."""
FILE = "calibration.json"
FORM = 2
"""Of what is measured: what an earlier version kept tells less."""


class Calibration:
    """One host's; `stop` ends it early."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.cache = settings.data_dir / FILE
        self.hardware = hardware
        slots = [hardware.device, hardware.num_slots, hardware.slot_memory_bytes]
        self.of = [FORM, version("torch"), settings.node_name, *slots, cores()]
        """What the figures hold for."""
        self._process: subprocess.Popen[str] | None = None
        self._stopped = Event()

    @property
    def is_known(self) -> bool:
        """Nothing need be measured."""
        return self._kept() is not None

    def facts(self, is_free: Callable[[], bool]) -> dict[str, Any] | None:
        """What the engine finds a slot to do, or found when it was asked before; None: it failed, or was stopped.

        Waits until the host `is_free`. What was found while a job came is measured again.
        """
        if (known := self._kept()) is not None:
            return known
        while not self._stopped.is_set():
            if is_free():
                facts = self._measured()
                if facts is None:
                    return None
                if is_free():
                    self._keep(facts)
                    return facts
            self._stopped.wait(LOOK_SECONDS)
        return None

    def stop(self) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.kill()

    def command(self) -> list[str]:
        device = self.hardware.device
        threads = ["--threads", str(max(1, cores() // self.hardware.num_slots))] if device == "cpu" else []
        return [sys.executable, "-m", "engine", "calibrate", "--device", device, *threads]

    def _measured(self) -> dict[str, Any] | None:
        devices = range(self.hardware.num_slots) if self.hardware.device == "cuda" else ()
        try:
            self._process = subprocess.Popen(
                self.command(),
                env=trainer_environment(devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            with self._process as process:
                try:
                    said, _ = process.communicate(timeout=0 if self._stopped.is_set() else MOST_SECONDS)
                finally:
                    process.kill()
            return _checked(json.loads(said))
        except (subprocess.SubprocessError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("host not calibrated; plans go by a data sheet, or say nothing of time", error=str(error))
            return None

    def _kept(self) -> dict[str, Any] | None:
        try:
            kept = json.loads(self.cache.read_text())
            return _checked(kept["facts"]) if kept["of"] == self.of else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, facts: dict[str, Any]) -> None:
        new: Path = self.cache.with_suffix(".new")
        try:
            new.write_text(json.dumps({"of": self.of, "facts": facts}))
            os.replace(new, self.cache)
        except OSError as error:
            log.warning("calibration not kept; the next start measures again", error=str(error))


def _checked(facts: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, KeyError or TypeError where these are no facts."""
    from_facts(facts, memory_bytes=None, node_size=1)
    return facts
