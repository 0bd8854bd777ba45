"""Between OpenAI's words for a fine-tune and ours, both ways: pure functions of a request, and of a job's row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import Any, Literal

from pydantic import ValidationError

from core.errors import DomainError, InvalidSpec, NotFound
from core.models import Checkpoint, Job, JobEvent
from core.openai_spec import OURS, FineTuneAsk
from core.resolve import LEARNING_RATES
from core.spec import JobSpec
from core.states import TERMINAL, JobState

S = JobState
Status = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]

STATUSES: dict[JobState, Status] = {
    S.VALIDATING: "validating_files",
    S.QUEUED: "queued",
    S.STARTING: "queued",
    S.RUNNING: "running",
    S.PAUSING: "running",
    # It waits, if for a person; OpenAI's clients know no other word.
    S.PAUSED: "queued",
    # Ended is only what holds no slot any more.
    S.CANCELLING: "running",
    S.CANCELLED: "cancelled",
    S.SUCCEEDED: "succeeded",
    S.FAILED: "failed",
}

METHODS = ("supervised", "dpo")


# What is asked


@dataclass(frozen=True)
class Place:
    """Where something is said in OpenAI's words, and where in a `JobSpec`."""

    theirs: str
    ours: str
    rivals: tuple[str, ...] = ()
    """Fields of a `JobSpec` that say it in another way."""


def _hyperparameters(name: str, ours: str, *rivals: str) -> Iterator[Place]:
    for where in ("hyperparameters", *(f"method.{method}.hyperparameters" for method in METHODS)):
        yield Place(f"{where}.{name}", ours, rivals)


PLACES = (
    Place("model", "model.base"),
    Place("validation_file", "data.validation"),
    Place("suffix", "name"),
    Place("metadata", "labels"),
    Place("seed", "training.seed"),
    Place("integrations", "integrations"),
    Place("packing", "data.packing"),
    *_hyperparameters("n_epochs", "training.epochs", "training.steps", "training.tokens"),
    *_hyperparameters("batch_size", "training.global_batch"),
    *_hyperparameters("learning_rate_multiplier", "training.lr_multiplier", "training.lr"),
    *_hyperparameters("sequence_length", "data.seq_len"),
    Place("method.dpo.hyperparameters.beta", "method.beta"),
    Place("method.dpo.label_smoothing", "method.label_smoothing"),
    Place("method.dpo.sft_coefficient", "method.sft_coefficient"),
)
"""What means the same under two names. Training files and methods are made by functions of their own."""


def spec_of(ask: FineTuneAsk) -> JobSpec:
    """The job that is asked for. InvalidSpec, whose `param` is the asker's field, where it says two things at once."""
    said = ask.model_dump(exclude_unset=True, by_alias=True)
    spec = {name: value for name, value in said.items() if name in OURS and value is not None}
    spec["kind"] = "finetune"
    _put(spec, "data.train", (ask.training_file, *ask.data.train))
    if ask.method is not None:
        _take_method(spec, ask.method.type, said)
    for place in PLACES:
        value = _look(said, place.theirs)
        if value is not None and not (value == "auto" and "hyperparameters" in place.theirs):
            _say(spec, place, value)
    try:
        return JobSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        param = param_of(".".join(map(str, first["loc"])), ask)
        raise InvalidSpec(f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param) from error


def _take_method(spec: dict[str, Any], method: str, said: Mapping[str, Any]) -> None:
    lora = _look(said, f"method.{method}")
    match method:
        case "reinforcement":
            raise InvalidSpec(
                "method.type: this server does no reinforcement fine-tuning; use supervised, or dpo with preference "
                "pairs.",
                param="method.type",
            )
        case "pretrain":
            spec |= {"kind": "pretrain", "method": {"type": "full"}}
        case "supervised":
            adapters = (lora or {}).get("lora", {})
            spec["method"] = {"type": "full"} if adapters is None else {"type": "lora", **adapters}
        case "dpo":
            spec["method"] = {"type": "dpo"} | ({"lora": lora["lora"]} if "lora" in (lora or {}) else {})
        case _:
            spec["method"] = said["method"]


