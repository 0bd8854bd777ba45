"""Fetch bases from a hub, one at a time: file by file, from where an earlier attempt left off, then into storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import structlog

from core import catalog, downloads, space
from core.downloads import Check, Errand
from core.errors import InvalidModel
from core.hub import Hub, HubFile, Refused
from core.reach import UnreachableError
from core.services import Services
from core.storage import CHUNK_BYTES
from workers.orders import Orders

log = structlog.get_logger(__name__)

LOOK_SECONDS = 2.0
BEAT_SECONDS = 2.0
SPARE_BYTES = 256 * 1024**2
"""Of a disk, left to others."""


class _NotOursError(Exception):
    """The base was deleted meanwhile, or another process brings it."""


class _ToldToEndError(Exception):
    """This process ends; what came so far stays for the next one."""


class Fetcher:
    """Looks for bases that are wanted every so often."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def run(self, orders: Orders) -> None:
        while orders.wait(LOOK_SECONDS) is None:
            try:
                self.look(orders)
            except Exception:  # the loop's edge: the database may be away, and comes back
                log.warning("bases not looked for", exc_info=True)

    def look(self, orders: Orders) -> None:
        """Bring the base that has waited longest, if any waits."""
        self.tidy()
        if self.services.settings.hf_hub_offline:
            return
        with self.services.db.session() as session:
            errand = downloads.take(session)
        if errand is not None:
            self.bring(errand, orders)

    def tidy(self) -> None:
        """Remove what is left here of bases that came, or that nobody wants any more."""
        folder = self.services.settings.downloads
        if not folder.is_dir() or not (there := {path.name for path in folder.iterdir()}):
            return
        with self.services.db.reading() as session:
            wanted = downloads.wanted(session)
        for name in there - wanted:
            shutil.rmtree(folder / name, ignore_errors=True)

    def bring(self, errand: Errand, orders: Orders) -> None:
        """Fetch, look at and store it, and write down what came of it."""
        told, work = {"model": errand.key, "source": errand.source}, self.services.settings.downloads / errand.key
        log.info("base is fetched", attempt=errand.attempt, **told)
        hold = _Hold(self.services, errand, orders)
        hub = Hub.of(self.services.settings, for_everyone=errand.for_everyone)
        try:
            folder = work / errand.repo.rpartition("/")[2]
            self._check_room(errand, folder)
            for file in errand.files:
                self._fetch(hub, errand, file, folder, hold)
            catalog.inspect(folder)
            self._store(errand, folder, hold)
        except _NotOursError:
            log.info("base is another's now, or was deleted", **told)
            return
        except _ToldToEndError:
            with self.services.db.session() as session:
                downloads.let_go(session, errand)
            return
        except Exception as error:  # the attempt's edge: whatever it is, the row says it
            hold.say()
            for_good, reason = _why(error)
            if not isinstance(error, (Refused, InvalidModel, UnreachableError)):
                log.warning("base not fetched", exc_info=True, **told)
            with self.services.db.session() as session:
                again = downloads.failed(session, errand, reason, for_good=for_good)
            log.info("base did not come", reason=reason, again=again, **told)
            return
        with self.services.db.session() as session:
            arrived = downloads.arrived(session, errand)
        if arrived:
            shutil.rmtree(work, ignore_errors=True)
            log.info("base is ready", **told)

    def _check_room(self, errand: Errand, folder: Path) -> None:
        """UnreachableError, as it may be otherwise later, where the disks have too little room for it."""
        folder.mkdir(parents=True, exist_ok=True)
        total = sum(file.bytes or 0 for file in errand.files)
        there = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        needed = {folder: max(0, total - there)}
        stored = self.services.storage.folder
        if stored is not None:
            shared = os.stat(stored).st_dev == os.stat(folder).st_dev
            needed = {folder: needed[folder] + total} if shared else needed | {stored: total}
        for disk, size in needed.items():
            if (free := shutil.disk_usage(disk).free) < size + SPARE_BYTES:
                raise UnreachableError(
                    f"the disk has {free:,} bytes free, and {size + SPARE_BYTES:,} are needed: free space on it"
                )

    def _fetch(self, hub: Hub, errand: Errand, file: HubFile, folder: Path, hold: _Hold) -> None:
        """Bring one file. It has its name once it is whole, and what it should be."""
        path = folder / file.path
        if path.exists():
            # An earlier attempt, perhaps this process, saw to it.
            hold.add(file.bytes or 0)
            return
        part = path.with_name(f".{path.name}.part")
        check, start = Check(file), 0
        if part.exists() and part.stat().st_size <= (file.bytes or 0):
            for chunk in _chunks(part):
                check.update(chunk)
                hold.add(len(chunk))
                start += len(chunk)
        else:
            part.unlink(missing_ok=True)
        if start < (file.bytes or 0) or not part.exists():
            check = self._receive(hub, errand, file, part, check, start, hold)
        if not check.is_right:
            part.unlink()
            raise UnreachableError(f"{file.path} is not what the hub says it is: its size or hash differs")
        with part.open("rb") as whole:
            os.fsync(whole.fileno())
        part.replace(path)

    def _receive(
        self, hub: Hub, errand: Errand, file: HubFile, part: Path, check: Check, start: int, hold: _Hold
    ) -> Check:
        """Add to `part` what is missing behind `start`, or write it anew where the hub begins at the beginning."""
        seconds = self.services.settings.transfer_seconds
        with hub.opened(errand.repo, errand.commit, file.path, start=start, seconds=seconds) as answer:
            if answer.start != start:
                hold.add(-start)
                check, start = Check(file), 0
                if answer.start:
                    raise UnreachableError(f"{file.path} came from the byte {answer.start}, which nobody asked for")
            with part.open("ab" if start else "wb") as into:
                for chunk in answer.chunks:
                    start += len(chunk)
                    if start > (file.bytes or 0):
                        break
                    into.write(chunk)
                    check.update(chunk)
                    hold.add(len(chunk))
        if start > (file.bytes or 0):
            part.unlink()
            raise UnreachableError(f"{file.path} is longer than the {file.bytes:,} bytes that the hub says")
        return check

    def _store(self, errand: Errand, folder: Path, hold: _Hold) -> None:
        """Nobody finds it there before the row says so, so each file may come by itself."""
        for file in errand.files:
            key = f"{downloads.prefix_of(errand.key)}/{file.path}"
            self.services.storage.put_stream(key, hold.through(_chunks(folder / file.path)))


