"""Fetch bases from a hub, a few at once: file by file, from where an earlier attempt left off, then into storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Self

import structlog

from core import catalog, downloads, filelocks, space
from core.downloads import Check, Errand, Fault
from core.errors import InvalidModel
from core.hub import Hub, HubFile, Refused
from core.reach import UnreachableError
from core.services import Services
from core.storage import CHUNK_BYTES
from workers.duties import END_SECONDS
from workers.orders import Orders

log = structlog.get_logger(__name__)

LOOK_SECONDS = 2.0
BEAT_SECONDS = 2.0
MOTIONLESS_SECONDS = 900.0
"""How long nothing may move, as a disk writes down what it was given or storage puts parts together; then it hangs."""
LAST_SECONDS = 0.8 * END_SECONDS
"""How long all that come may take to be let go at the end: whoever waits for that has a little left."""
PUT_OFF_SECONDS = 10.0
"""Until the next look at a base that others are in the way of."""
SPARE_BYTES = 256 * 1024**2
"""Of a disk, left to others."""
AT_ONCE = 3
"""Bases that one process fetches side by side: a slow one leaves room to others, and few share a line well."""


class _NotOursError(Exception):
    """The base was deleted meanwhile, or another process brings it."""


class _DamagedError(Exception):
    """Other bytes came than the hub described; the text says of which file."""


class _NoRoomError(Exception):
    """A disk has too little room; the text says how much is missing."""


class _OthersFirstError(Exception):
    """It can't begin while others are at work; the text says on what."""


class _ToldToEndError(Exception):
    """This process ends; what came so far stays for the next one."""


_FORESEEN = (Refused, InvalidModel, UnreachableError, _DamagedError, _NoRoomError)
"""What needs no more words in the log than in the row."""


