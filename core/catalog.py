"""Models by name: bases in the models directory, found by folder, results of jobs, and their checkpoints.

A name belongs to one model within a project, and to one among those that everyone may use. Where both have it, the
project's own is meant: so nobody's name is in another project's way, and nobody can tell which names others use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from os import statvfs
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Select, bindparam, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core import audit
from core.db import directly
from core.errors import Forbidden, InUse, InvalidModel, InvalidRequest, InvalidSpec, NotFound, NotReady, Unavailable
from core.hanging import CrowdedError, HangsError, Patient
from core.keys import Account
from core.models import Checkpoint, CheckpointPermission, HubDownload, Job, Model
from core.resolve import BaseFacts
from core.states import UNENDED
from engine import families, inventory
from engine.config import ModelShape, RunConfig
from engine.counting import counted, first_of
from engine.inventory import InvalidWeights

FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""What a model's folder, or a file in it, may be called."""
CHECKPOINT, ADAPTER = "checkpoint:", "adapter:"
HUB = "hf:"
"""A base that is still on its way from there."""
Seen = TypeVar("Seen")
_folders = Patient(seconds=10.0, most=8, waiting=16)
"""Fewer wait than the API has threads, which are forty."""


def get(session: Session, owner: Account, name: str, *, models: Path) -> Model:
    """A model that the owner may use. A folder that nobody registered, or a checkpoint, is not in the session.

    A folder may be waited for, so let no lock be held.
    """
    return _recorded(session, owner, name) or _answered(models, name, _unregistered).model()


def _recorded(session: Session, owner: Account, name: str) -> Model | None:
    """What the database knows by this name."""
    return _named(session, owner.project_id, name) or _of_checkpoint(session, owner, name)


@dataclass(frozen=True)
class _Folder:
    """A folder that is a model, as it was at one look, which several may have asked for."""

    name: str
    shape: ModelShape
    made_at: float

    def model(self) -> Model:
        shape = self.shape.model_dump(mode="json")
        return Model(id=self.name, project_id=None, source=f"dir:{self.name}", shape=shape, created_at=self.made_at)


def _unregistered(models: Path, name: str) -> _Folder:
    folder = models / name
    if FOLDER.fullmatch(name) and _is_model(folder):
        return _seen(folder)
    if _is_within(models, name):
        raise InvalidModel(f"The folder {name!r} {_no_model(folder)}", param="model")
    raise NotFound(
        f"There is no model {name!r}; GET /v1/models lists what there is. A folder in the models directory is a model.",
        param="model",
    )


def _answered(models: Path, name: str, look: Callable[[Path, str], Seen]) -> Seen:
    """What `look` finds in a folder of models; Unavailable where that lies on a host that does not answer."""
    silent = "The models directory does not answer"
    try:
        _folders.ask(models, partial(_reach, models))
        silent = f"{name!r} in the models directory does not answer"
        if FOLDER.fullmatch(name):
            _folders.ask(models / name, partial(_reach, models / name))
        return _folders.ask((look, models, name), partial(look, models, name))
    except CrowdedError as error:
        raise Unavailable(
            f"{name!r} in the models directory was not looked at: so many others do not answer that no more are asked. "
            "Their disks, or the hosts that they are shared from, may be away. Try again in a moment, or take a base "
            "that is not a folder."
        ) from error
    except HangsError as error:
        raise Unavailable(
            f"{silent}: the disk that it is on, or the host that it is shared from, may be away. Try again in a "
            "moment, or take a base that is not a folder."
        ) from error


def _reach(folder: Path) -> None:
    """Come back from a folder's host.

    It comes before any look. So one that hangs is left behind but once, however many names, or looks, are asked for.
    """
    try:
        # Asks the host that shares it, where a stat may be answered by what the kernel remembers of it.
        statvfs(folder)
    except OSError:
        # What is wrong with it, whoever looks further is told.
        return


def list_(session: Session, owner: Account, *, models: Path) -> list[Model]:
    """Every model that the owner may use: newest first, then folders that nobody registered, by name."""
    rows = list(session.scalars(_visible(owner.project_id).order_by(Model.created_at.desc(), Model.id)))
    own = {model.id for model in rows if model.project_id is not None}
    rows = [model for model in rows if model.project_id is not None or model.id not in own]
    taken = {model.id for model in rows}
    return rows + [model for model in discover(models) if model.id not in taken]


