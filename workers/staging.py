"""Fill a run directory with what an attempt needs: data, base, the newest checkpoint, the spec, and `run.json` last."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy.orm import Session

from core import catalog, checkpoints
from core.errors import NotFound
from core.models import Checkpoint, File, Job
from core.services import Services
from core.settings import trainer_environment
from core.spec import JobSpec
from core.storage import Storage, sha256_of
from engine.config import RunConfig
from engine.events import ErrorCode

SPEC = "spec.json"
"""What was asked for, beside `run.json`; the engine only puts it into the manifest."""
EXPORT = (sys.executable, "-m", "engine", "export")
EXPORT_SECONDS = 600.0

log = structlog.get_logger(__name__)


class Unusable(Exception):
    """Something that the job needs is gone for good; trying again would not bring it back."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


Tell = Callable[[Checkpoint, checkpoints.Damaged], None]
"""Hears of each checkpoint that is passed over."""


def stage(services: Services, job: Job, run_dir: Path, *, damaged: Tell = lambda checkpoint, why: None) -> RunConfig:
    """Bring everything to `run_dir` and write `run.json`; what the engine will read."""
    run = RunConfig.model_validate(job.run_config)
    with services.db.reading() as session:
        uploads = [(path, _file(session, id_)) for path, id_ in _uploads(run, JobSpec.model_validate(job.spec))]
        base = _source(session, job) if run.base is not None else None
        saved = checkpoints.newest_first(session, job.id)
    run_dir.mkdir(parents=True)
    for path, file in uploads:
        _fetch(services.storage, file, run_dir / path)
    if run.base is not None and base is not None:
        stage_model(services, base, run_dir / run.base)
    checkpoint, resume = _newest_sound(services.storage, saved, run_dir, damaged)
    if checkpoint is not None and resume is not None:
        run = run.model_copy(update={"resume": resume})
        _stage_best(services, checkpoint, run_dir, damaged)
    _write(run_dir / SPEC, json.dumps(job.spec, indent=2))
    _write(run_dir / "run.json", run.model_dump_json(indent=2))
    log.info("attempt staged", files=len(uploads), base=job.base_model, resumes_from=checkpoint and checkpoint.step)
    return run


def _uploads(run: RunConfig, spec: JobSpec) -> Iterator[tuple[Path, str]]:
    """Where each uploaded file goes. `core.resolve` names the paths in the order of the spec's ids."""
    yield from zip(run.data.train, spec.data.train, strict=True)
    if isinstance(run.data.validation, Path):
        yield run.data.validation, str(spec.data.validation)
    if run.data.evaluation is not None:
        yield run.data.evaluation, str(spec.data.evaluation)
    if run.tokenizer.path is not None and spec.tokenizer is not None:
        yield run.tokenizer.path, str(spec.tokenizer.file)


def _file(session: Session, file_id: str) -> File:
    if file := session.get(File, file_id):
        return file
    raise Unusable("invalid_data", f"the file {file_id} is gone")


def _fetch(storage: Storage, file: File, path: Path) -> None:
    try:
        storage.get_to(file.storage_key, path)
    except NotFound as error:
        raise Unusable("invalid_data", f"the content of {file.id} is gone from storage") from error
    if path.stat().st_size != file.bytes or sha256_of(path) != file.sha256:
        # Cut or zeroed, it would train all the same, on something else.
        raise Unusable("invalid_data", f"the content of {file.id} is not what was uploaded: it is damaged in storage")


def _source(session: Session, job: Job) -> str:
    if source := catalog.base_source(session, job):
        return source
    raise Unusable("invalid_model", f"the model {job.base_model} is gone")


