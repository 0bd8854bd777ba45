"""One attempt from its claim to its end, with the fake engine as real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Event, Thread
from time import monotonic

import psutil
import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DataError

from core import checkpoints, jobs, metrics, nodes
from core.keys import Account
from core.models import Artifact, Checkpoint, Job, JobEvent, Slot
from core.services import Services
from core.states import JobState
from tests.workers.conftest import fake_engine, place_job
from workers import tidy
from workers.attempt import Attempt
from workers.launcher import Handle, LocalLauncher, Status
from workers.orders import Orders
from workers.outcome import Action, Outcome, Wish
from workers.supervisor import supervise

DEADLINE_SECONDS = 30
FOREVER = 100_000


class Running:
    """A supervisor in a thread, as it is for one that can be watched from outside."""

    def __init__(self, services: Services, job_id: str, launcher: LocalLauncher) -> None:
        self.services, self.job_id, self.orders = services, job_id, Orders()
        self._outcome: Future[Outcome | None] = Future()
        Thread(target=self._run, args=(launcher,), daemon=True).start()

    def _run(self, launcher: LocalLauncher) -> None:
        try:
            self._outcome.set_result(supervise(self.services, self.job_id, launcher=launcher, orders=self.orders))
        except BaseException as error:
            self._outcome.set_exception(error)

    def outcome(self, *, seconds: float = DEADLINE_SECONDS) -> Outcome | None:
        return self._outcome.result(timeout=seconds)

    def until(self, claim: Callable[[Job], bool], *, seconds: float = DEADLINE_SECONDS) -> None:
        deadline, pause = monotonic() + seconds, Event()
        while not claim(job_of(self.services, self.job_id)):
            assert monotonic() < deadline
            assert not self._outcome.done(), self._outcome.result()
            pause.wait(0.02)


def supervised(services: Services, job_id: str, launcher: LocalLauncher) -> Outcome | None:
    return Running(services, job_id, launcher).outcome()


def job_of(services: Services, job_id: str) -> Job:
    with services.db.reading() as session:
        return session.scalars(select(Job).where(Job.id == job_id)).one()


def steps_of(services: Services, job_id: str) -> list[int]:
    with services.db.reading() as session:
        return [step for step, _ in metrics.series(session, job_id, names=["loss"], max_points=None)["loss"]]


def checkpoints_of(services: Services, job_id: str) -> list[int]:
    query = select(Checkpoint.step).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step)
    with services.db.reading() as session:
        return list(session.scalars(query))


def messages_of(services: Services, job_id: str) -> list[str]:
    query = select(JobEvent.message).where(JobEvent.job_id == job_id).order_by(JobEvent.seq)
    with services.db.reading() as session:
        return list(session.scalars(query))


def assert_nothing_left(services: Services, job_id: str) -> None:
    """No process works for the job, no slot is held, and its run directories are gone."""
    runs = str(services.settings.runs / job_id)
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            assert not any(runs in word for word in process.info["cmdline"] or [])
    with services.db.reading() as session:
        assert session.scalars(select(Slot).where(Slot.job_id == job_id)).all() == []
    assert not [path for path in (services.settings.runs / job_id).glob("*") if path.is_dir()]


def place_again(services: Services, job_id: str) -> None:
    with services.db.session() as session:
        session.execute(update(Job).where(Job.id == job_id).values(retry_at=None))
        jobs.place(session, job_id, "here", [0], claim_within=services.settings.lease)


def test_a_run_that_finishes_is_recorded_published_and_cleared_away(services: Services) -> None:
    job_id = place_job(services, steps=20, checkpoint_every=5)

    outcome = supervised(services, job_id, fake_engine())

    assert outcome is not None
    assert outcome.action is Action.PUBLISH
    job = job_of(services, job_id)
    assert (job.state, job.attempt, job.error) == (JobState.SUCCEEDED, 1, None)
    assert steps_of(services, job_id) == list(range(1, 21))
    assert checkpoints_of(services, job_id) == [10, 15, 20], "keep_checkpoints is 3"
    with services.db.reading() as session:
        told = session.scalars(select(Checkpoint.metrics).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step))
        assert [metrics["tokens"] for metrics in told] == [10, 15, 20], "of its step, whatever was told before it"
    with services.db.reading() as session:
        paths = session.scalars(select(Artifact.path).where(Artifact.job_id == job_id).order_by(Artifact.path)).all()
    assert paths == ["manifest.json", "model/config.json", "model/model.safetensors"]
    assert_nothing_left(services, job_id)


def test_a_job_is_claimed_once(services: Services) -> None:
    job_id = place_job(services)
    with services.db.session() as session:
        assert jobs.claim(session, job_id, "somebody", services.settings.lease, node="here") is not None

    assert supervised(services, job_id, fake_engine()) is None
    assert job_of(services, job_id).attempt == 1


def test_a_failure_that_would_come_back_is_told_and_not_tried_again(services: Services) -> None:
    job_id = place_job(services)

    supervised(services, job_id, fake_engine("--fail", "invalid_data"))

    job = job_of(services, job_id)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert (job.error["code"], job.error["hint"]) == ("invalid_data", "tell it something else")
    assert_nothing_left(services, job_id)


def test_an_engine_that_vanishes_goes_on_from_the_newest_checkpoint_without_a_hole_or_a_repetition(
    services: Services,
) -> None:
    job_id = place_job(services, steps=20, checkpoint_every=5)

    lost = supervised(services, job_id, fake_engine("--vanish-at", "13", "--step-seconds", "0.05"))

    assert lost is not None
    assert lost.action is Action.LOSE
    job = job_of(services, job_id)
    assert job.state is JobState.QUEUED
    assert job.losses == 1
    assert job.retry_at is not None
    assert steps_of(services, job_id) == list(range(1, 13))
    assert checkpoints_of(services, job_id) == [5, 10]

    place_again(services, job_id)
    supervised(services, job_id, fake_engine())

    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert job_of(services, job_id).attempt == 2
    assert steps_of(services, job_id) == list(range(1, 21))
    assert any("steps 11 to 20" in message for message in messages_of(services, job_id))
    assert_nothing_left(services, job_id)


@pytest.mark.parametrize("options", [(), ("--ignore-term",)], ids=["that listens", "that does not"])
def test_cancelling_ends_a_run(services: Services, options: tuple[str, ...]) -> None:
    job_id = place_job(services, steps=FOREVER)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02", *options))
    running.until(lambda job: job.last_step > 3)

    with services.db.session() as session:
        jobs.move(session, job_id, JobState.CANCELLING)
    outcome = running.outcome()

    assert outcome is not None
    assert outcome.action is Action.CANCEL
    assert job_of(services, job_id).state is JobState.CANCELLED
    assert_nothing_left(services, job_id)


@pytest.mark.parametrize("pause", ["0", "0.5"], ids=["before it is listed", "after"])
def test_a_run_that_went_back_and_died_goes_on_from_where_it_went_back_to(services: Services, pause: str) -> None:
    job_id = place_job(services, steps=20)

    supervised(services, job_id, fake_engine("--go-back-to", "5", "--step-seconds", pause))

    assert "went back from step 10 to step 5" in messages_of(services, job_id)
    with services.db.reading() as session:
        assert [each.step for each in checkpoints.newest_first(session, job_id)] == [5]
    place_again(services, job_id)
    supervised(services, job_id, fake_engine())
    assert any("steps 6 to 20" in message for message in messages_of(services, job_id))
    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert steps_of(services, job_id) == list(range(1, 21))


def test_pausing_saves_and_resuming_continues(services: Services) -> None:
    job_id = place_job(services, steps=600, checkpoint_every=None)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)

    with services.db.session() as session:
        jobs.move(session, job_id, JobState.PAUSING)
    running.outcome()

    assert job_of(services, job_id).state is JobState.PAUSED
    (saved,) = checkpoints_of(services, job_id)
    assert steps_of(services, job_id) == list(range(1, saved + 1))
    assert_nothing_left(services, job_id)

    with services.db.session() as session:
        jobs.move(session, job_id, JobState.QUEUED)
    place_again(services, job_id)
    supervised(services, job_id, fake_engine("--step-seconds", "0"))

    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert steps_of(services, job_id) == list(range(1, 601))


def test_a_host_that_goes_down_hands_the_job_back_unharmed(services: Services) -> None:
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)

    with services.db.session() as session:
        nodes.drain(session, "here")
    running.orders.give(Wish.DRAIN)
    running.outcome()

    job = job_of(services, job_id)
    assert (job.state, job.losses, job.retry_at) == (JobState.QUEUED, 0, None)
    assert checkpoints_of(services, job_id) == [job.last_step]
    assert_nothing_left(services, job_id)


def test_a_host_that_goes_down_is_believed_where_it_could_not_write_that(services: Services) -> None:
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)

    running.orders.host_goes_down = True
    running.orders.give(Wish.DRAIN)
    running.outcome()

    job = job_of(services, job_id)
    assert (job.state, job.losses, job.retry_at) == (JobState.QUEUED, 0, None)
    assert messages_of(services, job_id)[-1] == "its host is going down"


def test_a_run_that_is_stopped_from_outside_goes_on_for_as_long_as_each_attempt_comes_further(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "settings", services.settings.model_copy(update={"max_losses": 2}))
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    for attempt in (1, 2, 3):
        running, before = Running(services, job_id, fake_engine("--step-seconds", "0.02")), job_of(services, job_id)
        running.until(lambda job, before=before: job.last_step > before.last_step + 1)
        running.orders.give(Wish.DRAIN)
        running.outcome()
        job = job_of(services, job_id)
        assert (job.state, job.attempt, job.losses) == (JobState.QUEUED, attempt, 1)
        kept = f"outside; its newest stored checkpoint is that of step {job.last_step}"
        assert kept in (job.queue_reason or "")
        place_again(services, job_id)


def test_a_supervisor_that_is_told_to_end_again_and_again_while_its_host_stays_fails_its_job_at_last(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = services.settings.model_copy(update={"max_losses": 2, "stop_grace_seconds": 0.2})
    monkeypatch.setattr(services, "settings", quick)
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    for _ in range(2):
        # Before it has taken a step.
        running = Running(services, job_id, fake_engine("--step-seconds", "60"))
        running.until(lambda job: job.state is JobState.RUNNING)
        running.orders.give(Wish.DRAIN)
        running.outcome()
        assert_nothing_left(services, job_id)
        job = job_of(services, job_id)
        if job.state is JobState.QUEUED:
            assert job.queue_reason is not None
            assert "(1 in a row without progress, of at most 2)" in job.queue_reason
            assert "its supervisor was told to stop by something outside; tries again" in job.queue_reason
            place_again(services, job_id)

    assert (job.state, job.attempt) == (JobState.FAILED, 2)
    assert job.error is not None
    assert job.error["code"] == "rank_lost"
    assert "(2 attempts in a row were lost)" in job.error["message"]
    assert "SIGTERM" in job.error["hint"]


def test_a_run_whose_time_is_up_fails_with_its_checkpoint_kept(services: Services) -> None:
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None, max_runtime=1.0)

    supervised(services, job_id, fake_engine("--step-seconds", "0.02"))

    job = job_of(services, job_id)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error["code"] == "max_runtime"
    assert checkpoints_of(services, job_id) == [job.last_step]


def test_a_run_whose_time_is_up_lines_up_again_where_its_spec_says_so(services: Services) -> None:
    job_id = place_job(services, steps=300, checkpoint_every=None, max_runtime=1.0)
    with services.db.session() as session:
        job = jobs.find(session, job_id)
        job.spec = job.spec | {"max_runtime": 1, "at_max_runtime": "requeue"}

    supervised(services, job_id, fake_engine("--step-seconds", "0.02"))

    job = job_of(services, job_id)
    assert (job.state, job.losses, job.error) == (JobState.QUEUED, 0, None)
    assert job.queued_at is not None
    assert messages_of(services, job_id)[-1] == "it ran for 1 seconds, its max_runtime, and lines up again"
    assert checkpoints_of(services, job_id) == [job.last_step]
    place_again(services, job_id)
    supervised(services, job_id, fake_engine("--step-seconds", "0"))
    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert steps_of(services, job_id) == list(range(1, 301))


@pytest.mark.parametrize("wish", [Wish.MAKE_WAY, Wish.PAUSE])
def test_where_storage_takes_no_checkpoint_a_run_that_stopped_has_saved_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch, wish: Wish
) -> None:
    def full(prefix: str, folder: os.PathLike[str]) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(services.storage, "put_tree", full)
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)
    if wish is Wish.PAUSE:
        with services.db.session() as session:
            jobs.move(session, job_id, JobState.PAUSING)
    running.orders.give(wish)
    running.outcome()

    job, said = job_of(services, job_id), messages_of(services, job_id)[-1]
    if wish is Wish.PAUSE:
        assert (job.state, job.losses) == (JobState.PAUSED, 0)
        assert said == f"paused after step {job.last_step}; no checkpoint is stored, and it will begin anew"
    else:
        assert (job.state, job.losses) == (JobState.QUEUED, 1)
        assert said == f"it stopped after step {job.last_step}, and no checkpoint since step 0 was stored"


def test_a_run_that_was_paused_just_before_its_time_is_up_is_paused(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its supervisor does not hear of it before the end: what counts is the row.
    follow = Attempt.follow

    def followed(attempt: Attempt, handle: Handle) -> Status:
        status = follow(attempt, handle)
        with services.db.session() as session:
            jobs.move(session, attempt.job.id, JobState.PAUSING)
        return status

    monkeypatch.setattr(Attempt, "follow", followed)
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None, max_runtime=2)

    supervised(services, job_id, fake_engine("--step-seconds", "0.02"))

    job = job_of(services, job_id)
    assert (job.state, job.error, checkpoints_of(services, job_id)) == (JobState.PAUSED, None, [job.last_step])


def test_a_run_that_makes_way_saves_and_is_told_why(services: Services) -> None:
    job_id = place_job(services, steps=FOREVER, checkpoint_every=None)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)

    with services.db.session() as session:
        jobs.make_way(session, job_id, reason="makes way for a job of higher priority")
    running.outcome()

    job = job_of(services, job_id)
    assert (job.state, job.losses, job.retry_at, job.makes_way) == (JobState.QUEUED, 0, None, False)
    assert messages_of(services, job_id)[-1] == "makes way for a job of higher priority"
    assert checkpoints_of(services, job_id) == [job.last_step]
    assert_nothing_left(services, job_id)


def test_a_failed_job_that_is_retried_goes_on_from_its_newest_checkpoint(services: Services) -> None:
    job_id = place_job(services, steps=300, checkpoint_every=None, max_runtime=1.0)
    supervised(services, job_id, fake_engine("--step-seconds", "0.02"))
    failed = job_of(services, job_id)
    assert failed.state is JobState.FAILED
    (saved,) = checkpoints_of(services, job_id)

    owner = Account(project_id=failed.project_id, key_id="", scopes=frozenset())
    with services.db.session() as session:
        assert jobs.retry(session, owner, job_id, settings=services.settings).error is None
    place_again(services, job_id)
    supervised(services, job_id, fake_engine("--step-seconds", "0"))

    job = job_of(services, job_id)
    assert (job.state, job.attempt, job.error) == (JobState.SUCCEEDED, 2, None)
    assert any(f"steps {saved + 1} to 300" in message for message in messages_of(services, job_id))
    assert steps_of(services, job_id) == list(range(1, 301))
    assert_nothing_left(services, job_id)


def test_a_supervisor_that_was_replaced_ends_its_ranks_and_writes_nothing(services: Services) -> None:
    job_id = place_job(services, steps=FOREVER)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 3)

    with services.db.session() as session:
        jobs.lose(session, job_id, fence=1, reason="as if it had been silent", max_losses=5)
        written = job_of(services, job_id).last_event
    outcome = running.outcome()

    assert outcome is not None
    assert outcome.action is Action.ABANDON
    job = job_of(services, job_id)
    assert job.state is JobState.QUEUED
    assert job.last_event == written + 1, "the loss itself, and nothing after it"
    left = [path.name for path in tidy.run_dir(services.settings, job_id, 1).iterdir()]
    assert left == ["logs"], "on a full disk nobody could write the row that lets others remove the rest"
    tidy.tidy_host(services)
    assert_nothing_left(services, job_id)


def test_a_job_whose_file_is_gone_fails_and_says_which(services: Services) -> None:
    job_id = place_job(services)
    file_id = job_of(services, job_id).spec["data"]["train"][0]
    services.storage.delete(f"files/{file_id}")

    supervised(services, job_id, fake_engine())

    job = job_of(services, job_id)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error["code"] == "invalid_data"
    assert file_id in job.error["message"]


def test_a_checkpoint_that_could_not_be_uploaded_is_a_warning_and_the_next_one_counts(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tree = services.storage.put_tree

    def full_at_first(prefix: str, folder: os.PathLike[str]) -> object:
        if prefix.endswith("step-00000005"):
            raise OSError(28, "No space left on device")
        return put_tree(prefix, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(services.storage, "put_tree", full_at_first)
    job_id = place_job(services, steps=10, checkpoint_every=5)

    supervised(services, job_id, fake_engine("--step-seconds", "0.05"))

    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert checkpoints_of(services, job_id) == [10]
    assert any("step 5 was not published: no space left" in message for message in messages_of(services, job_id))


def test_also_the_last_checkpoint_that_could_not_be_uploaded_is_told(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tree = services.storage.put_tree
    ended = Event()
    follow = Attempt.follow

    def full_after_the_end(prefix: str, folder: os.PathLike[str]) -> object:
        if "checkpoints" in prefix:
            assert ended.wait(DEADLINE_SECONDS)
            raise OSError(28, "No space left on device")
        return put_tree(prefix, folder)  # type: ignore[arg-type]

    def followed(attempt: Attempt, handle: Handle) -> Status:
        status = follow(attempt, handle)
        ended.set()
        return status

    monkeypatch.setattr(services.storage, "put_tree", full_after_the_end)
    monkeypatch.setattr(Attempt, "follow", followed)
    job_id = place_job(services, steps=5, checkpoint_every=5)

    supervised(services, job_id, fake_engine())

    assert job_of(services, job_id).state is JobState.SUCCEEDED
    assert any("step 5 was not published: no space left" in message for message in messages_of(services, job_id))


def test_an_event_that_no_database_takes_costs_an_attempt_and_not_for_ever(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*unused: object, **unused_too: object) -> int:
        raise DataError("insert", {}, Exception("there is no place for this"))

    monkeypatch.setattr(jobs, "record", refuses)
    job_id = place_job(services)

    outcome = supervised(services, job_id, fake_engine())

    assert outcome is not None
    assert outcome.action is Action.LOSE
    assert "no place for this" in outcome.reason
    assert_nothing_left(services, job_id)


def test_a_result_that_could_not_be_uploaded_is_a_lost_attempt_and_says_disk_full(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(prefix: str, folder: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(services.storage, "put_tree", full)
    job_id = place_job(services, steps=2, checkpoint_every=None, losses=4)

    supervised(services, job_id, fake_engine())

    job = job_of(services, job_id)
    assert job.state is JobState.FAILED, "it was the fifth loss in a row"
    assert job.error is not None
    assert job.error["code"] == "disk_full"


class Undying(LocalLauncher):
    """Its gangs are there for as long as somebody holds on to them, as a process is that the kernel keeps."""

    def __init__(self, launcher: LocalLauncher, held: Event) -> None:
        super().__init__(launcher._command)
        self.held = held

    def poll(self, handle: Handle) -> Status:
        return super().poll(handle) if self.held.is_set() else Status(ended=False)


def test_a_job_is_not_cancelled_before_the_last_process_is_gone_and_says_who_keeps_it(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.attempt.LINGER", timedelta(seconds=0.2))
    gone = Event()
    job_id = place_job(services, steps=FOREVER)
    running = Running(services, job_id, Undying(fake_engine("--ignore-term"), gone))
    running.until(lambda job: job.last_step > 3)
    with services.db.session() as session:
        jobs.move(session, job_id, JobState.CANCELLING)

    running.until(lambda job: any("still there" in message for message in messages_of(services, job_id)))
    assert job_of(services, job_id).state is JobState.CANCELLING
    with services.db.reading() as session:
        assert session.scalars(select(Slot).where(Slot.job_id == job_id)).all()

    gone.set()
    outcome = running.outcome()
    assert outcome is not None
    assert outcome.action is Action.CANCEL
    assert sum("still there" in message for message in messages_of(services, job_id)) == 1
    assert_nothing_left(services, job_id)


def test_a_storage_that_never_answers_costs_the_attempt_and_not_the_job(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.settings = services.settings.model_copy(update={"transfer_seconds": 0.1})
    never = Event()
    monkeypatch.setattr("workers.staging.stage", lambda *_, **__: never.wait())
    job_id = place_job(services)

    outcome = supervised(services, job_id, fake_engine())
    never.set()

    assert outcome is not None
    assert (outcome.action, outcome.error and outcome.error["code"]) == (Action.LOSE, "stalled")
    assert outcome.error is not None
    assert "longer than 0.1 s to bring its data" in outcome.error["message"]
    assert "TRAINSHED_TRANSFER_SECONDS" in outcome.error["hint"]
    assert job_of(services, job_id).state is JobState.QUEUED


def test_ranks_see_no_secret_of_ours(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "DATABASE_URL": "postgresql://u:hush@h/d", "TRAINSHED_REDIS_URL": "redis://:hush@h", "STORAGE_URL": "s3://hush",
        "AWS_SECRET_ACCESS_KEY": "hush", "TRAINSHED_ADMIN_KEY": "hush-hush-hush-hush", "HF_TOKEN": "hush",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    job_id = place_job(services, steps=FOREVER)
    running = Running(services, job_id, fake_engine("--step-seconds", "0.02"))
    running.until(lambda job: job.last_step > 0)

    run_dir = str(tidy.run_dir(services.settings, job_id, 1))
    seen = [
        process.environ()
        for process in psutil.process_iter(["cmdline"])
        if any(run_dir in word for word in process.info["cmdline"] or [])
    ]
    running.orders.give(Wish.DRAIN)
    running.outcome()

    assert len(seen) == 2, "the launch and its child"
    assert "hush" not in json.dumps(seen)
    assert all(environment["CUDA_VISIBLE_DEVICES"] == "" for environment in seen)
