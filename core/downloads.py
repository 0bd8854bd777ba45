"""Bases on their way from a hub: what of a repository makes one, and who brings it, until all of it is in storage.

What is wanted is written down by name, size and hash when the base is registered. Any number of processes may look for
such rows at once: a row is one's for a while, and another's after that if the first says nothing more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core import catalog, quotas
from core.db import Database
from core.errors import InvalidModel, InvalidRequest, NotFound, Unavailable
from core.hub import Hub, HubFile, Refused, Repo, Wanted
from core.keys import Account
from core.models import HubDownload, Model, database_now
from core.reach import UnreachableError
from core.settings import Settings
from core.storage import Storage
from engine import families
from engine.config import ModelShape
from engine.inventory import INDEX, SINGLE

WAITS = (5.0, 30.0, 120.0, 600.0, 1800.0)
"""Seconds after each failure in a row that brought nothing, and the last of them after every further one."""
MOST_DAMAGES = 4
"""Times in a row that what came may be other bytes than the hub described."""
OFFLINE = "this server asks no hub (HF_HUB_OFFLINE is set)"
HELD_SECONDS = 90.0
"""How long a download is one process's that says nothing: longer than a hub may be silent."""
ORPHANED_AFTER = timedelta(hours=1)
PREFIX = "hub"
"""Of what lies in storage."""
_KINDS = frozenset({".json", ".txt", ".model", ".jinja"})
"""Endings of a base's files that are not weights."""
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack"})
"""Endings of weights that nobody reads here; most can run code when they are read."""
_NEEDED = ("config.json", "tokenizer.json")
LONGEST_NAME = 249
"""Bytes of a file's name: of 255, which file systems take, `.` before it and `.part` behind it while it comes."""


# Registering


@dataclass(frozen=True)
class Found:
    """A base on a hub that can be used here, as far as that shows without its weights."""

    repo: Repo
    files: tuple[HubFile, ...]
    shape: ModelShape

    @property
    def bytes(self) -> int:
        return sum(file.bytes or 0 for file in self.files)


def find(settings: Settings, owner: Account, source: str) -> Found:
    """Ask the hub for `hf://org/name@revision`. It takes seconds, so let no transaction be open."""
    owner.require("admin")
    if settings.hf_hub_offline:
        raise InvalidRequest(f"{_sentence(OFFLINE)}: put the model into the models directory.", param="source")
    try:
        wanted = Wanted.parse(source)
    except ValueError as error:
        raise InvalidRequest(f"{_sentence(str(error))}.", param="source") from error
    hub = Hub.of(settings, for_everyone=owner.manages_organization)
    try:
        return look(hub, wanted, most_bytes=settings.max_model_bytes)
    except Refused as error:
        raise NotFound(f"{error}.", param="source") from error
    except InvalidModel as error:
        raise InvalidModel(error.message, param="source") from error
    except UnreachableError as error:
        raise Unavailable(f"The hub {hub.host} can't be asked now: {error}.", param="source") from error


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def look(hub: Hub, wanted: Wanted, *, most_bytes: int) -> Found:
    """What of a repository is to be fetched; InvalidModel for what would be of no use here, before it is."""
    repo = hub.repo(wanted)
    # What lies in folders is never read; names beyond these would be no names of ours.
    there = {file.path: file for file in repo.files if _is_plain(file.path)}
    if missing := next((name for name in _NEEDED if name not in there), None):
        raise InvalidModel(f"{repo.source} has no {missing}, which every base needs here.")
    try:
        shape = families.shape_of_config(_json(hub, repo, there["config.json"]))
    except ValueError as error:
        raise InvalidModel(f"{repo.source}/{error}.") from error
    weights = _weights(hub, repo, there)
    others = [path for path in there if PurePosixPath(path).suffix in _KINDS]
    files = tuple(there[path] for path in [*sorted(others), *sorted(weights)])
    if vague := next((file.path for file in files if file.bytes is None), None):
        raise InvalidModel(f"{hub.host} does not say the size and hash of {repo.source}/{vague}; take another mirror.")
    found = Found(repo, files, shape)
    if found.bytes > most_bytes:
        raise InvalidModel(
            f"{repo.source} is {found.bytes:,} bytes, and this server takes {most_bytes:,} (TRAINSHED_MAX_MODEL_BYTES)."
        )
    return found


def _is_plain(path: str) -> bool:
    return len(path) <= LONGEST_NAME and catalog.FOLDER.fullmatch(path) is not None


def _json(hub: Hub, repo: Repo, file: HubFile) -> Any:
    """What a small file holds; ValueError, by its name."""
    content = hub.read(repo, file)
    if file.bytes is not None and not _is(content, file):
        raise UnreachableError(f"{file.path} came damaged")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.path} is no JSON ({type(error).__name__})") from error


