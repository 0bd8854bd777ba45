"""Why a job failed, in the form that the row keeps: a documented code, words, and a hint that says what to change."""

from __future__ import annotations

from typing import Any

from engine.events import ErrorCode, Failed

HINTS: dict[ErrorCode, str] = {
    "invalid_data": "Correct the training file where the message says, upload it again and submit the job anew.",
    "invalid_model": "Check that the base model's folder is complete and of a supported family.",
    "out_of_memory": "Lower training.micro_batch or data.seq_len, set recompute to full, or raise parallel.tensor, "
    "parallel.pipeline or parallel.context; with replicas, set parallel.shard_gradients or parallel.shard_weights.",
    "non_finite_loss": "Look at the lines it names; lower training.lr, train in fp32, or let training.non_finite skip "
    "or roll_back.",
    "rank_lost": "See the logs of that rank; when nothing is there, the host ended it, often for lack of memory.",
    "stalled": "See the logs of each rank for where it waits; then retry the job.",
    "disk_full": "Free space on the host or keep fewer checkpoints (training.keep_checkpoints), then retry the job.",
    "max_runtime": "Raise max_runtime, or train fewer steps.",
    "lease_lost": "The host that ran the job went away or had no time, too often; look at its health, then retry it.",
    "internal": "This is a fault of ours: retry, and report it with the job's logs if it comes back.",
}
"""What to do about each code."""


def failure(
    code: ErrorCode, message: str, *, hint: str | None = None, param: str | None = None, rank: int | None = None
) -> dict[str, Any]:
    """`Job.error` for this code; the code's own hint where none is given."""
    return {"code": code, "message": message, "param": param, "rank": rank, "hint": hint or HINTS[code]}


def of_event(event: Failed) -> dict[str, Any]:
    """`Job.error` as the engine told it."""
    return failure(event.code, event.message, hint=event.hint, param=event.param, rank=event.rank)