def _say(spec: dict[str, Any], place: Place, value: Any) -> None:
    for other in (place.ours, *place.rivals):
        there = _look(spec, other)
        if there is not None and not (other == place.ours and there == value):
            raise InvalidSpec(f"{place.theirs}: this is said by {other} too; say it once", param=place.theirs)
    _put(spec, place.ours, value)


def blamed(error: DomainError, ask: FineTuneAsk) -> DomainError:
    """The same error, about the field by which it was asked for."""
    theirs = param_of(error.param, ask)
    if theirs is None or theirs == error.param:
        return error
    theirs_too = copy(error)
    theirs_too.param = theirs
    if error.param and error.message.startswith(error.param):
        theirs_too.message = theirs + error.message.removeprefix(error.param)
    return theirs_too


def param_of(ours: str | None, ask: FineTuneAsk | None = None) -> str | None:
    """What OpenAI calls a field of a `JobSpec`; of several names the one that `ask` uses, else the first."""
    if ours is None:
        return None
    if ours == "data.train" or ours.startswith("data.train."):
        return _training_file(ours)
    said = None if ask is None else ask.model_dump(exclude_unset=True)
    for place in PLACES:
        if _is_within(ours, place.ours) and (said is None or _look(said, place.theirs) is not None):
            return place.theirs + ours.removeprefix(place.ours)
    if said is not None and said.get("method") and _is_within(ours, "method"):
        return _method_param(ours, said["method"]["type"])
    return ours


def _training_file(ours: str) -> str:
    number = ours.removeprefix("data.train").strip(".")
    return "training_file" if number in {"", "0"} else f"data.train.{int(number) - 1}"


def _method_param(ours: str, method: str) -> str:
    rest = ours.removeprefix("method.")
    if method == "dpo" and _is_within(rest, "lora"):
        return f"method.dpo.{rest}"
    return f"method.supervised.lora.{rest}" if method == "supervised" and rest not in {"method", "type"} else ours


def _is_within(path: str, of: str) -> bool:
    return path == of or path.startswith(f"{of}.")


def _look(said: Any, path: str) -> Any:
    return reduce(lambda part, name: part.get(name) if isinstance(part, dict) else None, path.split("."), said)


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    *way, name = path.split(".")
    for step in way:
        spec = spec.setdefault(step, {})
    spec[name] = value


# What became of it


def check_is_fine_tune(job: Job) -> None:
    """NotFound for a job that OpenAI has no words for, as it starts from no model."""
    if job.base_model is None:
        raise NotFound(f"Job {job.id} trains a model from scratch, which is no fine-tune; it is at /v1/jobs/{job.id}.")


def hyperparameters(job: Job) -> dict[str, Any]:
    """As numbers: `n_epochs`, `batch_size` and `learning_rate_multiplier`, and under DPO `beta`."""
    run, said = job.run_config, job.spec.get("training", {})
    training = run["training"]
    multiplier = said.get("lr_multiplier") or training["lr"] / LEARNING_RATES[_rate_of(run)]
    numbers = {
        "n_epochs": _whole(training["epochs"] or _epochs(job)),
        "batch_size": said.get("global_batch") or _batch(job),
        # A rate of one's own is seldom a round multiple.
        "learning_rate_multiplier": _whole(float(f"{multiplier:.6g}")),
    }
    return numbers | ({"beta": run["dpo"]["beta"]} if run["objective"] == "dpo" else {})


def _rate_of(run: Mapping[str, Any]) -> str:
    if run["objective"] == "dpo":
        return "dpo with lora" if run["lora"] else "dpo"
    return "lora" if run["lora"] else "full"


def _batch(job: Job) -> int:
    """Rows of a step, of which there are no more than to train on; how many that is shows as the job starts."""
    return int(min(job.run_config["training"]["global_batch"], job.progress.get("train_rows") or inf))


def _epochs(job: Job) -> float:
    """Of a job whose length is said in steps: about how often it sees each row, and once at least."""
    rows = job.progress.get("train_rows") or job.plan.get("estimated_rows") or 1
    return float(max(1, round(job.run_config["training"]["steps"] * min(_batch(job), rows) / rows)))