class _Hold:
    """Keeps the errand this process's, and tells how far it is, every other second."""

    def __init__(self, services: Services, errand: Errand, orders: Orders) -> None:
        self._services, self._errand, self._orders = services, errand, orders
        self._done, self._next = 0, monotonic() + BEAT_SECONDS

    def add(self, size: int) -> None:
        """So many bytes more are here. Raises what ends the attempt."""
        self._done += size
        if self._orders.wait(0) is not None:
            raise _ToldToEndError
        if monotonic() >= self._next:
            self._next = monotonic() + BEAT_SECONDS
            if not self.say():
                raise _NotOursError

    def through(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """`chunks`, while the errand stays ours."""
        for chunk in chunks:
            self.add(0)
            yield chunk

    def say(self) -> bool:
        """Whether it is ours still."""
        with self._services.db.session() as session:
            return downloads.beat(session, self._errand, self._done)


def _why(error: Exception) -> tuple[bool, str]:
    """Whether that is how it stays, and why in words."""
    if isinstance(error, UnreachableError):
        return False, str(error)
    if isinstance(error, Refused):
        return True, str(error)
    if isinstance(error, InvalidModel):
        return True, error.message.rstrip(".")
    if space.is_full(error):
        return False, "the server's disk is full: free space on it"
    return False, f"it failed on our side ({type(error).__name__}); the log of upkeep says more"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")