def discover(models: Path) -> list[Model]:
    """The folders beneath `models` that answer and hold a supported model; `get` says why another is left out here."""
    try:
        _folders.ask(models, partial(_reach, models))
        names = _folders.ask((_names, models), partial(_names, models))
    except HangsError:
        return []
    reached = _folders.ask_all({models / name: partial(_reach, models / name) for name in names})
    looks = {(_supported, path): partial(_supported, path) for path in reached}
    folders = [answer.result() for answer in _folders.ask_all(looks).values()]
    return [folder.model() for folder in sorted(filter(None, folders), key=lambda folder: folder.name)]


def _names(models: Path) -> list[str]:
    names = [path.name for path in models.iterdir()] if models.is_dir() else []
    return [name for name in names if FOLDER.fullmatch(name)]


def _supported(folder: Path) -> _Folder | None:
    try:
        return _seen(folder) if _is_model(folder) else None
    except InvalidModel:
        return None


def adopt(session: Session, owner: Account, model: Model) -> Model:
    """The row of a folder that `get` found: other processes find the model by its `key` afterwards, by `source_of`."""
    if _add(session, model):
        return model
    # Somebody else wanted the same folder at this moment.
    if (row := _named(session, owner.project_id, model.id)) is None:
        raise NotFound(f"The model {model.id!r} was just deleted.", param="model")
    return row


def usable(session: Session, model: Model) -> Model:
    """The model, whose files are all there; NotReady for one that is still to come from a hub, or never came."""
    if not model.source.startswith(HUB):
        return model
    # Both as they are now: it may have come since the model was read, or be deleted at this moment.
    now = {"populate_existing": True}
    download = session.get(HubDownload, model.key, execution_options=now)
    if download is not None and download.status == "ready":
        model_now = session.get(Model, model.key, execution_options=now)
        if model_now is not None:
            return model_now
    if download is None or download.status == "ready":
        raise NotFound(f"The model {model.id!r} was just deleted.", param="model")
    if download.status == "failed":
        raise NotReady(
            f"{model.id} could not be fetched from {model.source}: {download.reason}. Delete it and register it again "
            "once that is mended.",
            param="model",
        )
    in_the_way = f" What was in the way last: {download.reason}." if download.reason else ""
    raise NotReady(
        f"{model.id} is still being fetched from {model.source}, {download.done_bytes:,} of {download.total_bytes:,} "
        f"bytes so far; it can be used once GET /v1/models/{model.id} says that its status is ready.{in_the_way}",
        param="model",
    )


def source_of(session: Session, key: str) -> str | None:
    """Where the files of a model lie, as `Model.source` says it; None where there is no such model any more."""
    if model := session.get(Model, key):
        return model.source
    return f"{CHECKPOINT}{key}" if session.get(Checkpoint, key) else None


def base_source(session: Session, job: Job) -> str | None:
    """`source_of` what a job starts from; None where that is gone, or it starts from scratch."""
    name = job.base_model or ""
    if base := _named(session, job.project_id, name):
        return base.source
    return f"{CHECKPOINT}{name}" if session.get(Checkpoint, name) else None


def facts(session: Session, owner: Account, name: str, *, models: Path, param: str = "model.base") -> BaseFacts:
    """What resolving a job needs to know of its base. Only reads, and of files too, so let it hold no lock."""
    with _blaming(param):
        model = usable(session, get(session, owner, name, models=models))
        folder = source_folder(model, models)
        # Read anew: a folder may have been replaced since it was first seen.
        shape = _answered(models, folder.name, _whole) if folder else ModelShape.model_validate(model.shape)
    return BaseFacts(name=model.id, shape=shape, folder_made_at=model.created_at if model.key is None else None)


def _whole(models: Path, name: str) -> ModelShape:
    return inspect(models / name)


