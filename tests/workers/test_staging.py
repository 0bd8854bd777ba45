"""What an attempt finds in its run directory when it begins."""

from __future__ import annotations

import json
from pathlib import Path

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
