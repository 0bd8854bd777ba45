"""What the engine said, written down once: history, metrics, progress."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from core import events, jobs, metrics, plans
from core.errors import InvalidMove
from core.failures import of_event
from core.keys import Account
from core.models import Job
from core.states import JobState
from engine.events import (
    CheckpointSaved,
    Choices,
    Evaluated,
    Event,
    Failed,
    Finished,
    Log,
    Outlier,
    Outliers,
    Progress,
    Sample,
    Samples,
    Started,
)
from tests import make

S = JobState
LEASE = timedelta(minutes=1)


def started(seq: int, **fields: object) -> Started:
    values: dict[str, object] = {
        "seq": seq, "time": 1_700_000_000.0, "total_steps": 10, "start_step": 0, "ranks": 2, "parameters": 5000,
        "trainable_parameters": 5000, "train_rows": 8, "train_tokens": 256, "vocab_size": 260, "device": "cpu",
    }  # fmt: skip
    return Started.model_validate(values | fields)


def evaluated(seq: int, step: int, loss: float = 2.0) -> Evaluated:
    return Evaluated(seq=seq, time=1.0, step=step, loss=loss, token_accuracy=0.25, tokens=100)


def types(session: Session, job: Job) -> list[tuple[int, str]]:
    return [(event.seq, event.type) for event in events.since(session, job.id, 0)]


def test_the_first_event_of_training_makes_the_job_run(session: Session) -> None:
    job = make.job(session, state=S.STARTING, attempt=1)
    assert jobs.record(session, job.id, fence=1, events=[Progress(seq=1, phase="data", done=1, total=2, unit="files"),
                                                         started(2), make.step(3, step=1)]) == 4  # fmt: skip
    assert types(session, job) == [(1, "state"), (2, "progress"), (3, "state"), (4, "started"), (5, "step")]
    running = jobs.find(session, job.id)
    assert running.state is S.RUNNING
    assert running.started_at is not None


def test_a_job_that_is_told_to_end_before_it_started_does_not_run(session: Session, owner: Account) -> None:
    job = make.job(session, state=S.STARTING)
    jobs.cancel(session, owner, job.id)
    jobs.record(session, job.id, fence=1, events=[started(1)])
    assert jobs.find(session, job.id).state is S.CANCELLING


def test_each_number_of_a_step_becomes_a_metric_under_its_own_name(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    jobs.record(
        session, job.id, fence=1, events=[make.step(1, loss=2.5, mfu=0.5, memory_bytes=7), evaluated(2, 1, 3.5)]
    )
    # An engine that does not tell where the time went has no points of it.
    assert metrics.series(session, job.id) == {
        "grad_norm": [(1, 1.0)],
        "loss": [(1, 2.5)],
        "lr": [(1, 1e-3)],
        "memory_bytes": [(1, 7.0)],
        "mfu": [(1, 0.5)],
        "step_seconds": [(1, 0.1)],
        "tokens": [(1, 128.0)],
        "tokens_per_second": [(1, 1280.0)],
        "validation_loss": [(1, 3.5)],
        "validation_token_accuracy": [(1, 0.25)],
    }
    assert metrics.names(session, job.id) == sorted(metrics.series(session, job.id))


def test_what_pairs_of_answers_gained_becomes_metrics_of_steps_and_validations(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    names = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
    told = {name: float(number) for number, name in enumerate(names)}
    held_out = Evaluated(seq=2, time=1.0, step=1, loss=0.5, token_accuracy=0.25, tokens=100, **told)
    jobs.record(session, job.id, fence=1, events=[make.step(1, token_accuracy=0.5, **told), held_out])
    kept = metrics.series(session, job.id)
    assert kept["token_accuracy"] == [(1, 0.5)]
    for name, value in told.items():
        assert kept[name] == kept[f"validation_{name}"] == [(1, value)]


def test_documents_learned_worst_are_told_by_the_id_of_their_file(session: Session) -> None:
    first, second = make.FILE_ID, make.FILE_ID.replace("0", "f")
    spec = make.spec(data={"train": [first, second]})
    run = make.run_config(data={"train": ["data/train-0.txt", "data/train-1.txt"], "format": "text", "seq_len": 32})
    job = make.job(
        session,
        state=S.RUNNING,
        spec=spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        run_config=run.model_dump(mode="json"),
    )
    worst = Outlier(file="data/train-1.txt", line=7, loss=9.5, step=1, step_loss=2.0)
    told = Outliers(seq=2, time=1.0, step=1, since_step=1, documents=(worst,))
    jobs.record(session, job.id, fence=1, events=[make.step(1), told])
    last = events.since(session, job.id, 0)[-1]
    assert last.message == f"examples with the highest loss: {second} line 7 (9.50)"
    (document,) = last.data["documents"]
    assert document == {"file": second, "line": 7, "loss": 9.5, "step": 1, "step_loss": 2.0}


def test_answers_to_held_out_prompts_are_told_by_the_id_of_their_file(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    said = {"line": 7, "prompt": "2 + 2?", "text": "It is\n4.", "finish_reason": "stop", "expected": "4"}
    more = said | {"line": 9, "text": "é" * 61}
    samples = [Sample.model_validate(each | {"file": "data/train-0.txt"}) for each in (said, more, said)]
    told = Samples(seq=2, time=1.0, step=1, samples=tuple(samples))
    jobs.record(session, job.id, fence=1, events=[make.step(1), told])
    last = events.since(session, job.id, 0)[-1]
    first, second = f'{make.FILE_ID} line 7 with "It is 4."', f'{make.FILE_ID} line 9 with "{"é" * 60}…"'
    assert last.message == f"step 1: answers {first}, {second}, …"
    assert last.data["samples"] == [each | {"file": make.FILE_ID} for each in (said, more, said)]


def test_how_questions_were_answered_becomes_metrics_and_progress_once(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    asked = {"questions": 8, "correct": 6, "correct_normalized": 4, "accuracy": 0.75, "accuracy_normalized": 0.5}
    told = Choices(seq=2, time=1.0, step=1, left_out=2, **asked)
    again = told.model_copy(update={"seq": 3, "accuracy": 0.25})
    jobs.record(session, job.id, fence=1, events=[make.step(1), told, again])
    names = ["choice_accuracy", "choice_accuracy_normalized"]
    assert metrics.series(session, job.id, names=names) == {names[0]: [(1, 0.75)], names[1]: [(1, 0.5)]}
    progress = jobs.find(session, job.id).progress
    assert (progress["choice_accuracy"], progress["choice_accuracy_normalized"]) == (0.25, 0.5)
    (event,) = [event for event in events.since(session, job.id, 0) if event.type == "choices"]
    assert event.message == (
        "step 1: 75.0% of 8 multiple-choice questions right (50.0% normalized); 2 are longer than a row and were not "
        "asked"
    )
    assert event.data == {"step": 1, "left_out": 2, **asked}


def test_where_a_steps_time_went_becomes_metrics(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    parts = ("compute", "communication", "bubble", "data", "evaluation", "checkpoint")
    told = {f"{part}_seconds": float(number) for number, part in enumerate(parts)}
    jobs.record(session, job.id, fence=1, events=[make.step(1, hfu=0.75, **told)])
    kept = metrics.series(session, job.id, names=["hfu", *told])
    assert kept == {"hfu": [(1, 0.75)]} | {name: [(1, value)] for name, value in told.items()}


def test_progress_tells_how_far_how_fast_and_how_long_yet(session: Session) -> None:
    job = make.job(session, state=S.STARTING)
    jobs.record(session, job.id, fence=1, events=[started(1), make.step(2, step=1, step_seconds=1.0)])
    # The mean moves a tenth of the way to the newest: 1 + 0.1 x (2 - 1); eight of ten steps are left.
    jobs.record(session, job.id, fence=1, events=[make.step(3, step=2, step_seconds=2.0, loss=1.5)])
    progress = jobs.find(session, job.id).progress
    assert progress["percent"] == 20.0
    assert progress["eta_seconds"] == pytest.approx(8 * 1.1)
    assert (progress["step"], progress["total_steps"], progress["loss"]) == (2, 10, 1.5)


def test_progress_tells_the_best_validation_and_whose_weights_the_result_is(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    first, second = (
        Evaluated(seq=2 * step, time=1.0, step=step, loss=loss, token_accuracy=0.5, tokens=9, is_best=is_best)
        for step, loss, is_best in ((1, 2.0, True), (2, 3.0, False))
    )
    last = Finished(seq=5, step=2, tokens=256, stopped_early=True, exported_step=1)
    jobs.record(session, job.id, fence=1, events=[make.step(1), first, make.step(3, step=2), second, last])
    progress = jobs.find(session, job.id).progress
    assert (progress["best_step"], progress["best_validation_loss"], progress["validation_loss"]) == (1, 2.0, 3.0)
    assert (progress["stopped_early"], progress["exported_step"], progress["eta_seconds"]) == (True, 1, 0.0)
    (told,) = [event.message for event in events.since(session, job.id, 0) if event.type == "finished"]
    assert told == "stopped early after 2 steps and 256 tokens; the weights are those of step 1"


def test_progress_follows_a_run_that_went_back_and_validates_a_step_anew(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    told = [
        Evaluated(seq=seq, time=1.0, step=2, loss=loss, token_accuracy=0.5, tokens=9, is_best=True)
        for seq, loss in ((1, 2.0), (2, 1.5))
    ]
    jobs.record(session, job.id, fence=1, events=told)
    progress = jobs.find(session, job.id).progress
    assert (progress["best_step"], progress["best_validation_loss"], progress["validation_loss"]) == (2, 1.5, 1.5)
    # The history says of each step what was found first.
    assert metrics.series(session, job.id)["validation_loss"] == [(2, 2.0)]


def test_a_batch_that_is_delivered_twice_is_recorded_once(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    batch: list[Event] = [make.step(1), Log(seq=2, message="hello"), make.step(3, step=2)]
    assert jobs.record(session, job.id, fence=1, events=batch) == 3
    assert jobs.record(session, job.id, fence=1, events=batch) == 0
    assert jobs.record(session, job.id, fence=1, events=[*batch, make.step(4, step=3)]) == 1
    assert [seq for seq, _ in types(session, job)] == [1, 2, 3, 4, 5]


def test_a_resumed_attempt_records_only_what_is_new(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    jobs.record(session, job.id, fence=1, events=[*(make.step(n) for n in range(1, 8)), evaluated(8, 5)])
    jobs.lose(session, job.id, fence=1, reason="rank 0 died", max_losses=5)
    jobs.place(session, job.id, "node-1", [], claim_within=LEASE)
    jobs.claim(session, job.id, "supervisor-2", LEASE, node="node-1")
    # It goes on from a checkpoint at step 4, so it repeats 5 to 7 and their validation, with numbers of its own.
    again = [
        started(1, start_step=4),
        *(make.step(n - 3, step=n, loss=9.0) for n in range(5, 10)),
        evaluated(7, 5, 9.0),
    ]
    jobs.record(session, job.id, fence=2, events=again)
    losses = metrics.series(session, job.id, names=["loss", "validation_loss"])
    assert [step for step, _ in losses["loss"]] == list(range(1, 10))
    assert [value == 9.0 for _, value in losses["loss"]] == [False] * 7 + [True] * 2
    assert losses["validation_loss"] == [(5, 2.0)]
    told = [event.data["step"] for event in events.since(session, job.id, 0) if event.type == "step"]
    assert told == list(range(1, 10))


def test_a_checkpoint_on_the_disk_of_a_host_is_not_told_yet(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    saved = CheckpointSaved(seq=1, step=5, path="checkpoints/step-00000005", bytes=1, seconds=0.1)
    assert jobs.record(session, job.id, fence=1, events=[saved]) == 0


def test_events_keep_their_time_their_level_and_their_facts(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    failed = Failed(seq=2, time=1_700_000_005.5, code="non_finite_loss", message="loss is NaN at step 3", rank=1)
    jobs.record(session, job.id, fence=1, events=[Log(seq=1, time=1.0, level="warning", message="slow disk"), failed])
    log, last = events.since(session, job.id, 1)
    assert (log.level, log.message, log.data) == ("warning", "slow disk", {"message": "slow disk", "rank": 0})
    assert (last.level, last.created_at, last.data["code"]) == ("error", 1_700_000_005.5, "non_finite_loss")


def test_words_that_postgresql_has_no_place_for_are_recorded_without_it(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    failed = Failed(seq=2, code="internal", message="no\0good", hint="a\0b")
    assert jobs.record(session, job.id, fence=1, events=[Log(seq=1, message="a\0b"), failed]) == 2
    jobs.move(session, job.id, S.FAILED, fence=1, error=of_event(failed))
    words = [event.message for event in events.since(session, job.id, 1)]
    assert words == ["a\ufffdb", "no\ufffdgood", "no\ufffdgood"]
    found = jobs.find(session, job.id)
    assert found.error is not None
    assert found.error["hint"] == "a\ufffdb"


@pytest.mark.parametrize("state", [S.QUEUED, S.PAUSED, S.SUCCEEDED, S.CANCELLED])
def test_nobody_writes_the_history_of_a_job_that_is_not_held(session: Session, state: S) -> None:
    job = make.job(session, state=state, attempt=1)
    with pytest.raises(InvalidMove):
        jobs.record(session, job.id, fence=1, events=[make.step(1)])


def test_an_attempt_that_was_replaced_is_refused(session: Session) -> None:
    job = make.job(session, state=S.RUNNING, attempt=2)
    with pytest.raises(InvalidMove):
        jobs.record(session, job.id, fence=1, events=[make.step(1)])
    assert types(session, job) == [(1, "state")]


def test_history_is_read_in_pages_of_either_order_and_by_type(session: Session) -> None:
    job = make.job(session, state=S.RUNNING)
    jobs.record(session, job.id, fence=1, events=[make.step(n) for n in range(1, 6)])
    jobs.record(session, job.id, fence=1, events=[Finished(seq=6, step=5, tokens=640)])
    newest = events.page(session, job, limit=3)
    assert [event.seq for event in newest.data] == [7, 6, 5]
    assert newest.has_more
    rest = events.page(session, job, after=5, limit=10)
    assert ([event.seq for event in rest.data], rest.has_more) == ([4, 3, 2, 1], False)
    forward = events.page(session, job, after=2, limit=2, order="asc")
    assert [event.seq for event in forward.data] == [3, 4]
    assert [event.type for event in events.page(session, job, types=["finished", "state"]).data] == [
        "finished",
        "state",
    ]


def test_at_the_end_the_plan_stands_beside_what_was_measured(session: Session) -> None:
    plan = {"step_seconds": 2.0, "tokens_per_second": 64.0, "bytes_per_rank": {"total": 1000}}
    job = make.job(session, state=S.RUNNING, attempt=1, plan=plan)
    assert plans.compared(job.plan, job.progress) == {}
    fast = {"step_seconds": 1.0, "tokens_per_second": 128.0, "memory_bytes": 1100}
    first = make.step(1, seq=2, **fast | {"step_seconds": 9.0})
    # A validation and a checkpoint are no part of a step that is planned.
    third = make.step(3, seq=4, **fast | {"step_seconds": 4.0, "evaluation_seconds": 2.0, "checkpoint_seconds": 1.0})
    jobs.record(session, job.id, fence=1, events=[started(1), first, make.step(2, seq=3, **fast), third])
    compared = plans.compared(job.plan, job.progress)
    assert compared["step_seconds"] == {"planned": 2.0, "measured": 1.0}
    assert compared["tokens_per_second"] == {"planned": 64.0, "measured": 128.0}
    assert compared["bytes_per_rank"] == {"planned": 1000, "measured": 1100}