def keep(session: Session, owner: Account, base: BaseFacts, *, models: Path, param: str = "model.base") -> None:
    """Let a base stay until the commit, in a row that says its shape; NotFound where it is gone.

    Folders are not looked at again: one that hangs now would hold up all who wait for this transaction.
    """
    with _blaming(param):
        model = _still_there(session, owner, base)
        if model not in session:
            # A checkpoint. Who removes it waits, and finds the job; who changes its row need not.
            if directly(session, _KEPT_CHECKPOINT, {"key": model.key}).one_or_none() is None:
                raise NotFound(f"The checkpoint {base.name} was just removed.")
            return
        shape = base.shape.model_dump(mode="json")
        is_stale = source_folder(model, models) is not None and model.shape != shape
        # Who deletes it waits, and finds the job. Who will write locks for that at once: two that first shared the row
        # would wait for each other.
        row = _TO_BE_WRITTEN if is_stale else _KEPT
        if directly(session, row, {"key": model.key}).one_or_none() is None:
            raise NotFound(f"The model {base.name!r} was just deleted.")
        if is_stale:
            model.shape = shape
            session.flush()


def _still_there(session: Session, owner: Account, base: BaseFacts) -> Model:
    if (model := _recorded(session, owner, base.name)) is not None:
        return usable(session, model)
    if base.folder_made_at is None:
        raise NotFound(f"The model {base.name!r} was just deleted.")
    return adopt(session, owner, _Folder(base.name, base.shape, base.folder_made_at).model())


_ROW = select(Model.key).where(Model.key == bindparam("key"))
_KEPT, _TO_BE_WRITTEN = _ROW.with_for_update(read=True), _ROW.with_for_update()
_KEPT_CHECKPOINT = (
    select(Checkpoint.id).where(Checkpoint.id == bindparam("key")).with_for_update(read=True, key_share=True)
)


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Let the error of a model that is not there, or can't be used, name this field."""
    try:
        yield
    except (NotFound, InvalidModel, NotReady) as error:
        raise type(error)(error.message, param=param) from error


def register(session: Session, owner: Account, name: str, source: str | Mapping[str, str], *, models: Path) -> Model:
    """Give a model a name: a job's result, for the project, or a folder beneath the models directory.

    A folder that an admin of the organisation names is everyone's; another admin's is that project's.
    """
    if isinstance(source, str):
        owner.require("admin")
        shape = _answered(models, _folder_of(source), _named_folder)
        project_id = None if owner.manages_organization else owner.project_id
        model = Model(id=name, project_id=project_id, source=source, shape=shape.model_dump(mode="json"))
        # A folder may keep the name that it has.
        if source != f"dir:{name}":
            check_is_no_folder(name, models=models)
    else:
        check_is_no_folder(name, models=models)
        model = _named_result(session, owner, name, source["job"])
    return _introduce(session, owner, model)


def check_is_no_folder(name: str, *, models: Path) -> None:
    """InvalidSpec where a folder has the name. It may be waited for, so let no lock be held."""
    if FOLDER.fullmatch(name) and _answered(models, name, _has_model):
        raise _taken(name)


def _has_model(models: Path, name: str) -> bool:
    return _is_model(models / name)


def _taken(name: str) -> InvalidSpec:
    return InvalidSpec(f"The name {name!r} is taken; choose another.", param="id")


def expect(session: Session, owner: Account, name: str, source: str, shape: ModelShape) -> Model:
    """Give a name to a base that is still to come, from a hub. An admin of the organisation's is everyone's.

    See `check_is_no_folder` before.
    """
    owner.require("admin")
    project_id = None if owner.manages_organization else owner.project_id
    model = Model(id=name, project_id=project_id, source=source, shape=shape.model_dump(mode="json"))
    return _introduce(session, owner, model)


def _introduce(session: Session, owner: Account, model: Model) -> Model:
    """Add a model under a name that is still free."""
    if not _insert(session, model, beside=owner.project_id):
        raise _taken(model.id)
    audit.record(session, owner, "model.registered", model.id, source=model.source)
    return model