def _whole(number: float) -> float | int:
    # Clients of languages with types read whole numbers as such.
    return int(number) if number == int(number) else number


def method(job: Job) -> dict[str, Any]:
    """As OpenAI says it, with our adapters."""
    run = job.run_config
    name = "dpo" if run["objective"] == "dpo" else "supervised"
    adapters = run["lora"] and {
        "rank": run["lora"]["rank"], "alpha": run["lora"]["alpha"], "dropout": run["lora"]["dropout"],
        "rslora": run["lora"]["rslora"], "targets": run["lora"]["targets"],
    }  # fmt: skip
    return {"type": name, name: {"hyperparameters": hyperparameters(job), "lora": adapters}}


def training_files(job: Job) -> list[str]:
    return list(job.spec["data"]["train"])


def validation_file(job: Job) -> str | None:
    wish = job.spec["data"].get("validation")
    return wish if isinstance(wish, str) else None


def estimated_finish(job: Job, *, now: float) -> int | None:
    """Unix seconds, while it runs and has taken a step."""
    remaining = job.progress.get("eta_seconds")
    return int(now + remaining) if job.state is S.RUNNING and remaining is not None else None


def trained_tokens(job: Job) -> int | None:
    """Once it has ended."""
    return job.progress.get("tokens") if job.state in TERMINAL else None


def error(job: Job) -> dict[str, Any] | None:
    """Why it failed, about the field by OpenAI's name."""
    return None if job.error is None else {**job.error, "param": param_of(job.error.get("param"))}


# What happened

LEVELS = {"warning": "warn"}
"""Levels that have another name there."""

TRAIN = {"loss": "train_loss", "token_accuracy": "train_mean_token_accuracy"}
VALIDATION = {
    "loss": ("valid_loss", "full_valid_loss"),
    "token_accuracy": ("valid_mean_token_accuracy", "full_valid_mean_token_accuracy"),
}
"""All rows are validated each time, so what OpenAI tells of a batch and of all is the same here."""


def event_id(event: JobEvent) -> str:
    """Unlike that of any other job's event."""
    return f"ftevent-{_number(event.job_id)}-{event.seq}"


def seq_of(job: Job, id_: str) -> int:
    """Which of the job's events an id is; NotFound unless there is one."""
    head, _, seq = id_.rpartition("-")
    # Digits of ASCII alone, and no more than any count has.
    if head != f"ftevent-{_number(job.id)}" or not (seq.isascii() and seq.isdigit() and len(seq) < 16):
        raise NotFound(f"There is no event {id_!r} to continue after.", param="after")
    if not 1 <= int(seq) <= job.last_event:
        raise NotFound(f"There is no event {id_!r} to continue after.", param="after")
    return int(seq)


def _number(job_id: str) -> str:
    return job_id.partition("-")[2]


def is_metrics(event: JobEvent) -> bool:
    return event.type in {"step", "evaluated"}


def event_data(event: JobEvent, *, total_steps: int | None) -> dict[str, Any]:
    """What we know, under OpenAI's names where it has some."""
    if not is_metrics(event):
        return event.data
    if event.type == "step":
        known = {theirs: event.data.get(ours) for ours, theirs in TRAIN.items()}
    else:
        known = {theirs: event.data.get(ours) for ours, both in VALIDATION.items() for theirs in both}
    said = {name: value for name, value in known.items() if value is not None}
    return {"step": event.data["step"], "total_steps": total_steps} | said | _others(event.data)


def _others(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in {"step", *TRAIN} and value is not None}


def checkpoint_metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was known at its step, under OpenAI's names."""
    known: dict[str, Any] = {"step": checkpoint.step}
    for ours, theirs in TRAIN.items():
        known[theirs] = checkpoint.metrics.get(ours)
    for ours, both in VALIDATION.items():
        known |= dict.fromkeys(both, checkpoint.metrics.get(f"validation_{ours}"))
    return known
