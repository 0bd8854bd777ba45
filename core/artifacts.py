"""What a job leaves behind: files in storage, a row for each, a name for the model. Rows come when all is there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from core import catalog, jobs, result_files
from core.db import after_commit
from core.errors import InvalidMove, NotFound
from core.models import Artifact, Job
from core.services import Services
from core.states import JobState
from core.storage import Storage, nothing_unlisted, sha256_of
from engine.config import ModelShape

MANIFEST = "manifest.json"
_PATH = re.compile(r"[A-Za-z0-9_.\-]+(?:/[A-Za-z0-9_.\-]+)+")


class Damaged(Exception):
    """A file of the export is not what its manifest says."""


@dataclass(frozen=True)
class _Found:
    path: str
    kind: str
    bytes: int
    sha256: str


def publish(services: Services, job: Job, export: Path) -> None:
    """Upload `export`, then list its files and name its model, if attempt `job.attempt` still holds the job.

    Raises Damaged when a file differs from the manifest, and InvalidMove when the job was cancelled or taken over
    meanwhile: then nothing of it can be seen. A later attempt's files take the place of an earlier one's.
    """
    found = _verified(export)
    prefix = f"jobs/{job.id}/{job.attempt}/artifacts"
    shape = catalog.shape_of(export / "model") if any(file.kind == "model" for file in found) else None

    def listed() -> bool:
        with services.db.reading() as session:
            return any(artifact.storage_key.startswith(f"{prefix}/") for artifact in of_job(session, job.id))

    with nothing_unlisted(partial(services.storage.delete_tree, prefix), listed=listed):
        services.storage.put_tree(prefix, export)
        table = result_files.store(services, job, prefix) if job.base_model is not None else None
        _list(services, job, prefix, found, shape, table)


def _list(
    services: Services,
    job: Job,
    prefix: str,
    found: Sequence[_Found],
    shape: ModelShape | None,
    table: result_files.Table | None,
) -> None:
    with services.db.session() as session:
        held = jobs.held(session, job.id, fence=job.attempt)
        if held.state is JobState.CANCELLING:
            raise InvalidMove("The job was cancelled before its result was published.")
        _forget_earlier(session, services.storage, job.id, but=prefix)
        if table is not None:
            result_files.list_(session, services.storage, held, table)
        session.add_all(
            Artifact(
                job_id=job.id,
                path=file.path,
                kind=file.kind,
                bytes=file.bytes,
                sha256=file.sha256,
                storage_key=f"{prefix}/{file.path}",
            )
            for file in found
        )
        if shape is not None:
            held.result_model = catalog.publish_result(session, held, prefix=f"{prefix}/model", shape=shape).id
        elif any(file.kind == "adapter" for file in found):
            shape = ModelShape.model_validate(catalog.trained_shape(session, held))
            prefix = f"{prefix}/adapter"
            held.result_model = catalog.publish_result(session, held, prefix=prefix, shape=shape, is_adapter=True).id


def of_job(session: Session, job_id: str) -> Sequence[Artifact]:
    """The files of a job's result, by path; none before it has one."""
    return session.scalars(_OF_JOB, {"job": job_id}).all()


_OF_JOB = select(Artifact).where(Artifact.job_id == bindparam("job")).order_by(Artifact.path)


def of_jobs(session: Session, job_ids: Collection[str]) -> dict[str, list[Artifact]]:
    """The files of several jobs' results at once; a job without a result is left out."""
    found: dict[str, list[Artifact]] = {}
    for artifact in session.scalars(
        select(Artifact).where(Artifact.job_id.in_(job_ids)).order_by(Artifact.job_id, Artifact.path)
    ):
        found.setdefault(artifact.job_id, []).append(artifact)
    return found


def get(session: Session, job: Job, path: str) -> Artifact:
    """One file of a job's result."""
    artifact = session.get(Artifact, (job.id, path))
    if artifact is None:
        raise NotFound(f"Job {job.id} has no artifact {path!r}.", param="path")
    return artifact


def manifest(session: Session, storage: Storage, job_id: str) -> dict[str, Any] | None:
    """What made the result, and the hash of each file; None before there is a result."""
    artifact = session.get(Artifact, (job_id, MANIFEST))
    if artifact is None:
        return None
    return cast("dict[str, Any]", json.loads(b"".join(storage.stream(artifact.storage_key))))


def _forget_earlier(session: Session, storage: Storage, job_id: str, *, but: str) -> None:
    """Unlist what an earlier attempt published, and remove it once that is committed."""
    for artifact in of_job(session, job_id):
        session.delete(artifact)
        if not artifact.storage_key.startswith(f"{but}/"):
            after_commit(session, partial(storage.delete, artifact.storage_key))
    session.flush()


def _verified(export: Path) -> list[_Found]:
    """The files that the manifest names, each of which is what it says, and the manifest itself, last."""
    manifest_path = export / MANIFEST
    listed = json.loads(manifest_path.read_text(encoding="utf-8"))["files"]
    found = [_Found(entry["path"], _kind(entry["path"]), entry["bytes"], entry["sha256"]) for entry in listed]
    if link := next((path for path in export.rglob("*") if path.is_symlink()), None):
        raise Damaged(f"{link.relative_to(export).as_posix()} is a link; an export has files only")
    for file in found:
        # What trains has read data and weights of strangers: it can't have another file of this host published.
        if not _PATH.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")):
            raise Damaged(f"{file.path!r} is not the path of a file of an export")
        if sha256_of(export / file.path) != file.sha256:
            raise Damaged(f"{file.path} is not what the manifest says; the disk may be at fault")
    size = manifest_path.stat().st_size
    return [*found, _Found(MANIFEST, "manifest", size, sha256_of(manifest_path))]


def _kind(path: str) -> str:
    return path.partition("/")[0]