def delete(
    session: Session,
    owner: Account,
    name: str,
    *,
    models: Path,
    force: bool = False,
    reading: Session | None = None,
) -> None:
    """Let go of a model's name. What lies under it stays: a folder where it is, a job's files with the job.

    Checkpoints that are adapters on it could not be used any more: without `force` it stays for them. It is looked up
    in `reading`, before `session` has locked anything; without another session, in this one.
    """
    model = get(session if reading is None else reading, owner, name, models=models)
    if model.source.startswith(CHECKPOINT):
        raise InvalidRequest(
            f"{name} is a checkpoint, and stays as long as its job keeps it (training.keep_checkpoints).", param="model"
        )
    if model.source == f"dir:{name}":
        raise InvalidRequest(
            f"{name} is a folder in the models directory; take the folder away to remove the model.", param="model"
        )
    if model.project_id is None and not owner.manages_organization:
        raise Forbidden(f"{name} is there for everyone; an admin of the organisation may delete it.", param="model")
    # Locked first: who wants it for a job meanwhile either is seen below, or does not find it.
    model_now = session.get(Model, model.key, with_for_update=True, populate_existing=True)
    if model_now is None:
        raise NotFound(f"The model {name!r} was just deleted.", param="model")
    on_it = select(Job.id).where(Job.base_model == name)
    if model.project_id is not None:
        on_it = on_it.where(Job.project_id == model.project_id)
    check_unneeded(session, on_it, "this model", force=force, param="model")
    audit.record(session, owner, "model.deleted", name, project_id=model.project_id)
    session.delete(model_now)
    session.flush()


def check_unneeded(session: Session, on_it: Select[str], what: str, *, force: bool, param: str) -> None:
    """Raise InUse while any of the jobs `on_it`, which started from `what`, or what came of them, can't do without.

    With `force` their checkpoints that hold an adapter alone may be lost.
    """
    if job_id := session.scalars(on_it.where(Job.state.in_(UNENDED)).limit(1)).first():
        raise InUse(f"Job {job_id} still needs {what}; cancel it or wait for its end.", param=param)
    adapters = select(Model.id).where(Model.job_id.in_(on_it), Model.source.startswith(ADAPTER))
    if adapter := session.scalars(adapters.limit(1)).first():
        raise InUse(f"The adapter {adapter} was trained on {what} and needs it; delete that first.", param=param)
    if not force and (on_top := _adapter_checkpoints(session, on_it)):
        shown = first_of(on_top, 3)
        raise InUse(
            f"{counted(sum(on_top.values()), 'checkpoint')} of {counted(len(on_top), 'job')} ({shown}) would be of no "
            f"use, as adapters on {what}. Keep it, or delete it all the same with `force=true`.",
            param=param,
        )


def _adapter_checkpoints(session: Session, jobs: Select[str]) -> dict[str, int]:
    """How many checkpoints each of these jobs has that hold an adapter alone."""
    is_adapter = Job.run_config["lora"].as_string().is_not(None)
    counted = select(Job.id, func.count()).join(Checkpoint, Checkpoint.job_id == Job.id)
    counted = counted.where(Job.id.in_(jobs), is_adapter).group_by(Job.id).order_by(Job.id)
    return {job_id: count for job_id, count in session.execute(counted)}


def publish_result(session: Session, job: Job, *, prefix: str, shape: ModelShape, is_adapter: bool = False) -> Model:
    """Name what a job made. Calling it again, by a later attempt, moves the name to the newer files.

    An adapter without a model is one together with the job's base.
    """
    source, sizes = f"{ADAPTER}{job.id}:{prefix}" if is_adapter else f"storage:{prefix}", shape.model_dump(mode="json")
    if model := result_of(session, job):
        model.source, model.shape = source, sizes
        session.flush()
        return model
    for name in result_names(job):
        model = Model(id=name, project_id=job.project_id, job_id=job.id, source=source, shape=sizes)
        if _insert(session, model, beside=job.project_id):
            return model
    raise InvalidModel(f"Every name for the result of job {job.id} is taken.")


def result_of(session: Session, job: Job) -> Model | None:
    """The model that the job made; None before it has, or where that is gone."""
    own = select(Model).where(Model.project_id == job.project_id, Model.id == job.result_model)
    return session.scalars(own).one_or_none()


def result_names(job: Job) -> Iterator[str]:
    """Telling names: the job's, or what it started from, and the start of its id; all of it where that is taken."""
    number = job.id.partition("-")[2]
    for length in (8, len(number)):
        yield f"{(job.name or job.base_model or job.kind)[:200]}-{number[:length]}"