def stage_model(services: Services, source: str, folder: Path) -> None:
    """Bring the files of a model to `folder`, by its `Model.source`; a folder on this host is only linked to.

    What lies in storage as a checkpoint, or as an adapter, is made a model of here.
    """
    kind, _, where = source.partition(":")
    if kind in {"checkpoint", "adapter"}:
        with services.db.reading() as session:
            part = _part(session, kind, where)
        _make_model(services, part, folder)
        return
    if kind == "dir":
        local = services.settings.models / where
        if not local.is_dir():
            raise Unusable(
                "invalid_model", f"the folder {where!r} is not in the models directory of the host that was to train it"
            )
        folder.symlink_to(local, target_is_directory=True)
        return
    try:
        services.storage.get_tree(where, folder)
    except NotFound as error:
        raise Unusable("invalid_model", f"the model's files are gone from storage: {where}") from error


@dataclass(frozen=True)
class Part:
    """What becomes a model together with its job's run, and with the base if there is one."""

    kind: str
    """checkpoint or adapter"""
    prefix: str
    """Of its files in storage."""
    run: RunConfig
    base: str | None
    """Source of the base."""


def _part(session: Session, kind: str, where: str) -> Part:
    if kind == "checkpoint":
        checkpoint = session.get(Checkpoint, where)
        if checkpoint is None:
            raise Unusable("invalid_model", f"the checkpoint {where} is gone; its job keeps only the newest ones")
        job_id, prefix = checkpoint.job_id, checkpoint.storage_prefix
    else:
        job_id, _, prefix = where.partition(":")
    job = session.get(Job, job_id)
    if job is None:
        raise Unusable("invalid_model", f"the job {job_id} was deleted, and the {kind} that it made with it")
    run = RunConfig.model_validate(job.run_config)
    return Part(kind, prefix, run, _source(session, job) if run.base is not None else None)


def _make_model(services: Services, part: Part, folder: Path) -> None:
    work = folder.with_name(f"{folder.name}.parts")
    work.mkdir(parents=True)
    try:
        try:
            services.storage.get_tree(part.prefix, work / part.kind)
        except NotFound as error:
            raise Unusable("invalid_model", f"the {part.kind}'s files are gone from storage: {part.prefix}") from error
        if part.run.base is not None and part.base is not None:
            (work / part.run.base).parent.mkdir(parents=True, exist_ok=True)
            stage_model(services, part.base, work / part.run.base)
        _write(work / "run.json", part.run.model_dump_json(indent=2))
        made = subprocess.run(
            [*EXPORT, str(work / "run.json"), f"--{part.kind}", str(work / part.kind), "--into", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=trainer_environment(()),
            timeout=EXPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unusable("stalled", f"no model was made of the {part.kind} within {EXPORT_SECONDS:g} s") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if made.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        log.warning("no model made", part=part.kind, error=made.stderr[-2000:])
        last = made.stderr.strip().rpartition("\n")[2] or f"exit code {made.returncode}"
        raise Unusable("invalid_model", f"no model can be made of the {part.kind}: {last}")


def _newest_sound(
    storage: Storage, saved: Sequence[Checkpoint], run_dir: Path, damaged: Tell
) -> tuple[Checkpoint | None, Path | None]:
    """Bring the newest checkpoint that is as it was stored; that, and where the run finds it. None: from the start.

    The others stay where they are: it may be this host that reads them wrong.
    """
    for checkpoint in saved:
        try:
            return checkpoint, _resume(storage, checkpoint, run_dir)
        except checkpoints.Damaged as why:
            log.warning("checkpoint passed over", step=checkpoint.step, reason=str(why))
            damaged(checkpoint, why)
    return None, None


def _stage_best(services: Services, newest: Checkpoint, run_dir: Path, damaged: Tell) -> None:
    """Bring the best beside the one to go on from, where the engine looks for it when all is done."""
    with services.db.reading() as session:
        best = checkpoints.best(session, newest)
    if best is not None:
        _newest_sound(services.storage, [best], run_dir, damaged)


def _resume(storage: Storage, checkpoint: Checkpoint, run_dir: Path) -> Path:
    """Bring a checkpoint to the run directory; where the run finds it."""
    path = Path("resume") / f"step-{checkpoint.step:08d}"
    try:
        checkpoints.stage(storage, checkpoint, run_dir / path)
    except checkpoints.Damaged:
        shutil.rmtree(run_dir / path, ignore_errors=True)
        raise
    return path


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
