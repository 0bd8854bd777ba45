"""Give way to other processes of this host, so that who keeps watch over a rank finds a core when it needs one."""

from __future__ import annotations

import os
import time
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
TRIES, BETWEEN_SECONDS = 20, 0.1
"""The kernel takes one wish in a tenth of a second, whoever's it is; others may be tried again."""


def give_way(nice: int) -> None:
    """Be nicer than now by `nice`, as will be the threads that are started from here on.

    Where Linux shares the cores between sessions (`sched_autogroup`), niceness counts within one only, and a launcher
    and its ranks have one of their own: there the session becomes so nice as a whole.
    """
    if nice == 0:
        return
    os.nice(nice)
    if os.getsid(0) == os.getppid():
        _give_way_together(nice)


def _give_way_together(nice: int) -> None:
    for _ in range(TRIES):
        try:
            AUTOGROUP.write_text(str(nice))
        except BlockingIOError:
            time.sleep(BETWEEN_SECONDS)
        except OSError:
            # There is no such thing here.
            return
        else:
            return
