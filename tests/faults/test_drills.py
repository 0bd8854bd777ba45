"""What dies, and what the job makes of it: real processes, real signals, a real run of the engine."""

from __future__ import annotations

import signal

from core.states import JobState
from tests.stack import Stack, kill, lives

STEPS, EVERY = 200, 20
FOREVER = 1_000_000


def test_a_supervisor_that_stood_still_past_its_lease_finds_its_ranks_dead_and_writes_nothing(
    each_stack: Stack,
) -> None:
    stack = each_stack
    job_id = stack.submit(steps=FOREVER, checkpoint_every=EVERY)
    stack.until_step(job_id, 2 * EVERY)
    (frozen,) = stack.supervisors(job_id)
    first = stack.processes(job_id)

    stack.until(lambda: stack.freeze(frozen), "a moment without a write")
    stack.until(lambda: not any(lives(process) for process in first), "the ranks' own end", seconds=10)
    stack.until(lambda: stack.job(job_id).state is not JobState.RUNNING, "the loss")
    kill([frozen], signal.SIGCONT)
    stack.until(lambda: not lives(frozen), "the replaced supervisor's end", seconds=10)
    stack.until_step(job_id, 3 * EVERY, attempt=2)

    assert stack.attempts(job_id) == [1, 2], "nothing of the first attempt comes after the second began"
    assert stack.job(job_id).attempt == 2

    stack.cancel(job_id)
    stack.until_state(job_id, JobState.CANCELLED, seconds=5)
    assert not stack.processes(job_id)
    stack.assert_at_rest(job_id)


def test_pausing_frees_the_slots_and_a_host_that_goes_down_hands_its_run_on(stack: Stack) -> None:
    steps = 2 * STEPS
    job_id = stack.submit(steps=steps, checkpoint_every=steps)
    stack.until_step(job_id, EVERY)

    stack.pause(job_id)
    paused = stack.until_state(job_id, JobState.PAUSED)
    assert paused.last_step < steps
    stack.assert_at_rest(job_id)

    stack.resume(job_id)
    stack.until_step(job_id, paused.last_step + EVERY, attempt=2)
    assert stack.stop("node") == 0
    drained = stack.job(job_id)
    assert (drained.state, drained.losses) == (JobState.QUEUED, 0)
    stack.assert_at_rest(job_id)

    stack.start("node")
    stack.until_state(job_id, JobState.SUCCEEDED)
    assert stack.job(job_id).attempt == 3
    stack.assert_each_step_once(job_id, steps)
    stack.assert_at_rest(job_id)
