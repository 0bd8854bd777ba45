"""Files that come or go: a bar for each, on the standard error, where there is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Transfers:
    """Bars while it is open as a context; `report` is what the client calls."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self.shown = console.is_terminal and not quiet
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True),
                   TransferSpeedColumn(), TimeRemainingColumn(compact=True))  # fmt: skip
        self.bars = Progress(*columns, console=console, disable=not self.shown)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def report(self, name: str, done: int, total: int) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, total=total)
        self.bars.update(self.tasks[name], completed=done, total=total)
