"""Two actors at once, in threads, on a real database: one wins, nothing is doubled, no number is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import TypeVar

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core import events, files, jobs, keys, metrics, plans, projects, scheduler, visits, webhooks
from core.db import SCHEDULING, Database
from core.errors import InvalidMove, InvalidRequest, InvalidSpec, NotFound
from core.keys import Account
from core.models import ApiKey, Job, JobEvent, Model, Slot, Visit, WebhookDelivery
from core.settings import Settings
from core.spec import LayoutAsk
from core.states import JobState
from core.storage import Storage
from core.tries import Try
from tests import make
from tests.core.test_catalog import CONFIG, folder
from tests.fakes.hints import Heard

S = JobState
T = TypeVar("T")
LEASE = timedelta(seconds=60)


def at_once(database: Database, *actors: Callable[[Session], T]) -> list[T | BaseException]:
    """What each actor, in a thread and a transaction of its own, returned or raised."""
    barrier = Barrier(len(actors), timeout=30)

    def act(actor: Callable[[Session], T]) -> T:
        barrier.wait()
        with database.session() as session:
            return actor(session)

    with ThreadPoolExecutor(len(actors)) as pool:
        running = [pool.submit(act, actor) for actor in actors]
        return [future.exception(timeout=60) or future.result() for future in running]


def test_of_browsers_that_sign_in_at_once_with_one_key_as_many_are_kept_as_may_be(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "MOST_OF_A_KEY", 2)
    with database.session() as session:
        key, secret = keys.create(session, make.project(session).id, name="k", scopes=["read"])
        owner = keys.authenticate(session, secret)

    def sign_in(session: Session) -> str:
        # So often that all transactions are open at once.
        for _ in range(4):
            visits.begin(session, owner)
        return visits.begin(session, owner)[0].id

    begun = at_once(database, *[sign_in] * 6)
    with database.reading() as session:
        left = set(session.scalars(select(Visit.id).where(Visit.key_id == key.id)))
    assert [type(one) for one in begun] == [str] * 6
    assert len(left) == 2


def test_of_five_deliveries_one_claims(database: Database) -> None:
    with database.session() as session:
        job_id = make.job(session, state=S.STARTING, holder=None, attempt=0).id
    claims = at_once(
        database,
        *(
            lambda session, number=number: jobs.claim(session, job_id, f"supervisor-{number}", LEASE, node="node-1")
            for number in range(5)
        ),
    )
    assert sum(claim is not None for claim in claims) == 1
    with database.reading() as session:
        assert jobs.find(session, job_id).attempt == 1


def test_recording_and_moving_at_once_leaves_no_hole_in_the_history(database: Database, owner: Account) -> None:
    with database.session() as session:
        job_id = make.job(session, state=S.RUNNING).id

    def tell(number: int) -> Callable[[Session], object]:
        return lambda session: jobs.record(session, job_id, fence=1, events=[make.step(number), make.step(number + 1)])

    outcomes = at_once(
        database, *(tell(number) for number in range(1, 12, 2)), lambda session: jobs.cancel(session, owner, job_id)
    )
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    with database.reading() as session:
        history = events.since(session, job_id, 0)
        job = jobs.find(session, job_id)
        assert [event.seq for event in history] == list(range(1, len(history) + 1))
        assert job.last_event == len(history)
        told = [event.data["step"] for event in history if event.type == "step"]
        assert len(told) == len(set(told)) == len(metrics.series(session, job_id)["loss"])


def test_of_a_cancel_and_a_success_exactly_one_comes_true(database: Database, owner: Account) -> None:
    for _ in range(5):
        with database.session() as session:
            job_id = make.job(session, state=S.RUNNING).id
        cancelled, succeeded = at_once(
            database,
            lambda session, job_id=job_id: jobs.cancel(session, owner, job_id),
            lambda session, job_id=job_id: jobs.move(session, job_id, S.SUCCEEDED, fence=1),
        )
        assert isinstance(cancelled, InvalidMove) != isinstance(succeeded, InvalidMove)


def test_of_a_cancel_and_a_claim_no_process_is_forgotten(database: Database, owner: Account) -> None:
    for _ in range(5):
        with database.session() as session:
            job_id = make.job(session, state=S.STARTING, holder=None).id
        cancelled, claimed = at_once(
            database,
            lambda session, job_id=job_id: jobs.cancel(session, owner, job_id).state,
            lambda session, job_id=job_id: jobs.claim(session, job_id, "supervisor-1", LEASE, node="node-1"),
        )
        # Either it was never claimed, or the one who claimed it has been told.
        assert (cancelled, claimed is None) in {(S.CANCELLED, True), (S.CANCELLING, False)}


def test_a_renewal_and_a_reclaim_never_both_have_the_job(database: Database) -> None:
    for _ in range(5):
        with database.session() as session:
            job_id = make.job(session, state=S.RUNNING, lease_expires_at=0.0).id
        renewed, reclaimed = at_once(
            database,
            lambda session, job_id=job_id: jobs.renew(session, job_id, fence=1, lease=LEASE),
            lambda session: jobs.reclaim(session, max_losses=5),
        )
        assert isinstance(reclaimed, list)
        # The reclaim may step back too, when it found the row locked; but never do both have it.
        assert not (renewed is not None and reclaimed)


def test_ticks_at_once_give_each_slot_to_one_job(database: Database, hints: Heard) -> None:
    with database.session() as session:
        make.node(session, num_slots=3)
        for _ in range(5):
            make.job(session)
    placed = at_once(database, *([scheduler.tick] * 4))
    placements = [placement for tick in placed if isinstance(tick, list) for placement in tick]
    assert len(placements) == 3
    assert sorted(slot for placement in placements for slot in placement.slots) == [0, 1, 2]
    with database.reading() as session:
        held = session.scalars(select(Slot.job_id)).all()
        assert sorted(filter(None, held)) == sorted(placement.job_id for placement in placements)
    assert sorted(job_id for job_id, _ in hints.starts) == sorted(placement.job_id for placement in placements)


@pytest.mark.parametrize("key", ["same-key", None], ids=["by key", "by retry"])
def test_creates_at_once_that_are_the_same_make_one_job(
    database: Database, owner: Account, settings: Settings, key: str | None
) -> None:
    with database.session() as session:
        make.file(session)

    def submit(retried: bool) -> Callable[[Session], str]:
        return lambda session: (
            make.submitted(
                session,
                owner,
                make.spec(),
                settings=settings,
                this=Try.of(owner, b"the body", idempotency_key=key, number=int(retried)),
            ).id
        )

    if key is None:
        first = at_once(database, submit(False))
        made = [*first, *at_once(database, *[submit(True)] * 3)]
    else:
        made = at_once(database, *[submit(False)] * 4)
    assert len(set(made)) == 1
    with database.reading() as session:
        assert len(session.scalars(select(Job)).all()) == 1
        assert len(session.scalars(select(JobEvent)).all()) == 1


def test_jobs_that_want_a_new_base_at_once_both_get_it(database: Database, owner: Account, settings: Settings) -> None:
    folder(settings.models)
    with database.session() as session:
        make.file(session)
    spec = make.spec(kind="finetune", model={"base": "tiny"}, method={"type": "full"}, data={"train": [make.FILE_ID]})
    made = at_once(database, *[lambda session: make.submitted(session, owner, spec, settings=settings).base_model] * 3)
    assert made == ["tiny"] * 3


def test_jobs_that_find_a_base_replaced_at_once_both_start_from_it(
    database: Database, owner: Account, settings: Settings
) -> None:
    base = folder(settings.models)
    with database.session() as session:
        make.file(session)
    spec = make.spec(kind="finetune", model={"base": "tiny"}, method={"type": "full"}, data={"train": [make.FILE_ID]})

    def submit(session: Session) -> int:
        with database.reading() as reading:
            job = make.submitted(session, owner, spec, settings=settings, reading=reading)
        return int(job.run_config["data"]["seq_len"])

    assert at_once(database, *[submit] * 2) == [64] * 2
    for longest in (48, 32, 40):
        (base / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": longest}))
        # Each has read the new shape, and would share the row before it writes that, if it did not know it will.
        assert at_once(database, *[submit] * 4) == [longest] * 4
        with database.reading() as session:
            assert session.scalars(select(Model)).one().shape["max_seq_len"] == longest


def test_what_is_refused_is_refused_without_waiting_for_a_writer(
    database: Database, owner: Account, settings: Settings
) -> None:
    with database.session() as session:
        make.file(session)
    spec = make.spec(parallel={"tensor": 3})
    # A wait for what this thread itself holds would never end well.
    with database.session() as writer:
        writer.execute(select(Job).with_for_update())
        with database.session() as session, database.reading() as reading, pytest.raises(InvalidSpec):
            make.submitted(session, owner, spec, settings=settings, reading=reading)
        with database.reading() as reading:
            assert plans.plan(reading, owner, make.spec(), settings=settings).resolution.slots == 1


def test_what_a_job_needs_is_looked_up_without_waiting_for_a_writer(
    database: Database, owner: Account, settings: Settings
) -> None:
    with database.session() as session:
        paused, failed = make.job(session, state=S.PAUSED).id, make.job(session, state=S.FAILED).id
    layout = LayoutAsk.model_validate({"parallel": {"tensor": 3}})
    with database.session() as writer:
        writer.execute(select(Job).with_for_update())
        with database.session() as session, database.reading() as reading, pytest.raises(NotFound, match=make.FILE_ID):
            jobs.resume(session, owner, paused, layout, settings=settings, reading=reading)
        with database.session() as session, database.reading() as reading, pytest.raises(InvalidMove, match="retried"):
            jobs.retry(session, owner, failed, settings=settings, reading=reading)


def test_a_layout_that_was_worked_out_for_another_run_is_not_taken(
    database: Database, owner: Account, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.session() as session:
        make.file(session)
        job_id = make.submitted(session, owner, make.spec(), settings=settings).id
        jobs.pause(session, owner, job_id)
    active = projects.active

    def late(session: Session, owner: Account, project_id: str) -> projects.Limits:
        # After the look, before the lock: another request has resumed it in a layout, and paused it.
        monkeypatch.undo()
        job = jobs.find(session, job_id)
        job.run_config = job.run_config | {"recompute": {"operations": ["mlp"]}}
        session.flush()
        return active(session, owner, project_id)

    monkeypatch.setattr(projects, "active", late)
    layout = LayoutAsk.model_validate({"parallel": {"tensor": 2}})
    with database.session() as session, database.reading() as reading, pytest.raises(InvalidMove, match="same moment"):
        jobs.resume(session, owner, job_id, layout, settings=settings, reading=reading)


def test_archiving_a_project_while_its_jobs_are_resumed_ends_well(
    database: Database, owner: Account, settings: Settings
) -> None:
    other = replace(owner, project_id="proj-other", scopes=frozenset({"admin"}))
    with database.session() as session:
        make.project(session, "proj-other")
        paused = [make.job(session, state=S.PAUSED, project_id="proj-other").id for _ in range(4)]

    def archive(session: Session) -> None:
        projects.archive(session, owner, "proj-other")
        jobs.cancel_all(session, owner, "proj-other")

    resumes = [lambda session, job_id=job_id: jobs.resume(session, other, job_id).state for job_id in paused]
    archived, *others = at_once(database, archive, *resumes)
    assert archived is None
    assert all(one is S.QUEUED or isinstance(one, InvalidRequest) for one in others), others
    with database.reading() as session:
        assert {jobs.find(session, job_id).state for job_id in paused} == {S.CANCELLED}


@pytest.mark.parametrize("kind", ["postgresql"])
def test_pausing_what_is_spent_and_scheduling_take_turns(database: Database) -> None:
    key = func.hashtextextended(SCHEDULING, 0)
    with database.session() as session:
        jobs.pause_spent(session)
        with database.session() as scheduling:
            assert not scheduling.scalar(select(func.pg_try_advisory_xact_lock(key)))


def test_a_turn_to_write_is_given_back_however_a_transaction_ends(database: Database) -> None:
    def write(session: Session) -> None:
        make.job(session)
        raise KeyError

    assert [type(outcome) for outcome in at_once(database, *[write] * 6)] == [KeyError] * 6
    made = at_once(database, *[lambda session: make.job(session).id] * 6)
    with database.reading() as session:
        assert sorted(session.scalars(select(Job.id))) == sorted(made)


def test_processes_that_start_at_once_make_one_first_key(database: Database) -> None:
    with database.session() as session:
        session.query(ApiKey).delete()
    made = at_once(database, *[lambda session: keys.ensure_admin(session, None)] * 3)
    assert len([secret for secret in made if secret is not None]) == 1


def test_a_file_that_a_new_job_needs_is_not_deleted_under_it(
    database: Database, owner: Account, settings: Settings, storage: Storage
) -> None:
    for round_ in range(5):
        file_id = f"file-{round_:024x}"
        with database.session() as session:
            make.file(session, id=file_id)
            storage.put_bytes(f"files/{file_id}", b"text")
        spec = make.spec(data={"train": [file_id]})
        created, deleted = at_once(
            database,
            lambda session, spec=spec: make.submitted(session, owner, spec, settings=settings).id,
            lambda session, file_id=file_id: files.delete(session, storage, owner, file_id),
        )
        assert isinstance(created, str) != (deleted is None)
        assert storage.exists(f"files/{file_id}") == isinstance(created, str)


def test_a_job_ends_whether_or_not_a_webhook_endpoint_is_deleted_at_that_moment(
    database: Database, owner: Account
) -> None:
    with database.session() as session:
        endpoint = make.webhook(session).id
        job_id = make.job(session).id
    ended, gone = at_once(
        database,
        lambda session: jobs.cancel(session, owner, job_id).state,
        lambda session: webhooks.delete(session, owner, endpoint),
    )
    assert (ended, gone) == (S.CANCELLED, None)
    with database.reading() as session:
        assert session.scalars(select(WebhookDelivery.id)).all() == []