class Fetcher:
    """Looks for bases that are wanted every so often."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._rooms = _Rooms()
        self._busy: set[str] = set()
        """Bases that a thread here is at."""
        self._guard = Lock()

    def run(self, orders: Orders) -> None:
        """Until a wish comes, in some threads: the rows decide which base is whose."""
        inboxes = [Orders() for _ in range(AT_ONCE)]
        threads = [Thread(target=self._keep_looking, args=(each,), name="fetcher", daemon=True) for each in inboxes]
        for thread in threads:
            thread.start()
        while (wish := orders.wait(LOOK_SECONDS)) is None:
            pass
        for each in inboxes:
            each.give(wish)
        deadline = monotonic() + LAST_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _keep_looking(self, orders: Orders) -> None:
        while orders.wait(LOOK_SECONDS) is None:
            try:
                self.look(orders)
            except Exception:  # the loop's edge: the database may be away, and comes back
                log.warning("bases not looked for", exc_info=True)

    def look(self, orders: Orders) -> None:
        """Bring the base that has waited longest, if any waits."""
        self.tidy()
        if self.services.settings.hf_hub_offline:
            self._leave()
            return
        with self._guard:
            busy = set(self._busy)
        with self.services.db.session() as session:
            errand = downloads.take(session, busy=busy)
        if errand is not None:
            with self._at(errand.key):
                self.bring(errand, orders)

    @contextmanager
    def _at(self, key: str) -> Iterator[None]:
        with self._guard:
            self._busy.add(key)
        try:
            yield
        finally:
            with self._guard:
                self._busy.discard(key)

    def _leave(self) -> None:
        """Let whoever waits for a base know that it does not come."""
        with self.services.db.reading() as session:
            wanted = downloads.wanted(session)
        if wanted:
            with self.services.db.session() as session:
                downloads.leave(session)

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
        folder = work / errand.repo.rpartition("/")[2]
        hold = _Hold(self.services, errand, orders, done=_come(errand, folder))
        hub = Hub.of(self.services.settings, for_everyone=errand.for_everyone)
        try:
            with hold, _alone(work), self._rooms.taken(errand, folder, self.services.storage.folder) as need:
                for file in errand.files:
                    self._fetch(hub, errand, file, folder, hold)
                catalog.inspect(folder)
                self._store(errand, folder, hold, need)
        except _NotOursError:
            log.info("base is another's now, or was deleted", **told)
            return
        except _ToldToEndError:
            with self.services.db.session() as session:
                downloads.let_go(session, errand)
            return
        except _OthersFirstError as error:
            with self.services.db.session() as session:
                downloads.put_off(session, errand, str(error), seconds=PUT_OFF_SECONDS)
            log.info("base is put off", reason=str(error), **told)
            return
        except Exception as error:  # the attempt's edge: whatever it is, the row says it
            if not hold.say():
                # Others have cleared away what it stumbled over.
                log.info("base is another's now, or was deleted", **told)
                return
            fault, reason = _why(error, hub)
            if not isinstance(error, _FORESEEN):
                log.warning("base not fetched", exc_info=True, **told)
            with self.services.db.session() as session:
                again = downloads.failed(session, errand, reason, fault, brought_a_file=hold.brought_a_file)
            log.info("base did not come", reason=reason, again=again, **told)
            return
        with self.services.db.session() as session:
            arrived = downloads.arrived(session, errand)
        if arrived:
            shutil.rmtree(work, ignore_errors=True)
            log.info("base is ready", **told)

    def _fetch(self, hub: Hub, errand: Errand, file: HubFile, folder: Path, hold: _Hold) -> None:
        """Bring one file. It has its name once it is whole, and what it should be."""
        path = folder / file.path
        if path.exists():
            # An earlier attempt, perhaps this process, saw to it.
            return
        part = _part(path)
        check, start = Check(file), 0
        if part.exists() and part.stat().st_size <= (file.bytes or 0):
            for chunk in _chunks(part):
                check.update(chunk)
                hold.add(0)
                start += len(chunk)
        else:
            part.unlink(missing_ok=True)
        if start < (file.bytes or 0) or not part.exists():
            check = self._receive(hub, errand, file, part, check, start, hold)
        if not check.is_right:
            _discard(part, hold)
            raise _DamagedError(f"{file.path} is not what the hub says it is: its size or hash differs")
        with part.open("rb") as whole:
            os.fsync(whole.fileno())
        part.replace(path)
        hold.brought_a_file = True

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
                    raise _DamagedError(f"{file.path} came from the byte {answer.start}, which nobody asked for")
            with part.open("ab" if start else "wb") as into:
                for chunk in answer.chunks:
                    start += len(chunk)
                    if start > (file.bytes or 0):
                        break
                    into.write(chunk)
                    check.update(chunk)
                    hold.add(len(chunk))
        if start > (file.bytes or 0):
            _discard(part, hold)
            raise _DamagedError(f"{file.path} is longer than the {file.bytes:,} bytes that the hub says")
        return check

    def _store(self, errand: Errand, folder: Path, hold: _Hold, need: _Need) -> None:
        """Nobody finds it there before the row says so, so each file may come by itself."""
        for file in errand.files:
            key = f"{downloads.prefix_of(errand.key)}/{file.path}"
            self.services.storage.put_stream(key, need.less(hold.through(_chunks(folder / file.path))))


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Be the only one in a base's folder; _OthersFirstError where somebody else on this host is.

    Where the database was away for long, a base is another's before whoever had it can hear of that: both would write
    to one file.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("wb") as lock:
        if not filelocks.take(lock):
            raise _OthersFirstError("an earlier attempt on this host is not over yet")
        yield


class _Rooms:
    """What the bases that come to this process at once still need of its disks, so that all of them get to their end.

    Each looks before it begins whether it fits beside the others: two halves that fill a disk would both stay halves.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._needs: set[_Need] = set()

    @contextmanager
    def taken(self, errand: Errand, folder: Path, stored: Path | None) -> Iterator[_Need]:
        """Make the folder, and keep room in it and where it will be `stored`.

        Raises _OthersFirstError while others take of the disk, who give back what they need no longer at their end.
        """
        folder.mkdir(parents=True, exist_ok=True)
        need = _Need.of(errand, folder, stored)
        with self._lock:
            for place in filter(None, (folder, stored)):
                disk, free = os.stat(place).st_dev, shutil.disk_usage(place).free
                others = [each for each in self._needs if disk in {each.here, each.there}]
                needed = need.on(disk) + sum(each.on(disk) for each in others) + SPARE_BYTES
                words = f"the disk has {free:,} bytes free, and {needed:,} are needed"
                if free < needed and others:
                    raise _OthersFirstError(f"{words} with what comes beside it: it waits until that is here")
                if free < needed:
                    raise _NoRoomError(f"{words}: free space on it")
            self._needs.add(need)
        try:
            yield need
        finally:
            with self._lock:
                self._needs.remove(need)


