"""What is to be told is written with what it tells, and is sent at least once, by one sender at a time."""

from __future__ import annotations

import json
from contextlib import suppress

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core import jobs, outbox
from core.db import Database
from core.models import WebhookDelivery, WebhookEndpoint, database_now
from core.outbox import Errand
from core.states import JobState
from tests import make


def messages(session: Session) -> list[WebhookDelivery]:
    return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.type)))


def test_the_end_of_a_job_is_told_to_those_of_its_project_who_want_to_know(session: Session) -> None:
    make.node(session)
    everything = make.webhook(session)
    make.webhook(session, event_types=["job.failed"])
    make.webhook(session, project_id=make.project(session).id)
    job = make.job(session, state=JobState.RUNNING, labels={"team": "a"}, base_model="tiny")
    jobs.move(session, job.id, JobState.SUCCEEDED, fence=1, result_model="mine")
    openai, ours = messages(session)
    assert {openai.endpoint_id, ours.endpoint_id} == {everything.id}
    told = json.loads(openai.body)
    assert (told["type"], told["object"], told["data"]) == ("fine_tuning.job.succeeded", "event", {"id": job.id})
    assert json.loads(ours.body)["data"] == {
        "id": job.id, "kind": "pretrain", "name": None, "labels": {"team": "a"}, "state": "succeeded", "model": "mine",
        "error_code": None,
    }  # fmt: skip


def test_a_job_from_scratch_is_no_fine_tune(session: Session) -> None:
    make.webhook(session)
    jobs.move(session, make.job(session).id, JobState.CANCELLED)
    assert [message.type for message in messages(session)] == ["job.cancelled"]


def test_a_step_on_the_way_is_not_told(session: Session) -> None:
    make.node(session)
    make.webhook(session)
    job = make.job(session, state=JobState.RUNNING)
    jobs.move(session, job.id, JobState.PAUSING, fence=1)
    assert messages(session) == []


class PowerCutError(Exception):
    pass


def test_what_did_not_become_true_is_not_told(database: Database) -> None:
    with database.session() as session:
        make.webhook(session)
        job = make.job(session)

    with suppress(PowerCutError), database.session() as session:
        jobs.move(session, job.id, JobState.CANCELLED)
        assert len(messages(session)) == 1
        raise PowerCutError
    with database.reading() as session:
        assert messages(session) == []


def one_message(database: Database) -> str:
    with database.session() as session:
        endpoint = make.webhook(session, event_types=["job.cancelled"])
        jobs.move(session, make.job(session).id, JobState.CANCELLED)
        return session.scalars(select(WebhookDelivery.id).where(WebhookDelivery.endpoint_id == endpoint.id)).one()


def take(database: Database, *busy: str) -> list[Errand]:
    with database.session() as session:
        return outbox.take(session, busy=busy, most=10)


def come_due(database: Database) -> None:
    with database.session() as session:
        due = update(WebhookDelivery).where(WebhookDelivery.due_at.is_not(None))
        session.execute(due.values(due_at=database_now() - 1))
        held = update(WebhookEndpoint).where(WebhookEndpoint.held_until.is_not(None))
        session.execute(held.values(held_until=database_now() - 1))


def test_a_message_is_one_senders_until_that_has_been_silent_for_too_long(database: Database) -> None:
    message = one_message(database)
    (first,) = take(database)
    assert take(database) == []
    come_due(database)
    assert take(database, first.endpoint.id) == []
    (second,) = take(database)
    assert [(errand.id, errand.attempt) for errand in (first, second)] == [(message, 1), (message, 2)]
    with database.session() as session:
        # The first comes back after all, and has nothing to say any more.
        outbox.failed(session, first, "late", for_good=True)
        outbox.delivered(session, second)
    with database.reading() as session:
        row = session.get_one(WebhookDelivery, message)
        assert (row.due_at, row.last_error) == (None, None)
        assert row.delivered_at is not None


def test_two_senders_take_an_endpoints_messages_one_after_the_other_in_order(database: Database) -> None:
    with database.session() as session:
        endpoint = make.webhook(session, event_types=["job.cancelled"])
    ended = []
    for _ in range(3):
        with database.session() as session:
            ended.append(jobs.move(session, make.job(session).id, JobState.CANCELLED).id)
    told = []
    for _ in ended:
        (errand,) = take(database)
        # The other sender knows nothing of what this one is busy with.
        assert take(database) == []
        assert errand.endpoint.id == endpoint.id
        told.append(json.loads(errand.body)["data"]["id"])
        with database.session() as session:
            outbox.delivered(session, errand)
    assert told == ended
    assert take(database) == []