def source_folder(model: Model, models: Path) -> Path | None:
    """Where a base lies on this host; None for a result, which lies in storage."""
    kind, _, where = model.source.partition(":")
    return models / where if kind == "dir" else None


def shape_of(folder: Path) -> ModelShape:
    """The sizes that `config.json` tells; InvalidModel names what is missing or not supported."""
    if not (folder / "config.json").is_file():
        raise InvalidModel(f"{folder.name} has no config.json; it must be a model in Hugging Face layout.")
    if link := _leads_out(folder):
        raise InvalidModel(
            f"{folder.name}/{link} is a link to a file outside the folder; put the file itself there. Only weights may "
            "lie elsewhere, and what a snapshot in Hugging Face's cache links to there."
        )
    try:
        return families.shape_of_config(_json(folder / "config.json"))
    except ValueError as error:
        # It begins with the file's name.
        raise InvalidModel(f"{folder.name}/{error}") from error


def _leads_out(folder: Path) -> str | None:
    """A file of a model's folder that is another one of this host, if any.

    Repositories can hold links. What such a link leads to would be read as part of the model, and a text such as a chat
    template given to whoever downloads what was trained on it.
    """
    home = folder.resolve()
    within = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    for path in sorted(folder.rglob("*")):
        if (
            path.is_symlink()
            and path.suffix != ".safetensors"
            and not any(path.resolve().is_relative_to(place) for place in within)
        ):
            return path.relative_to(folder).as_posix()
    return None


def inspect(folder: Path) -> ModelShape:
    """The shape of a folder whose files are all there and whole; InvalidModel names the file that isn't."""
    shape = shape_of(folder)
    if not (folder / "tokenizer.json").is_file():
        raise InvalidModel(f"{folder.name} has no tokenizer.json; save its tokenizer there in the fast format.")
    try:
        inventory.check(folder, shape)
    except (InvalidWeights, OSError) as error:
        raise InvalidModel(f"{error}.") from error
    _check_tokenizer(folder, shape)
    return shape


def _insert(session: Session, model: Model, *, beside: str) -> bool:
    """Add a model; False where the name is taken, as whoever looks from the project `beside` sees it."""
    return _named(session, beside, model.id) is None and _add(session, model)


def _add(session: Session, model: Model) -> bool:
    """Add a model; False where its project, or everyone, has one of this name."""
    try:
        with session.begin_nested():
            session.add(model)
            session.flush()
    except IntegrityError:
        return False
    return True


def _visible(project_id: str) -> Select[Model]:
    return select(Model).where(or_(Model.project_id.is_(None), Model.project_id == project_id))


def _named(session: Session, project_id: str, name: str) -> Model | None:
    """What a name means to a project: its own model, else everyone's."""
    found = _visible(project_id).where(Model.id == name).order_by(Model.project_id.is_(None)).limit(1)
    return session.scalars(found).one_or_none()


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _is_within(models: Path, name: str) -> bool:
    """Whether the models directory has a folder of this name, whatever is in it."""
    try:
        return not {"/", "\\"} & set(name) and name not in {"", ".", ".."} and (models / name).is_dir()
    except (OSError, ValueError):
        # Too long a name, or one that no file can have.
        return False


def _no_model(folder: Path) -> str:
    """Why a folder is not a model, and what to do."""
    if not FOLDER.fullmatch(folder.name):
        return "can't be a model: name it with letters, digits, dots, hyphens and underscores, the first no sign."
    if (folder / "snapshots").is_dir():
        return (
            "is of Hugging Face's cache: link one of its snapshots into the models directory by another name, or fetch "
            "the model with hf download --local-dir."
        )
    if (folder / "adapter_config.json").is_file():
        return "has an adapter alone; merge it into its base, as peft's merge_and_unload does, and save that here."
    return "has no config.json; it must be a model in Hugging Face layout."


def _seen(folder: Path) -> _Folder:
    made_at = (folder / "config.json").stat().st_mtime
    return _Folder(folder.name, shape_of(folder), made_at)


