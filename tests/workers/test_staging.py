"""What an attempt finds in its run directory when it begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from core import checkpoints, jobs
from core.services import Services
from core.states import JobState
from tests.workers.conftest import place_job
from workers import staging


def test_an_attempt_that_goes_on_finds_the_best_checkpoint_beside_the_newest(
    services: Services, tmp_path: Path
) -> None:
    job_id = place_job(services, state=JobState.RUNNING, attempt=1, holder="somebody")
    for step in (10, 20, 30):
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "weights").write_text(f"of step {step}")
        checkpoints.publish(services, job_id, fence=1, step=step, folder=folder, metrics={"best_step": min(step, 20)})
        checkpoints.prune(services, job_id, keep=1, spare=min(step, 20))
    with services.db.reading() as session:
        job = jobs.find(session, job_id)

    run = staging.stage(services, job, tmp_path / "run")

    assert run.resume == Path("resume/step-00000030")
    found = {path.parent.name: path.read_text() for path in (tmp_path / "run" / "resume").rglob("weights")}
    assert found == {"step-00000020": "of step 20", "step-00000030": "of step 30"}


def test_the_spec_lies_beside_the_run_as_it_was_asked(services: Services, tmp_path: Path) -> None:
    job_id = place_job(services, state=JobState.RUNNING, attempt=1, holder="somebody")
    with services.db.reading() as session:
        job = jobs.find(session, job_id)

    staging.stage(services, job, tmp_path / "run")

    assert json.loads((tmp_path / "run" / "spec.json").read_text()) == job.spec


def cut(path: Path) -> None:
    """As a loss of power may leave it: its end was never written."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    """Or all of its blocks were, and none of its content."""
    path.write_bytes(bytes(path.stat().st_size))


HARMS: dict[str, Callable[[Path], object]] = {"cut": cut, "zeroed": zero, "gone": Path.unlink}


@pytest.mark.parametrize("file", ["weights", "manifest.json"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS.keys())
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    services: Services, tmp_path: Path, harm: Callable[[Path], object], file: str
) -> None:
    job_id = place_job(services, state=JobState.RUNNING, attempt=1, holder="somebody")
    made = []
    for step in (10, 20):
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "weights").write_text(f"of step {step}")
        digest = hashlib.sha256((folder / "weights").read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps({"files": [{"path": "weights", "sha256": digest}]}))
        made.append(checkpoints.publish(services, job_id, fence=1, step=step, folder=folder, metrics={}))
    with services.db.reading() as session:
        job = jobs.find(session, job_id)

    told: list[int] = []
    for number, (checkpoint, resume) in enumerate([(made[1], "resume/step-00000010"), (made[0], None)]):
        harm(services.settings.data_dir / "storage" / checkpoint.storage_prefix / file)
        told.clear()
        run = staging.stage(
            services, job, tmp_path / f"run-{number}", damaged=lambda checkpoint, why: told.append(checkpoint.step)
        )
        assert run.resume == (resume and Path(resume))
    assert told == [20, 10]
    with services.db.reading() as session:
        assert len(checkpoints.newest_first(session, job_id)) == 2, "it may be this host that reads them wrong"


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS.keys())
def test_a_damaged_file_is_not_trained_on(services: Services, tmp_path: Path, harm: Callable[[Path], object]) -> None:
    job_id = place_job(services, state=JobState.RUNNING, attempt=1, holder="somebody")
    with services.db.reading() as session:
        job = jobs.find(session, job_id)
    (file_id,) = job.spec["data"]["train"]
    harm(services.settings.data_dir / "storage" / "files" / file_id)
    with pytest.raises(staging.Unusable, match=f"the content of {file_id} is") as refused:
        staging.stage(services, job, tmp_path / "run")
    assert refused.value.code == "invalid_data"
