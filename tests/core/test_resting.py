"""A host that does not start the jobs it is given gets none for a while."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from core import jobs, nodes, scheduler
from core.models import Node
from core.states import JobState
from tests import make

LEASE = timedelta(seconds=60)


def bounce(session: Session, *, starts_arrive: bool = True) -> Node:
    """A job is placed on the host, and nobody there claims it in time."""
    make.job(session, state=JobState.STARTING, holder=None, attempt=0, lease_expires_at=1.0)
    jobs.reclaim(session, max_losses=5, starts_arrive=lambda: starts_arrive)
    session.expire_all()
    return session.get_one(Node, "node-1")


def takes_jobs(session: Session) -> bool:
    return [node.name for node in nodes.alive(session)] == ["node-1"]


@pytest.mark.parametrize(("bounces", "minutes"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (6, 10), (600, 10)])
def test_one_bad_moment_is_borne_and_each_more_in_a_row_doubles_the_rest(bounces: int, minutes: int) -> None:
    assert nodes.rest_after(bounces) == 60 * minutes


def test_a_host_that_lets_two_jobs_in_a_row_lie_rests_and_says_so(session: Session) -> None:
    node = make.node(session)
    assert bounce(session).bounces == 1
    assert takes_jobs(session)
    node = bounce(session)
    assert node.rests_until == pytest.approx(node.heartbeat_at + 60, abs=30)
    assert not takes_jobs(session)
    assert [each.name for each in nodes.resting(session)] == ["node-1"]


def test_a_job_that_waits_for_a_host_that_rests_is_told_so_and_until_when(session: Session) -> None:
    node = make.node(session, num_slots=2)
    bounce(session)
    bounce(session)
    until = session.get_one(Node, node.name).rests_until
    assert until is not None
    waiting, large = make.job(session, slots=2), make.job(session, slots=3)
    scheduler.tick(session, depth=None)
    session.expire_all()
    at = time.strftime("%H:%M:%S", time.gmtime(until))
    why = f"node-1 rests until {at} UTC: the last jobs that were given there were not started; see what node"
    assert waiting.queue_reason is not None
    assert waiting.queue_reason.startswith(f"needs 2 slots; {why}")
    assert large.queue_reason == "needs 3 slots; the largest node that is online has 2"
    make.node(session, "node-2", num_slots=1)
    scheduler.tick(session, depth=None)
    session.expire_all()
    assert waiting.queue_reason.startswith(f"needs 2 slots; {why}"), "the one that takes jobs is too small"


def test_a_host_that_could_not_be_told_is_not_to_blame(session: Session) -> None:
    make.node(session)
    assert [bounce(session, starts_arrive=False).bounces for _ in range(3)] == [0, 0, 0]
    assert takes_jobs(session)


def test_a_claim_ends_the_row(session: Session) -> None:
    make.node(session)
    bounce(session)
    job = make.job(session, state=JobState.STARTING, holder=None, attempt=0)
    assert jobs.claim(session, job.id, "somebody", LEASE, node="node-1")
    assert bounce(session).bounces == 1


def test_a_host_that_was_started_again_gets_jobs_at_once(session: Session) -> None:
    make.node(session)
    bounce(session)
    bounce(session)
    make.node(session)
    assert takes_jobs(session)
