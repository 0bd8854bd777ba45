"""A job's moves: which are allowed, to whom, and what else they change."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.orm import Session

from core import admission, events, files, jobs, nodes, scheduler
from core.db import Database
from core.errors import InUse, InvalidMove, InvalidRequest, InvalidSpec, NotFound
from core.failures import failure
from core.keys import Account
from core.models import Job, Project, Slot
from core.settings import Settings
from core.spec import MOST_LABELS, JobChange, LayoutAsk
from core.states import HELD, MOVES, TERMINAL, UNDER_WAY, JobState
from core.storage import Storage
from core.tries import BELATED, RETRY_WINDOW, Try
from tests import make
from tests.fakes.hints import Heard

S = JobState
LEASE = timedelta(seconds=60)


def history(session: Session, job_id: str) -> list[tuple[int, str]]:
    return [(event.seq, event.message) for event in events.since(session, job_id, 0)]


def held_slots(session: Session) -> list[str | None]:
    return [slot.job_id for slot in session.scalars(select(Slot).order_by(Slot.node, Slot.index))]


# Asking


def test_a_new_job_knows_its_place_without_another_look(session: Session, owner: Account, settings: Settings) -> None:
    make.file(session)
    make.job(session, state=S.RUNNING)
    make.job(session, priority=5)
    for priority, ahead in ((0, 1), (0, 2), (5, 1), (9, 0), (-1, 5)):
        made = jobs.submit(session, owner, make.spec(priority=priority), settings=settings)
        assert made.ahead == ahead
        assert scheduler.prospect(session, made.job, ahead=made.ahead) == scheduler.prospect(session, made.job)


def test_what_is_missing_is_told_though_all_is_looked_at_together(session: Session, owner: Account) -> None:
    make.file(session)
    other = make.spec(data={"train": [make.FILE_ID], "validation": "file-gone"})
    with pytest.raises(NotFound, match="file-gone") as caught:
        admission.admit(session, owner, other, Try())
    assert caught.value.param == "data.validation"
    session.get_one(Project, owner.project_id).archived_at = 1.0
    session.flush()
    with pytest.raises(InvalidRequest, match="archived"):
        admission.admit(session, owner, make.spec(), Try())


def test_a_create_takes_six_statements(database: Database, owner: Account, settings: Settings) -> None:
    with database.session() as session:
        make.file(session)
    asked: list[str] = []

    def hear(_connection: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        asked.append(sql.split()[0])

    with database.session() as session, database.reading() as reading:
        event.listen(session.connection(), "before_cursor_execute", hear)
        event.listen(reading.connection(), "before_cursor_execute", hear)
        this = Try.of(owner, b"its body")
        made = jobs.submit(session, owner, make.spec(), settings=settings, reading=reading, this=this)
        scheduler.prospect(session, made.job, ahead=made.ahead)
    # Its file and the hosts; what it stands on; itself, its first event and the entry of the audit log.
    locks = [] if database.has_one_writer else ["SELECT"]
    assert asked == ["SELECT", "SELECT", *locks, "SELECT", "INSERT", "INSERT", "INSERT"]


# Moving


@pytest.mark.parametrize("to", list(S))
@pytest.mark.parametrize("state", list(S))
def test_a_job_moves_along_the_table_and_nowhere_else(session: Session, state: S, to: S) -> None:
    job = make.job(session, state=state)
    if to in MOVES[state]:
        assert jobs.move(session, job.id, to).state is to
        assert [seq for seq, _ in history(session, job.id)] == [1, 2]
    else:
        with pytest.raises(InvalidMove, match=to):
            jobs.move(session, job.id, to)
        assert jobs.find(session, job.id).state is state
        assert [seq for seq, _ in history(session, job.id)] == [1]


def test_a_move_of_a_job_that_is_not_there_is_not_found(session: Session) -> None:
    with pytest.raises(NotFound):
        jobs.move(session, "job-nobody", S.CANCELLED)


def test_a_worker_that_lost_its_lease_cannot_finish_the_job(session: Session) -> None:
    job = make.job(session, state=S.RUNNING, attempt=2)
    with pytest.raises(InvalidMove, match="replaced"):
        jobs.move(session, job.id, S.SUCCEEDED, fence=1)
    assert jobs.move(session, job.id, S.SUCCEEDED, fence=2).state is S.SUCCEEDED


def test_between_a_loss_and_the_next_claim_the_old_number_opens_nothing(session: Session) -> None:
    job = make.job(session, state=S.STARTING, attempt=3, holder=None)
    with pytest.raises(InvalidMove):
        jobs.move(session, job.id, S.FAILED, fence=3)
    assert jobs.renew(session, job.id, fence=3, lease=LEASE) is None
    with pytest.raises(InvalidMove):
        jobs.record(session, job.id, fence=3, events=[make.step(1)])


@pytest.mark.parametrize(("state", "to"), [(state, to) for state in sorted(HELD) for to in sorted(MOVES[state] - HELD)])
def test_a_job_that_is_held_no_more_gives_everything_back(session: Session, state: S, to: S) -> None:
    make.node(session, num_slots=2)
    job = make.job(session, state=state, slots=2)
    assert held_slots(session) == [job.id, job.id]
    moved = jobs.move(session, job.id, to)
    assert held_slots(session) == [None, None]
    assert (moved.node, moved.holder, moved.lease_expires_at) == (None, None, None)
    assert (moved.finished_at is not None) == (to in TERMINAL)


def test_a_failure_is_kept_and_told(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    error = failure("out_of_memory", "rank 1 ran out of memory", rank=1)
    moved = jobs.move(session, job.id, S.FAILED, fence=1, error=error)
    assert moved.error == error
    assert "micro_batch" in error["hint"]
    last = events.since(session, job.id, 1)[0]
    assert (last.level, last.message, last.data["error"]) == ("error", "rank 1 ran out of memory", error)


def test_what_is_new_is_said_only_after_the_commit(database: Database, hints: Heard, owner: Account) -> None:
    with database.session() as session:
        job = make.job(session)
        jobs.cancel(session, owner, job.id)
        assert (hints.nudges, hints.rings) == (0, [])
    assert (hints.nudges, hints.rings) == (1, [job.id])


def test_nothing_is_said_about_what_was_rolled_back(database: Database, hints: Heard, owner: Account) -> None:
    with database.session() as session:
        job = make.job(session)

    def change_our_mind() -> None:
        with database.session() as session:
            jobs.cancel(session, owner, job.id)
            raise KeyError

    with pytest.raises(KeyError):
        change_our_mind()
    assert (hints.nudges, hints.rings) == (0, [])


# Wishing


@pytest.mark.parametrize(
    ("state", "holder", "becomes"),
    [
        (S.QUEUED, None, S.CANCELLED),
        (S.PAUSED, None, S.CANCELLED),
        (S.STARTING, None, S.CANCELLED),
        (S.STARTING, "supervisor-1", S.CANCELLING),
        (S.RUNNING, "supervisor-1", S.CANCELLING),
        (S.PAUSING, "supervisor-1", S.CANCELLING),
    ],
)
def test_a_cancel_waits_for_processes_where_there_are_some(
    session: Session, owner: Account, state: S, holder: str | None, becomes: S
) -> None:
    job = make.job(session, state=state, holder=holder)
    assert jobs.cancel(session, owner, job.id).state is becomes
    before = history(session, job.id)
    assert jobs.cancel(session, owner, job.id).state is becomes
    assert history(session, job.id) == before


def test_a_start_that_was_cancelled_before_its_claim_frees_its_slots(session: Session, owner: Account) -> None:
    make.node(session, num_slots=1)
    job = make.job(session, state=S.STARTING, holder=None)
    jobs.cancel(session, owner, job.id)
    assert held_slots(session) == [None]
    assert jobs.claim(session, job.id, "supervisor-1", LEASE, node="node-1") is None


@pytest.mark.parametrize("state", [S.SUCCEEDED, S.FAILED])
@pytest.mark.parametrize("wish", [jobs.cancel, jobs.pause, jobs.resume])
def test_a_job_that_has_ended_takes_no_wishes(session: Session, owner: Account, state: S, wish: object) -> None:
    job = make.job(session, state=state)
    with pytest.raises(InvalidMove, match=state):
        wish(session, owner, job.id)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("state", "holder", "becomes"),
    [
        (S.QUEUED, None, S.PAUSED),
        (S.STARTING, None, S.PAUSED),
        (S.STARTING, "supervisor-1", S.PAUSING),
        (S.RUNNING, "supervisor-1", S.PAUSING),
        (S.PAUSED, None, S.PAUSED),
    ],
)
def test_a_pause_waits_for_a_checkpoint_where_something_runs(
    session: Session, owner: Account, state: S, holder: str | None, becomes: S
) -> None:
    job = make.job(session, state=state, holder=holder)
    assert jobs.pause(session, owner, job.id).state is becomes
    assert jobs.pause(session, owner, job.id).state is becomes


def test_a_job_that_is_being_cancelled_cannot_be_paused(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.CANCELLING)
    with pytest.raises(InvalidMove, match="cancelling"):
        jobs.pause(session, owner, job.id)


def test_a_paused_job_is_queued_again_with_a_clean_record(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.PAUSED, losses=3, retry_at=2e9)
    resumed = jobs.resume(session, owner, job.id)
    assert (resumed.state, resumed.losses, resumed.retry_at) == (S.QUEUED, 0, None)
    assert jobs.resume(session, owner, job.id).state is S.QUEUED


def test_a_job_that_is_still_pausing_cannot_be_resumed(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.PAUSING)
    with pytest.raises(InvalidMove, match="pausing"):
        jobs.resume(session, owner, job.id)


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELLED])
def test_a_job_that_ended_without_a_result_is_retried_with_a_clean_record(
    session: Session, owner: Account, tmp_settings: Settings, state: S
) -> None:
    make.file(session)
    job = make.job(session, state=state, attempt=2, losses=5, error=failure("stalled", "rank 1 waits"), last_step=7)
    retried = jobs.retry(session, owner, job.id, settings=tmp_settings)
    assert (retried.state, retried.losses, retried.error, retried.finished_at) == (S.QUEUED, 0, None, None)
    # The next claim raises the attempt; steps that were recorded stay.
    assert (retried.attempt, retried.last_step) == (2, 7)
    assert history(session, job.id) == [(1, "queued"), (2, "retried")]
    assert jobs.retry(session, owner, job.id, settings=tmp_settings).state is S.QUEUED
    assert len(history(session, job.id)) == 2


@pytest.mark.parametrize("state", sorted(UNDER_WAY))
def test_a_retry_of_a_job_that_is_under_way_changes_nothing(
    session: Session, owner: Account, tmp_settings: Settings, state: S
) -> None:
    job = make.job(session, state=state)
    assert jobs.retry(session, owner, job.id, settings=tmp_settings).state is state
    assert len(history(session, job.id)) == 1


@pytest.mark.parametrize(
    ("state", "said"),
    [(S.SUCCEEDED, "succeeded"), (S.PAUSED, "resume it"), (S.PAUSING, "pausing"), (S.CANCELLING, "cancelling")],
)
def test_what_cannot_be_retried_says_why(
    session: Session, owner: Account, tmp_settings: Settings, state: S, said: str
) -> None:
    job = make.job(session, state=state)
    with pytest.raises(InvalidMove, match=said):
        jobs.retry(session, owner, job.id, settings=tmp_settings)


def test_a_job_whose_file_was_deleted_cannot_be_retried_and_names_it(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    job = make.job(session, state=S.FAILED, error=failure("stalled", "rank 1 waits"))
    with pytest.raises(InvalidMove, match=make.FILE_ID):
        jobs.retry(session, owner, job.id, settings=tmp_settings)
    found = jobs.find(session, job.id)
    assert (found.state, found.error and found.error["code"]) == (S.FAILED, "stalled")


def test_a_file_is_needed_again_once_its_job_is_retried(
    session: Session, owner: Account, tmp_settings: Settings, storage: Storage
) -> None:
    make.file(session)
    job = make.job(session, state=S.CANCELLED)
    jobs.retry(session, owner, job.id, settings=tmp_settings)
    with pytest.raises(InUse, match=job.id):
        files.delete(session, storage, owner, make.FILE_ID)


def change(**fields: Any) -> JobChange:
    return JobChange.model_validate(fields)


@pytest.mark.parametrize(
    ("wish", "becomes"),
    [
        pytest.param({"priority": 5}, ("a", {"team": "x", "n": "1"}, 5), id="the rest stays"),
        pytest.param({"labels": {"n": "2"}}, ("a", {"team": "x", "n": "2"}, 1), id="other labels stay"),
        pytest.param({"labels": {"n": None}}, ("a", {"team": "x"}, 1), id="null takes a label away"),
        pytest.param({"labels": None}, ("a", {}, 1), id="null takes all labels away"),
        pytest.param({"name": None, "priority": None}, (None, {"team": "x", "n": "1"}, 0), id="null is the default"),
    ],
)
def test_a_change_is_a_merge_patch_and_is_told(
    session: Session, owner: Account, wish: dict[str, Any], becomes: tuple[Any, ...]
) -> None:
    job = make.job(session, state=S.RUNNING, name="a", labels={"team": "x", "n": "1"}, priority=1)
    changed = jobs.change(session, owner, job.id, change(**wish))
    assert (changed.name, changed.labels, changed.priority) == becomes
    (told,) = events.since(session, job.id, 1)
    assert (told.seq, told.type, set(told.data)) == (2, "changed", set(wish))
    # The same once more changes nothing, and nothing is told.
    jobs.change(session, owner, job.id, change(**wish))
    assert jobs.find(session, job.id).last_event == 2


def test_a_change_says_from_what_to_what(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.QUEUED)
    jobs.change(session, owner, job.id, change(name="b", priority=2))
    (told,) = events.since(session, job.id, 1)
    assert told.data == {"name": {"from": None, "to": "b"}, "priority": {"from": 0, "to": 2}}
    assert told.message == 'name is now "b"; priority is now 2'


def test_the_queue_follows_a_priority_at_once(session: Session, owner: Account) -> None:
    first, second = (make.job(session, created_at=float(age)) for age in (1, 2))
    assert (scheduler.position(session, first), scheduler.position(session, second)) == (1, 2)
    jobs.change(session, owner, second.id, change(priority=1))
    assert (scheduler.position(session, first), scheduler.position(session, second)) == (2, 1)


def test_labels_stay_as_few_as_a_job_may_have(session: Session, owner: Account) -> None:
    job = make.job(session, labels={str(n): "" for n in range(MOST_LABELS)})
    with pytest.raises(InvalidSpec, match="at most 16"):
        jobs.change(session, owner, job.id, change(labels={"one": "more"}))
    assert jobs.change(session, owner, job.id, change(labels={"one": "more", "0": None})).labels["one"] == "more"


def retry(session: Session, owner: Account, job_id: str) -> Job:
    return jobs.retry(session, owner, job_id, settings=Settings())


def rename(session: Session, owner: Account, job_id: str) -> Job:
    return jobs.change(session, owner, job_id, change(name="b"))


@pytest.mark.parametrize("wish", [jobs.get, jobs.cancel, jobs.pause, jobs.resume, retry, rename])
def test_another_projects_job_looks_like_none(session: Session, owner: Account, wish: object) -> None:
    make.project(session, "proj-other")
    job = make.job(session, project_id="proj-other")
    with pytest.raises(NotFound) as theirs:
        wish(session, owner, job.id)  # type: ignore[operator]
    with pytest.raises(NotFound) as missing:
        wish(session, owner, "job-nobody")  # type: ignore[operator]
    assert theirs.value.message.replace(job.id, "") == missing.value.message.replace("job-nobody", "")


# Holding


def test_a_claim_raises_the_attempt_and_starts_a_lease(session: Session) -> None:
    job = make.job(session, state=S.STARTING, holder=None, attempt=1, engine_seq=7, lease_expires_at=0)
    claimed = jobs.claim(session, job.id, "supervisor-2", LEASE, node="node-1")
    assert claimed is not None
    assert (claimed.attempt, claimed.holder, claimed.state, claimed.engine_seq) == (2, "supervisor-2", S.STARTING, 0)
    assert jobs.expired(session) == []
    assert jobs.claim(session, job.id, "supervisor-3", LEASE, node="node-1") is None


def test_a_late_message_cannot_claim_a_job_that_was_placed_elsewhere(session: Session) -> None:
    job = make.job(session, state=S.STARTING, holder=None, node="node-2")
    assert jobs.claim(session, job.id, "supervisor-1", LEASE, node="node-1") is None


def test_a_job_whose_base_is_gone_when_its_first_host_takes_it_fails_and_says_so(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    made = make.submitted(session, owner, make.spec(), settings=tmp_settings)
    made.spec = made.spec | {"kind": "finetune", "model": {"base": "ftckpt-gone"}}
    make.node(session, device="cuda")
    jobs.place(session, made.id, "node-1", [0], claim_within=LEASE)
    claimed = jobs.claim(session, made.id, "supervisor-1", LEASE, node="node-1")
    assert claimed is not None
    failed = jobs.refit(session, claimed, settings=tmp_settings)
    assert failed.state is S.FAILED
    assert failed.error is not None
    assert failed.error["code"] == "invalid_model"
    assert "ftckpt-gone" in failed.error["message"]
    assert held_slots(session) == [None, None]


def test_an_archived_project_gets_no_job_however_late_its_key_was_checked(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    paused, failed = make.job(session, state=S.PAUSED), make.job(session, state=S.FAILED)
    session.get_one(Project, owner.project_id).archived_at = 1.0
    session.flush()
    for late in (
        lambda: make.submitted(session, owner, make.spec(), settings=tmp_settings),
        lambda: jobs.resume(session, owner, paused.id),
        lambda: jobs.retry(session, owner, failed.id, settings=tmp_settings),
    ):
        with pytest.raises(InvalidRequest, match="archived"):
            late()


@pytest.mark.parametrize(
    ("device", "becomes"), [("cuda", ("cuda", "bf16")), ("cpu", ("cpu", "fp32"))], ids=["on-gpus", "on-cpus"]
)
def test_a_job_made_before_any_host_was_there_fits_the_first_that_takes_it(
    session: Session, owner: Account, tmp_settings: Settings, device: str, becomes: tuple[str, str]
) -> None:
    make.file(session)
    made = make.submitted(session, owner, make.spec(), settings=tmp_settings)
    make.node(session, device=device)
    jobs.place(session, made.id, "node-1", [0], claim_within=LEASE)
    claimed = jobs.claim(session, made.id, "supervisor-1", LEASE, node="node-1")
    assert claimed is not None
    run = jobs.refit(session, claimed, settings=tmp_settings).run_config
    assert (run["device"], run["training"]["precision"]) == becomes


def test_another_layout_is_chosen_for_the_device_and_the_precision_that_a_job_began_with(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    job, two = (
        make.submitted(session, owner, make.spec(parallel={"tensor": tensor}), settings=tmp_settings)
        for tensor in (1, 2)
    )
    jobs.pause(session, owner, job.id)
    make.node(session, "gpus", device="cuda", num_slots=8, slot_peak_flops=1e15)
    made = make.submitted(session, owner, make.spec(parallel={"tensor": 2}), settings=tmp_settings)
    layout = LayoutAsk.model_validate({"parallel": {"tensor": 2}})
    resumed = jobs.resume(session, owner, job.id, layout, settings=tmp_settings)
    assert resumed.run_config | {"data": None} == two.run_config | {"data": None}
    assert resumed.plan == two.plan != made.plan


def test_a_job_that_has_had_an_attempt_keeps_its_numbers(session: Session, tmp_settings: Settings) -> None:
    make.node(session, device="cuda")
    job = make.job(session, state=S.STARTING, attempt=2)
    assert jobs.refit(session, job, settings=tmp_settings).run_config["device"] == "cpu"


def test_a_job_that_its_first_host_cannot_hold_fails_and_says_so(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    made = make.submitted(session, owner, make.spec(), settings=tmp_settings)
    make.node(session, device="cuda", slot_memory_bytes=1)
    jobs.place(session, made.id, "node-1", [0], claim_within=LEASE)
    claimed = jobs.claim(session, made.id, "supervisor-1", LEASE, node="node-1")
    assert claimed is not None
    failed = jobs.refit(session, claimed, settings=tmp_settings)
    assert failed.state is S.FAILED
    assert failed.error is not None
    assert failed.error["code"] == "out_of_memory"
    assert held_slots(session) == [None, None]


def test_a_renewal_tells_what_is_wished(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.RUNNING)
    jobs.cancel(session, owner, job.id)
    renewed = jobs.renew(session, job.id, fence=1, lease=LEASE)
    assert renewed is not None
    assert renewed.state is S.CANCELLING


@pytest.mark.parametrize(("state", "fence"), [(S.RUNNING, 1), (S.QUEUED, 2), (S.SUCCEEDED, 2)])
def test_a_lease_that_is_lost_cannot_be_renewed(session: Session, state: S, fence: int) -> None:
    job = make.job(session, state=state, attempt=2)
    assert jobs.renew(session, job.id, fence=fence, lease=LEASE) is None


def test_a_loss_queues_the_job_again_after_a_growing_while_and_then_fails_it(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    waits = []
    for attempt in range(1, 5):
        lost = jobs.lose(session, job.id, fence=attempt, reason="rank 0 died", max_losses=5)
        assert (lost.state, lost.losses) == (S.QUEUED, attempt)
        assert lost.retry_at is not None
        assert "rank 0 died" in (lost.queue_reason or "")
        waits.append(jobs.back_off(attempt))
        jobs.place(session, job.id, "node-1", [], claim_within=LEASE)
        jobs.claim(session, job.id, "supervisor", LEASE, node="node-1")
    assert waits == [1, 4, 16, 64]
    failed = jobs.lose(
        session, job.id, fence=5, reason="rank 0 died", max_losses=5, error=failure("rank_lost", "rank 0 died")
    )
    assert failed.state is S.FAILED
    assert failed.error is not None
    assert failed.error["code"] == "rank_lost"
    assert "5 attempts" in failed.error["message"]


def test_the_wait_after_a_loss_has_a_limit() -> None:
    assert jobs.back_off(50) == 300


@pytest.mark.parametrize(("state", "becomes"), [(S.CANCELLING, S.CANCELLED), (S.PAUSING, S.PAUSED)])
@pytest.mark.parametrize("how", ["lose", "requeue", "reclaim"])
def test_a_wish_comes_true_when_the_attempt_ends_otherwise(session: Session, state: S, becomes: S, how: str) -> None:
    job = make.job(session, state=state, lease_expires_at=0)
    if how == "lose":
        jobs.lose(session, job.id, fence=1, reason="rank 0 died", max_losses=1)
    elif how == "requeue":
        jobs.requeue(session, job.id, fence=1, reason="the host goes down")
    else:
        jobs.reclaim(session, max_losses=1)
    assert jobs.find(session, job.id).state is becomes


def test_a_drained_job_is_queued_without_a_loss_and_without_a_wait(session: Session) -> None:
    job = make.job(session, state=S.RUNNING, losses=2)
    requeued = jobs.requeue(session, job.id, fence=1, reason="node-1 goes down")
    assert (requeued.state, requeued.losses, requeued.retry_at) == (S.QUEUED, 2, None)


# Keeping up


def test_a_silent_holder_loses_its_job_and_a_living_one_does_not(session: Session) -> None:
    silent = make.job(session, state=S.RUNNING, lease_expires_at=1.0)
    living = make.job(session, state=S.RUNNING)
    # A clock that was set since one asked what time it is says nothing of leases.
    assert jobs.reclaim(session, max_losses=5, at=0.5) == []
    assert [job.id for job in jobs.reclaim(session, max_losses=5)] == [silent.id]
    assert jobs.find(session, silent.id).losses == 1
    assert jobs.find(session, living.id).state is S.RUNNING


def test_a_start_that_nobody_claims_goes_back_and_is_no_loss(session: Session) -> None:
    make.node(session, num_slots=1)
    job = make.job(session, state=S.STARTING, holder=None, lease_expires_at=1.0)
    assert [unclaimed.id for unclaimed in jobs.unclaimed(session)] == [job.id]
    jobs.reclaim(session, max_losses=1)
    back = jobs.find(session, job.id)
    assert (back.state, back.losses, back.retry_at) == (S.QUEUED, 0, None)
    assert held_slots(session) == [None]


def test_a_start_can_be_taken_back_until_it_is_claimed(session: Session) -> None:
    make.node(session, num_slots=2)
    placed, claimed = make.job(session, state=S.STARTING, holder=None), make.job(session, state=S.STARTING)
    unplaced = jobs.unplace(session, placed.id, reason="node-1 goes down")
    assert unplaced is not None
    assert (unplaced.state, unplaced.node, unplaced.losses) == (S.QUEUED, None, 0)
    assert jobs.unplace(session, claimed.id, reason="node-1 goes down") is None
    assert held_slots(session) == [None, claimed.id]


# Asking


def test_a_new_job_is_queued_with_what_was_asked_and_what_it_became(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    spec = make.spec(labels={"team": "red"}, max_runtime="90m", priority=3)
    job = make.submitted(session, owner, spec, settings=tmp_settings)
    assert (job.state, job.priority, job.max_runtime, job.slots) == (S.QUEUED, 3, 5400.0, 1)
    assert job.spec["model"] == {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "max_seq_len": 64,
    }
    assert job.run_config["training"]["steps"] == 10
    assert history(session, job.id) == [(1, "queued")]
    assert type(spec).model_validate(job.spec) == spec


def test_a_file_that_is_not_there_is_blamed_by_its_field(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    with pytest.raises(NotFound) as refusal:
        make.submitted(session, owner, make.spec(), settings=tmp_settings)
    assert refusal.value.param == "data.train.0"


def test_another_projects_file_looks_like_none(session: Session, owner: Account, tmp_settings: Settings) -> None:
    make.project(session, "proj-other")
    make.file(session, project_id="proj-other")
    with pytest.raises(NotFound):
        make.submitted(session, owner, make.spec(), settings=tmp_settings)


def test_a_spec_that_needs_more_than_the_largest_node_is_refused_with_what_would_work(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    make.node(session, num_slots=2)
    spec = make.spec(parallel={"tensor": 2, "data": 2})
    with pytest.raises(InvalidSpec, match="needs 4 slots; the largest node has 2"):
        make.submitted(session, owner, spec, settings=tmp_settings)


def test_the_same_idempotency_key_is_the_same_job(session: Session, owner: Account, tmp_settings: Settings) -> None:
    make.file(session)

    def create(name: str, body: bytes = b"a", *, by: Account = owner) -> Job:
        this = Try.of(by, body, idempotency_key=name)
        return make.submitted(session, by, make.spec(), settings=tmp_settings, this=this)

    first = create("k")
    assert create("k").id == first.id != create("l").id
    # The key that was used before may have been revoked meanwhile.
    rotated = Account(project_id=owner.project_id, key_id="key-after-it", scopes=owner.scopes)
    assert create("k", by=rotated).id == first.id
    with pytest.raises(InvalidSpec, match="another body"):
        create("k", b"b")
    # So it was kept before the name was the project's.
    first.request_digest = Try.of(owner, b"a").digest
    session.flush()
    assert create("k").id == first.id


def test_an_idempotency_key_belongs_to_its_project(session: Session, owner: Account, tmp_settings: Settings) -> None:
    make.file(session)
    make.project(session, "proj-other")
    make.file(session, id="file-theirs", project_id="proj-other")
    other = Account(project_id="proj-other", key_id="key-other", scopes=frozenset({"submit"}))
    ours = make.submitted(session, owner, make.spec(), settings=tmp_settings, this=Try(idempotency_key="k"))
    theirs = make.submitted(
        session, other, make.spec(data={"train": ["file-theirs"]}), settings=tmp_settings, this=Try(idempotency_key="k")
    )
    assert ours.id != theirs.id


def test_a_retried_create_is_the_same_job_and_an_identical_new_one_is_not(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)

    def create(number: int) -> Job:
        this = Try.of(owner, b"the body", number=number, came_at=monotonic())
        return make.submitted(session, owner, make.spec(), settings=tmp_settings, this=this)

    first = create(0)
    first.created_at -= 0.1
    session.flush()
    assert create(1).id == first.id != create(0).id


def test_a_first_try_that_its_own_retry_overtook_is_the_same_job_and_a_new_wish_is_not(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)

    def create(number: int, came_at: float) -> Job:
        this = Try.of(owner, b"the body", number=number, came_at=came_at)
        return make.submitted(session, owner, make.spec(), settings=tmp_settings, this=this)

    first_came = monotonic()
    made = create(1, monotonic())
    assert create(0, first_came).id == made.id
    # It has been here now: whoever asks again wants another, and two first tries at once are two wishes, however alike.
    both_came = monotonic()
    assert len({create(0, first_came).id, create(0, both_came).id, create(0, both_came).id, made.id}) == 4


def test_a_retry_is_owed_its_first_try_once_and_soon_and_while_its_job_lives(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)

    def create(number: int, body: bytes, **known: bool) -> Job:
        this = Try.of(owner, body, number=number, came_at=monotonic(), **known)
        return make.submitted(session, owner, make.spec(), settings=tmp_settings, this=this)

    def answered(body: bytes, *, seconds_ago: float = 1.0) -> Job:
        """What a second and a third try made, which the client has heard of."""
        job = create(1, body)
        assert create(2, body).id == job.id
        job.created_at -= seconds_ago
        session.flush()
        return job

    made = answered(b"held up")
    assert create(0, b"another").id != made.id
    assert create(0, b"held up").id == made.id
    assert create(0, b"held up").id != made.id
    late = answered(b"held up for long", seconds_ago=BELATED.total_seconds() + 1)
    assert create(0, b"held up for long").id != late.id
    # Its first try has been here: it is why the client waited.
    refused = answered(b"refused at first")
    assert create(0, b"refused at first", may_be_belated=False).id != refused.id
    ended = answered(b"ended")
    jobs.cancel(session, owner, ended.id)
    assert create(0, b"ended").id != ended.id


def test_a_retry_is_one_only_for_a_while_and_only_for_its_key(
    session: Session, owner: Account, tmp_settings: Settings
) -> None:
    make.file(session)
    this = Try.of(owner, b"the body", number=1)
    old = make.submitted(session, owner, make.spec(), settings=tmp_settings, this=this)
    old.created_at -= RETRY_WINDOW.total_seconds() + 1
    late = make.submitted(session, owner, make.spec(), settings=tmp_settings, this=this)
    assert late.id != old.id
    other_key = Account(project_id=owner.project_id, key_id="key-other", scopes=owner.scopes)
    assert Try.of(other_key, b"the body").digest != this.digest


# Looking


def test_pages_follow_one_another_newest_first_without_gap_or_repetition(session: Session, owner: Account) -> None:
    made = [make.job(session, created_at=float(age // 2)).id for age in range(7)]
    seen: list[str] = []
    after = None
    while True:
        page = jobs.page(session, owner, after=after, limit=3)
        seen += [job.id for job in page.data]
        if not page.has_more:
            break
        after = seen[-1]
    assert sorted(seen) == sorted(made)
    created = [jobs.find(session, job_id).created_at for job_id in seen]
    assert created == sorted(created, reverse=True)


def test_a_job_that_moves_on_between_two_pages_does_not_break_them(session: Session, owner: Account) -> None:
    old, middle, new = (make.job(session, created_at=float(age)) for age in range(3))
    page = jobs.page(session, owner, states=[S.QUEUED], limit=1)
    assert ([job.id for job in page.data], page.has_more) == ([new.id], True)
    jobs.cancel(session, owner, new.id)
    rest = jobs.page(session, owner, states=[S.QUEUED], after=new.id)
    assert [job.id for job in rest.data] == [middle.id, old.id]


def test_an_unknown_cursor_is_refused(session: Session, owner: Account) -> None:
    make.project(session, "proj-other")
    theirs = make.job(session, project_id="proj-other")
    for after in ("job-nobody", theirs.id):
        with pytest.raises(NotFound) as refusal:
            jobs.page(session, owner, after=after)
        assert refusal.value.param == "after"


def test_jobs_are_found_by_state_kind_and_labels(session: Session, owner: Account) -> None:
    red = make.job(session, labels={"team": "red", "run": "1"}, kind="finetune")
    blue = make.job(session, labels={"team": "blue"}, state=S.FAILED, name="b")

    def found(**filters: object) -> set[str]:
        return {job.id for job in jobs.page(session, owner, **filters).data}  # type: ignore[arg-type]

    assert found(labels={"team": "red"}) == found(kind="finetune") == {red.id}
    assert found(labels={"team": "red", "run": "2"}) == set()
    assert found(labels={'team"; drop': "x"}) == set()
    assert found(states=[S.FAILED]) == found(name="b") == {blue.id}
    assert found() == {red.id, blue.id}
    plain = make.job(session, base_model="tiny")
    assert found(unlabelled=True) == found(from_base=True) == {plain.id}


def test_of_many_jobs_those_of_a_project_are_told_apart(session: Session, owner: Account) -> None:
    make.project(session, "proj-other")
    ours, theirs = make.job(session), make.job(session, project_id="proj-other", state=S.PAUSED)
    assert jobs.owned(session, owner, {ours.id, theirs.id, "job-nobody"}) == {ours.id}


def test_a_state_comes_back_as_a_state(session: Session) -> None:
    job = make.job(session)
    session.expire_all()
    assert session.scalars(select(Job.state).where(Job.id == job.id)).one() is S.QUEUED
    assert nodes.listing(session) == []
