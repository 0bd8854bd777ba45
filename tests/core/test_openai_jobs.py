"""The mapping between OpenAI's words and ours, both ways; a field is blamed by the name it was given."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session

from core import openai_jobs
from core.errors import NotFound
from core.openai_spec import OURS, FineTuneAsk
from core.spec import JobSpec
from core.states import MOVES, TERMINAL
from tests import make

FILES = {"model": "tiny", "training_file": "file-1"}
NUMBERS = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 0.5, "sequence_length": 64}


def ask(**fields: Any) -> FineTuneAsk:
    return FineTuneAsk.model_validate(FILES | fields)


def test_every_state_has_one_of_openais_statuses_and_only_what_ended_has_ended_there() -> None:
    assert set(openai_jobs.STATUSES) == set(MOVES)
    assert {state for state, status in openai_jobs.STATUSES.items() if status == state.value and state in TERMINAL} == {
        state for state, status in openai_jobs.STATUSES.items() if status in {"succeeded", "failed", "cancelled"}
    }


def test_what_a_job_spec_has_and_openai_has_not_may_stand_beside() -> None:
    theirs = {"kind", "name", "labels", "model", "method", "integrations"}
    assert set(JobSpec.model_fields) - theirs == OURS


def test_all_of_openais_fields_become_a_job() -> None:
    spec = openai_jobs.spec_of(
        ask(
            validation_file="file-2", suffix="mine", seed=3, metadata={"a": "b"}, hyperparameters=NUMBERS,
            integrations=[{"type": "wandb", "wandb": {"project": "p"}}],
            data={"train": ["file-3"], "overlong": "drop"}, training={"clip": None}, priority=2,
        )
    )  # fmt: skip
    assert spec.model_dump(mode="json", exclude_unset=True) == {
        "kind": "finetune", "name": "mine", "labels": {"a": "b"}, "priority": 2, "model": {"base": "tiny"},
        "data": {"train": ["file-1", "file-3"], "validation": "file-2", "seq_len": 64, "overlong": "drop"},
        "training": {"epochs": 2, "global_batch": 8, "lr_multiplier": 0.5, "seed": 3, "clip": None},
        "integrations": [{"type": "wandb", "wandb": {"project": "p"}}],
    }  # fmt: skip


@pytest.mark.parametrize("value", ["auto", "mine"])
def test_auto_is_a_word_of_hyperparameters_and_else_a_name(value: str) -> None:
    assert openai_jobs.spec_of(ask(suffix=value)).name == value


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({}, "data.train.0", "training_file"),
        ({}, "data.train.2", "data.train.1"),
        ({}, "model.base", "model"),
        ({}, "training.global_batch", "training.global_batch"),
        ({"hyperparameters": {"batch_size": 3}}, "training.global_batch", "hyperparameters.batch_size"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 3}}}},
            "training.epochs",
            "method.dpo.hyperparameters.n_epochs",
        ),
        ({"method": {"type": "dpo"}}, "method.lora.targets", "method.dpo.lora.targets"),
        ({"method": {"type": "supervised"}}, "method.targets", "method.supervised.lora.targets"),
        ({"method": {"type": "supervised"}}, "method.type", "method.type"),
        ({"method": {"type": "lora"}}, "method.targets", "method.targets"),
        ({"validation_file": "file-2"}, "data.validation", "validation_file"),
        ({"data": {"validation": 0.1}}, "data.validation", "data.validation"),
        ({}, "parallel.tensor", "parallel.tensor"),
    ],
)
def test_a_field_is_blamed_by_the_name_it_was_given(fields: dict[str, Any], ours: str, theirs: str) -> None:
    assert openai_jobs.param_of(ours, ask(**fields)) == theirs


def test_an_event_is_known_by_its_id_in_its_own_job_only(session: Session) -> None:
    job, other = make.job(session, last_event=12), make.job(session, last_event=12)
    number = job.id.partition("-")[2]
    assert openai_jobs.seq_of(job, f"ftevent-{number}-12") == 12
    for id_ in (f"ftevent-{number}-13", f"ftevent-{number}-0", f"ftevent-{number}--1", "12", "", f"ftevent-{number}-x"):
        with pytest.raises(NotFound):
            openai_jobs.seq_of(job, id_)
    with pytest.raises(NotFound):
        openai_jobs.seq_of(other, f"ftevent-{number}-12")
