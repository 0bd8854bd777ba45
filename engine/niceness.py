"""Give way to other processes of this host, so that who keeps watch over a rank finds a core when it needs one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def give_way(nice: int) -> None:
    """Be nicer than now by `nice`, as will be the threads that are started from here on.

    Where Linux shares the cores between sessions (`sched_autogroup`), niceness counts within one only, and a launcher
    and its ranks have one of their own: there the session becomes so nice as a whole.
    """
    if nice == 0:
        return
    os.nice(nice)
    if os.getsid(0) == os.getppid():
        # There may be no such thing here. Where there is, it takes one wish in a tenth of a second.
        with suppress(OSError):
            AUTOGROUP.write_text(str(nice))