def _is(content: bytes, file: HubFile) -> bool:
    check = Check(file)
    check.update(content)
    return check.is_right


def _weights(hub: Hub, repo: Repo, there: dict[str, HubFile]) -> set[str]:
    """The files that the engine would read."""
    if INDEX not in there:
        if SINGLE in there:
            return {SINGLE}
        pickled = next((file.path for file in repo.files if PurePosixPath(file.path).suffix in _PICKLES), None)
        if pickled is not None:
            raise InvalidModel(
                f"{repo.source} has its weights in {pickled} and not as safetensors. Pickled weights can run code when "
                "they are read, and are not fetched: name a revision that has safetensors."
            )
        raise InvalidModel(f"{repo.source} has neither {SINGLE} nor {INDEX}; a base's weights are safetensors.")
    try:
        named = set(_json(hub, repo, there[INDEX])["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{repo.source}/{INDEX} is damaged.") from error
    for path in named:
        if isinstance(path, str) and len(path) > LONGEST_NAME:
            raise InvalidModel(
                f"{repo.source}/{INDEX} names {path[:100]!r}…: a name of {len(path)} characters, and the disk takes "
                f"{LONGEST_NAME}."
            )
        if not isinstance(path, str) or path not in there or not path.endswith(".safetensors"):
            raise InvalidModel(f"{repo.source}/{INDEX} names {str(path)[:100]!r}: there is no such file of weights.")
    return named


def begin(session: Session, owner: Account, name: str, found: Found, *, models: Path) -> Model:
    """Give a name to a base that is to be fetched. One of a project is part of what that may store."""
    catalog.check_is_no_folder(name, models=models)
    if not owner.manages_organization:
        quotas.take_storage(session, owner.project_id, found.bytes)
    model = catalog.expect(session, owner, name, found.repo.source, found.shape)
    session.add(
        HubDownload(
            model_key=model.key,
            repo=found.repo.name,
            commit_hash=found.repo.commit,
            files=[asdict(file) for file in found.files],
            total_bytes=found.bytes,
            status="downloading",
            due_at=database_now(),
        )
    )
    session.flush()
    return model


def of(session: Session, models: Iterable[Model]) -> dict[str, HubDownload]:
    """Those of these models that come, or came, from a hub, by the model's key."""
    keys = [model.key for model in models if model.key is not None]
    if not keys:
        return {}
    rows = session.scalars(select(HubDownload).where(HubDownload.model_key.in_(keys)))
    return {row.model_key: row for row in rows}


# Fetching


class Check:
    """Whether bytes that come one after another are those of a file."""

    def __init__(self, file: HubFile) -> None:
        self._file, self._size = file, 0
        # Which hash a hub describes a file by is not ours to choose: git's is SHA-1.
        self._hash = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % (file.bytes or 0))

    def update(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._hash.update(chunk)

    @property
    def is_right(self) -> bool:
        return self._size == self._file.bytes and self._hash.hexdigest() == (self._file.sha256 or self._file.blob)


@dataclass(frozen=True)
class Errand:
    """A base that this process is to bring, now."""

    key: str
    attempt: int
    """The fence: what an earlier attempt has to say is dropped."""
    repo: str
    commit: str
    files: tuple[HubFile, ...]
    for_everyone: bool
    done_bytes: int

    @property
    def source(self) -> str:
        return f"hf://{self.repo}@{self.commit}"


def take(session: Session, *, busy: Collection[str] = ()) -> Errand | None:
    """The base that has waited longest of those that no other process brings.

    Those that are `busy` this one brings, also where the database was away for so long that it does not show there.
    """
    due = (HubDownload.due_at <= database_now()) & HubDownload.model_key.not_in(busy)
    waiting = select(HubDownload.model_key).where(due).order_by(HubDownload.due_at).limit(1)
    if (key := session.scalars(waiting.with_for_update(skip_locked=True)).first()) is None:
        return None
    taken = session.scalars(
        update(HubDownload)
        .where(HubDownload.model_key == key, due)
        .values(
            attempts=HubDownload.attempts + 1,
            due_at=database_now() + HELD_SECONDS,
            reason=func.nullif(HubDownload.reason, OFFLINE),
        )
        .returning(HubDownload)
    ).one_or_none()
    if taken is None:
        return None
    model = session.get_one(Model, key)
    return Errand(
        key, taken.attempts, taken.repo, taken.commit_hash, tuple(HubFile(**file) for file in taken.files),
        model.project_id is None, taken.done_bytes,
    )  # fmt: skip


def beat(session: Session, errand: Errand, done_bytes: int) -> bool:
    """Say that it goes on. False where it is another's by now, or nobody wants it any more."""
    return _settle(session, errand, done_bytes=done_bytes, due_at=database_now() + HELD_SECONDS)


def let_go(session: Session, errand: Errand) -> None:
    """Leave it to whoever looks next, at once."""
    _settle(session, errand, due_at=database_now())


def put_off(session: Session, errand: Errand, reason: str, *, seconds: float) -> None:
    """It begins later, as others come first. That is no failure."""
    _settle(session, errand, reason=reason, due_at=database_now() + seconds)


def arrived(session: Session, errand: Errand) -> bool:
    """It is in storage: from now on jobs may start from it."""
    total = sum(file.bytes or 0 for file in errand.files)
    # The model first, as whoever deletes it does.
    model = session.scalars(select(Model).where(Model.key == errand.key).with_for_update()).one_or_none()
    if model is None or not _settle(session, errand, status="ready", due_at=None, reason=None, done_bytes=total):
        return False
    model.source = f"storage:{prefix_of(errand.key)}"
    session.flush()
    return True


class Fault(Enum):
    """What kind of thing kept a base from coming."""

    PASSING = "passing"
    """An outage, a full disk: it may be over at any time."""
    DAMAGE = "damage"
    """Other bytes came than the hub described. One time it is the line; again and again it is what lies there."""
    LASTING = "lasting"
    """Asking again would change nothing."""


def wait_after(fault: Fault, *, failures: int, damages: int) -> float | None:
    """Seconds until the next try, after so many of each in a row; None where there is to be none."""
    if fault is Fault.LASTING or (fault is Fault.DAMAGE and damages >= MOST_DAMAGES):
        return None
    return WAITS[min(failures, len(WAITS)) - 1]


def failed(session: Session, errand: Errand, reason: str, fault: Fault, *, brought_a_file: bool) -> bool:
    """It did not come: it is tried again later, if that may help. Whether it will be.

    `brought_a_file`: whether one became whole meanwhile, so that what is damaged is another one than before.
    """
    row = session.get(HubDownload, errand.key)
    if row is None or row.attempts != errand.attempt:
        return False
    # What has come meanwhile stays, so that a bad line ends in a whole file.
    failures = 1 if row.done_bytes > errand.done_bytes else row.failures + 1
    # Bytes more prove nothing here, as those of a damaged file come again and again.
    damages = (0 if brought_a_file else row.damages) + (fault is Fault.DAMAGE)
    wait = wait_after(fault, failures=failures, damages=damages)
    if wait is None and fault is Fault.DAMAGE:
        reason = f"{reason}, {damages} times in a row"
    values: dict[str, Any] = {"reason": reason, "failures": failures, "damages": damages}
    values |= {"status": "failed", "due_at": None} if wait is None else {"due_at": database_now() + wait}
    return _settle(session, errand, **values) and wait is not None


def leave(session: Session) -> None:
    """Say of what would be fetched now that no hub is asked."""
    unsaid = HubDownload.reason.is_distinct_from(OFFLINE)
    session.execute(
        update(HubDownload)
        .where(HubDownload.status == "downloading", HubDownload.due_at <= database_now(), unsaid)
        .values(reason=OFFLINE)
        .execution_options(synchronize_session=False)
    )


def prefix_of(key: str) -> str:
    """Where a base lies in storage."""
    return f"{PREFIX}/{key}"


def _settle(session: Session, errand: Errand, **values: Any) -> bool:
    mine = update(HubDownload).where(
        HubDownload.model_key == errand.key,
        HubDownload.attempts == errand.attempt,
        HubDownload.status == "downloading",
    )
    done = mine.values(values).returning(HubDownload.model_key).execution_options(synchronize_session=False)
    return session.scalars(done).one_or_none() is not None


# Keeping up


def wanted(session: Session) -> set[str]:
    """The models that are still to come, by key."""
    return set(session.scalars(select(HubDownload.model_key).where(HubDownload.status == "downloading")))


def sweep(db: Database, storage: Storage, *, age: timedelta = ORPHANED_AFTER) -> list[str]:
    """Remove what lies in storage of bases that are gone. Their keys."""
    old: dict[str, list[str]] = {}
    for stored in storage.older(PREFIX, age):
        old.setdefault(stored.key.split("/")[1], []).append(stored.key)
    with db.reading() as session:
        there = _there(session, list(old))
    for key in old.keys() - there:
        for stored_key in old[key]:
            storage.delete(stored_key)
    return sorted(old.keys() - there)


def _there(session: Session, keys: Sequence[str]) -> set[str]:
    """Those of these models that are ready, or still to come: what a failed one stored is of no use.

    By the models' own rows, as those of downloads are gone where a schema before them was gone back to meanwhile.
    """
    failed_ones = select(HubDownload.model_key).where(HubDownload.status == "failed")
    return set(session.scalars(select(Model.key).where(Model.key.in_(keys), Model.key.not_in(failed_ones))))