@dataclass(eq=False)
class _Need:
    """What one of them needs."""

    errand: Errand
    folder: Path
    here: int
    """The file system where it is put together, by its number."""
    there: int | None
    """That of storage; None where that is no folder."""
    stored: int = 0
    """Bytes that storage has been given."""

    @classmethod
    def of(cls, errand: Errand, folder: Path, stored: Path | None) -> Self:
        return cls(errand, folder, os.stat(folder).st_dev, None if stored is None else os.stat(stored).st_dev)

    def on(self, disk: int) -> int:
        """Bytes that are still to come to a file system."""
        total = sum(file.bytes or 0 for file in self.errand.files)
        to_here = total - _come(self.errand, self.folder) if disk == self.here else 0
        return to_here + (total - self.stored if disk == self.there else 0)

    def less(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """`chunks`, each needed no longer once storage asks for more."""
        for chunk in chunks:
            yield chunk
            self.stored += len(chunk)


class _Hold:
    """Keeps the errand this process's and tells how far it is, every other second, in a thread of its own.

    A disk that writes down what it was given, or a storage that puts parts together, may take longer than a hold lasts.
    Where nothing has moved for `MOTIONLESS_SECONDS`, it hangs, and the errand is left to whoever can do it.
    """

    def __init__(self, services: Services, errand: Errand, orders: Orders, *, done: int) -> None:
        """`done` bytes are here already."""
        self._services, self._errand, self._orders, self._done = services, errand, orders, done
        self.brought_a_file = False
        """Whether one has become whole."""
        self._moved_at = monotonic()
        self._is_over, self._is_lost = Event(), Event()
        self._thread = Thread(target=self._keep, name="hold", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What it says later would take the place of what becomes of the errand.
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            if monotonic() - self._moved_at > MOTIONLESS_SECONDS:
                log.warning("base left to others: nothing moves here", model=self._errand.key)
                self._is_lost.set()
                return
            try:
                if not self.say():
                    self._is_lost.set()
                    return
            except Exception:  # the loop's edge: the database may be away, and comes back
                log.warning("hold not renewed", model=self._errand.key, exc_info=True)

    def add(self, size: int) -> None:
        """So many bytes more are here. Raises what ends the attempt."""
        self._done += size
        self._moved_at = monotonic()
        if self._orders.wait(0) is not None:
            raise _ToldToEndError
        if self._is_lost.is_set():
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


def _why(error: Exception, hub: Hub) -> tuple[Fault, str]:
    """What kind of thing that is, and why in words."""
    if isinstance(error, UnreachableError):
        return Fault.PASSING, f"the hub {hub.host} can't be reached: {error}"
    if isinstance(error, _NoRoomError):
        return Fault.PASSING, str(error)
    if isinstance(error, _DamagedError):
        return Fault.DAMAGE, str(error)
    if isinstance(error, Refused):
        return Fault.LASTING, str(error)
    if isinstance(error, InvalidModel):
        return Fault.LASTING, error.message.rstrip(".")
    if space.is_full(error):
        return Fault.PASSING, "the server's disk is full: free space on it"
    return Fault.PASSING, f"it failed on our side ({type(error).__name__}); the log of upkeep says more"


def _come(errand: Errand, folder: Path) -> int:
    """Bytes of a base that are in its folder."""
    return sum(_size(folder / file.path, file.bytes or 0) for file in errand.files)


def _size(path: Path, most: int) -> int:
    """Bytes that are there of a file, whole or begun."""
    for there in (path, _part(path)):
        with suppress(OSError):
            if (size := there.stat().st_size) <= most:
                return size
    return 0


def _part(path: Path) -> Path:
    """Where a file is before it is whole."""
    return path.with_name(f".{path.name}.part")


def _discard(part: Path, hold: _Hold) -> None:
    size = part.stat().st_size
    part.unlink()
    hold.add(-size)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")