def test_a_message_that_was_not_taken_is_overtaken_and_tells_by_its_time_which_is_the_later(database: Database) -> None:
    with database.session() as session:
        make.webhook(session, event_types=["job.cancelled"])
        job = make.job(session)
        jobs.move(session, job.id, JobState.CANCELLED)
    (first,) = take(database)
    with database.session() as session:
        assert outbox.failed(session, first, "it answered 500")
    with database.session() as session:
        jobs.move(session, job.id, JobState.QUEUED)
        jobs.move(session, job.id, JobState.CANCELLED)
    (later,) = take(database)
    with database.session() as session:
        outbox.delivered(session, later)
    come_due(database)
    (late,) = take(database)
    assert (late.id, late.body) == (first.id, first.body)
    told = [json.loads(errand.body) for errand in (late, later)]
    assert [each["data"]["id"] for each in told] == [job.id] * 2
    assert told[0]["created_at"] <= told[1]["created_at"]


def test_a_sender_that_comes_back_late_does_not_let_a_third_in_beside_the_second(database: Database) -> None:
    one_message(database)
    (first,) = take(database)
    with database.session() as session:
        jobs.move(session, make.job(session).id, JobState.CANCELLED)
    come_due(database)
    (second,) = take(database)
    assert second.endpoint.id == first.endpoint.id
    with database.session() as session:
        outbox.failed(session, first, "late")
    assert take(database) == []


def test_a_message_is_sent_again_after_growing_waits_for_three_days_and_no_longer(database: Database) -> None:
    message = one_message(database)
    for _ in outbox.WAITS:
        (errand,) = take(database)
        with database.session() as session:
            assert outbox.failed(session, errand, "it answered 500")
        assert take(database) == []
        come_due(database)
    (errand,) = take(database)
    with database.session() as session:
        assert not outbox.failed(session, errand, "it answered 500")
    come_due(database)
    assert take(database) == []
    with database.reading() as session:
        row = session.get_one(WebhookDelivery, message)
        assert (row.due_at, row.delivered_at, row.last_error) == (None, None, "it answered 500")
    waits = [outbox.wait_after(attempt, 0.0) for attempt in range(1, len(outbox.WAITS) + 1)]
    assert waits == sorted(waits)
    assert 72 * 3600 < sum(waits) < 80 * 3600


def test_one_endpoint_with_much_to_hear_keeps_no_other_waiting(database: Database) -> None:
    with database.session() as session:
        busy = make.webhook(session, event_types=["job.cancelled"])
        for _ in range(5):
            jobs.move(session, make.job(session).id, JobState.CANCELLED)
    other = one_message(database)
    errands = take(database)
    # That endpoint heard of the last job too, but each is told one at a time.
    assert len(errands) == 2
    assert {errand.endpoint.id for errand in errands} > {busy.id}
    assert other in {errand.id for errand in errands}


def test_one_project_with_much_to_say_leaves_places_to_the_others(database: Database) -> None:
    with database.session() as session:
        many = [make.webhook(session, event_types=["job.cancelled"]) for _ in range(10)]
        jobs.move(session, make.job(session).id, JobState.CANCELLED)
        theirs = make.project(session)
        other = make.webhook(session, project_id=theirs.id, event_types=["job.cancelled"])
        jobs.move(session, make.job(session, project_id=theirs.id).id, JobState.CANCELLED)
    reached = {errand.endpoint.id for errand in take(database)}
    assert len(reached & {endpoint.id for endpoint in many}) == outbox.MOST_OF_A_PROJECT
    assert other.id in reached
    come_due(database)
    # What is under way counts as well.
    assert not {errand.endpoint.id for errand in take(database, *reached)} & {endpoint.id for endpoint in many}


def test_what_became_of_a_message_is_kept_for_a_week(database: Database) -> None:
    old, waiting = one_message(database), one_message(database)
    with database.session() as session:
        long_ago = database_now() - outbox.KEPT_SECONDS - 1
        session.execute(update(WebhookDelivery).values(created_at=long_ago))
        session.execute(update(WebhookDelivery).where(WebhookDelivery.id == old).values(due_at=None))
        outbox.forget(session)
    with database.reading() as session:
        left = {message.id for message in messages(session)}
    assert old not in left
    assert waiting in left
