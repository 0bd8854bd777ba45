"""A real run that is paused goes on bitwise, on another host and in another layout."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from core import artifacts, files, jobs, metrics, nodes, scheduler
from core.errors import InvalidMove, InvalidSpec
from core.keys import Account
from core.services import Services
from core.settings import Settings
from core.spec import JobSpec, LayoutAsk
from core.states import JobState
from tests import make
from tests.stack import TEXT, TINY
from tests.workers.test_supervisor import Running, job_of
from workers.launcher import LocalLauncher
from workers.outcome import Wish

STEPS = 60
ALL_SECONDS = 540.0
"""For all that is waited for, one after another; before pytest's own patience is over, so that it is said for what."""


@pytest.fixture
def there(services: Services, tmp_path: Path) -> Services:
    """The same service from another host, with a scratch folder of its own."""
    ours = services.settings
    settings = Settings(
        data_dir=tmp_path / "there", database_url=ours.database, storage_url=ours.storage, redis_url=ours.redis,
        lease_seconds=ours.lease_seconds, node_name="there",
    )  # fmt: skip
    settings.data_dir.mkdir()
    return Services(settings)


def submitted(services: Services, owner: Account) -> str:
    """A tiny job of two rows a step; its id."""
    file = files.create(
        services.db, services.storage, owner, filename="a.txt", purpose="pretrain", chunks=[TEXT.encode()],
        max_bytes=2**20,
    )  # fmt: skip
    spec: dict[str, Any] = {
        "kind": "pretrain", "model": TINY | {"num_layers": 2},
        "tokenizer": {"type": "bytes"}, "data": {"train": [file.id], "seq_len": 32},
        "training": {
            "steps": STEPS, "checkpoint_every": 1000, "global_batch": 2, "micro_batch": 1, "precision": "fp32",
        },
        "parallel": {"data": 1},
    }  # fmt: skip
    with services.db.session() as session:
        return make.submitted(session, owner, JobSpec.model_validate(spec), settings=services.settings).id


def placed(services: Services, *job_ids: str) -> list[Running]:
    """The next attempt of each, on the one host that is up."""
    with services.db.session() as session:
        nodes.heartbeat(session, services.settings.node_name)
        assert {placement.job_id for placement in scheduler.tick(session)} == {*job_ids}
    return [Running(services, job_id, LocalLauncher()) for job_id in job_ids]


def losses(services: Services, job_id: str) -> list[float]:
    """By step."""
    with services.db.reading() as session:
        points = metrics.series(session, job_id, names=["loss"], max_points=None)["loss"]
    assert [step for step, _ in points] == list(range(1, STEPS + 1))
    return [loss for _, loss in points]


def weights(services: Services, job_id: str) -> dict[str, str]:
    """What of the result is weights, by digest."""
    with services.db.reading() as session:
        found = {one.path: one.sha256 for one in artifacts.of_job(session, job_id)}
    return {path: digest for path, digest in found.items() if path.endswith(".safetensors")}


@pytest.mark.timeout(ALL_SECONDS + 60)
def test_a_paused_run_goes_on_bitwise_on_another_host_and_all_the_same_in_another_layout(
    services: Services, there: Services, owner: Account
) -> None:
    latest = monotonic() + ALL_SECONDS
    with services.db.session() as session:
        make.node(session, "here", num_slots=3)
    undisturbed, same, other = (submitted(services, owner) for _ in range(3))
    runs = placed(services, undisturbed, same, other)
    for run in runs[1:]:
        run.until(lambda job: job.last_step > 3, seconds=latest - monotonic())
        with services.db.session() as session:
            jobs.pause(session, owner, run.job_id)
        # As the bell would, which nobody rings here.
        run.orders.give(Wish.PAUSE)
    for run in runs:
        run.outcome(seconds=latest - monotonic())
    for job_id in (same, other):
        assert (job_of(services, job_id).state, job_of(services, job_id).last_step < STEPS) == (JobState.PAUSED, True)

    layout = LayoutAsk.model_validate({"parallel": {"pipeline": 2}})
    with there.db.session() as session:
        nodes.drain(session, "here")
        make.node(session, "there", num_slots=3)
        jobs.resume(session, owner, same, settings=there.settings)
        jobs.resume(session, owner, other, layout, settings=there.settings)
    for run in placed(there, same, other):
        run.outcome(seconds=latest - monotonic())

    ended = [job_of(there, job_id) for job_id in (undisturbed, same, other)]
    assert [(job.state, job.slots) for job in ended] == [(JobState.SUCCEEDED, slots) for slots in (1, 1, 2)]
    assert weights(there, same) == weights(there, undisturbed) != {}
    assert losses(there, same) == losses(there, undisturbed)
    # In another layout the sums are made in another order.
    assert losses(there, other) == pytest.approx(losses(there, undisturbed), rel=1e-3)
    there.close()


def test_a_layout_is_for_a_paused_job_and_has_to_be_one(services: Services, owner: Account) -> None:
    job_id = submitted(services, owner)
    two = LayoutAsk.model_validate({"parallel": {"tensor": 2}})
    with services.db.session() as session:
        with pytest.raises(InvalidMove, match="pause it first"):
            jobs.resume(session, owner, job_id, two, settings=services.settings)
        same = LayoutAsk.model_validate({"parallel": {"data": 1}})
        assert jobs.resume(session, owner, job_id, same, settings=services.settings).state is JobState.QUEUED
        jobs.pause(session, owner, job_id)
        five = LayoutAsk.model_validate({"parallel": {"tensor": 5}})
        with pytest.raises(InvalidSpec):
            jobs.resume(session, owner, job_id, five, settings=services.settings)
        make.node(session, "larger", num_slots=4)
        four = LayoutAsk.model_validate({"parallel": {"data": 4}})
        with pytest.raises(InvalidSpec, match=r"multiple of .*=4, and a job that has begun keeps its batch") as refused:
            jobs.resume(session, owner, job_id, four, settings=services.settings)
        assert refused.value.param == "parallel"
        # What this job can't use has no say, and it stays in the precision that it began with.
        make.node(session, "gpus", device="cuda", slot_memory_bytes=1)
        job = jobs.resume(session, owner, job_id, two, settings=services.settings)
        assert (job.slots, job.spec["parallel"], job.run_config["parallel"]["tensor"]) == (2, {"tensor": 2}, 2)
        assert job.run_config["training"]["global_batch"] == 2