def _of_checkpoint(session: Session, owner: Account, name: str) -> Model | None:
    shared = select(CheckpointPermission.checkpoint_id).where(CheckpointPermission.project_id == owner.project_id)
    query = (
        select(Checkpoint, Job)
        .join(Job, Job.id == Checkpoint.job_id)
        .where(Checkpoint.id == name, or_(Job.project_id == owner.project_id, Checkpoint.id.in_(shared)))
    )
    if (found := session.execute(query).one_or_none()) is None:
        return None
    checkpoint, job = found
    return Model(
        key=checkpoint.id,
        id=checkpoint.id,
        project_id=job.project_id,
        job_id=job.id,
        source=f"{CHECKPOINT}{checkpoint.id}",
        shape=trained_shape(session, job),
        created_at=checkpoint.created_at,
    )


def trained_shape(session: Session, job: Job) -> dict[str, Any]:
    """The sizes of what a job trains: as it says, or its base's."""
    run = RunConfig.model_validate(job.run_config)
    if run.model is not None:
        return run.model.model_dump(mode="json")
    name = job.base_model or ""
    if checkpoint := session.get(Checkpoint, name):
        return trained_shape(session, session.get_one(Job, checkpoint.job_id))
    if (base := _named(session, job.project_id, name)) is None:
        raise InvalidModel(f"The base of job {job.id}, {job.base_model}, is gone.", param="model")
    return base.shape


def _folder_of(source: str) -> str:
    kind, _, where = source.partition(":")
    if kind != "dir":
        raise InvalidSpec(
            "A source is dir:<folder under the models directory>, hf://org/name@revision, or a job.", param="source"
        )
    return where


def _named_folder(models: Path, name: str) -> ModelShape:
    if not FOLDER.fullmatch(name) or not (models / name).is_dir():
        raise NotFound(f"There is no folder {name!r} in the models directory.", param="source")
    return inspect(models / name)


def _named_result(session: Session, owner: Account, name: str, job_id: str) -> Model:
    result = session.scalars(
        select(Model)
        .join(Job, (Job.result_model == Model.id) & (Job.project_id == Model.project_id))
        .where(Job.id == job_id, Job.project_id == owner.project_id)
        # Who deletes the job waits, and then this model goes too.
        .with_for_update(read=True, key_share=True, of=Job)
    ).one_or_none()
    if result is None:
        raise NotFound(f"There is no job {job_id!r} with a model as its result.", param="source.job")
    return Model(id=name, project_id=owner.project_id, job_id=job_id, source=result.source, shape=result.shape)


def _json(path: Path) -> Any:
    """What a file of JSON holds; ValueError, by its name, where it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}; the service must be able to read it") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged; copy it again ({type(error).__name__}: {error})") from error


_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def _check_tokenizer(folder: Path, shape: ModelShape) -> None:
    """What a tokenizer's files say as JSON; whether their library takes them too shows once a job reads its data."""
    for name in _OBJECTS:
        path = folder / name
        if path.is_file():
            status = path.stat()
            entries = _entries_of(path, status.st_mtime_ns, status.st_size)
            if entries > shape.vocab_size:
                raise InvalidModel(
                    f"{folder.name}/{name} has {entries} entries, and config.json says vocab_size={shape.vocab_size}: "
                    "there are no rows for the others. Take out what was added, or give the model rows and save it, as "
                    "transformers' resize_token_embeddings does."
                )


@lru_cache(maxsize=256)
def _entries_of(path: Path, mtime_ns: int, size: int) -> int:
    """How many tokens a file has that is a tokenizer.json, or 0. Such a file is large, and seldom another one."""
    try:
        said = _json(path)
        if not isinstance(said, dict):
            raise ValueError(f"{path.name}: it must hold one JSON object")
    except ValueError as error:
        raise InvalidModel(f"{path.parent.name}/{error}") from error
    if path.name != "tokenizer.json":
        return 0
    try:
        vocab, added = said["model"]["vocab"], said.get("added_tokens") or ()
        # A list of pairs in a Unigram model, whose places are the ids.
        tokens = set(vocab) if isinstance(vocab, dict) else {pair[0] for pair in vocab}
        return len(tokens | {token["content"] for token in added})
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidModel(
            f"{path.parent.name}/tokenizer.json is no tokenizer in the fast format; save it with transformers' "
            "AutoTokenizer."
        ) from error
