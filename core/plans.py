"""What would become of a job if it were submitted now. It goes in by the same door, and only looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from core import files, jobs, layouts, nodes, scheduler
from core.keys import Account
from core.layouts import Alternatives
from core.models import File
from core.resolve import Resolution
from core.scheduler import Prospect
from core.settings import Settings
from core.spec import JobSpec

Use = Literal["train", "validation", "evaluation", "tokenizer"]
USES: dict[str, Use] = {
    "data.validation": "validation",
    "data.evaluation": "evaluation",
    "tokenizer.file": "tokenizer",
}
"""Of a file by the field that names it; others are trained on."""


@dataclass(frozen=True)
class Planned:
    """A job that nobody queued."""

    resolution: Resolution
    files: tuple[tuple[Use, File], ...]
    """What it reads, each with what validation found."""
    prospect: Prospect
    alternatives: Alternatives


def plan(session: Session, owner: Account, spec: JobSpec, *, settings: Settings) -> Planned:
    """What `jobs.create` would make of `spec`, and when it would start. Raises what that raises."""
    resolution = jobs.resolved(session, owner, spec, settings)
    used = tuple((USES.get(param, "train"), files.get(session, owner, id_)) for param, id_ in spec.files())
    device = resolution.run.device
    prospect = scheduler.foresee(
        session,
        needs=resolution.slots,
        device=device,
        priority=spec.priority,
        project=owner.project_id,
        runtime=spec.max_runtime.total_seconds() if spec.max_runtime else None,
        half_life=settings.fair_share_half_life,
    )
    facts = nodes.cluster(session)
    others = layouts.alternatives(
        resolution.run, resolution.shape, facts, batch=resolution.batch, packed=resolution.packed
    )
    return Planned(resolution, used, prospect, others)


def compared(plan: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What was planned beside what was measured so far, of each number that has both.

    Memory is a device's, as its allocator counted it; on a CPU the process's, program and libraries among it.
    """
    both = {
        "step_seconds": (plan.get("step_seconds"), progress.get("usual_step_seconds")),
        "tokens_per_second": (plan.get("tokens_per_second"), progress.get("tokens_per_second")),
        "bytes_per_rank": (plan.get("bytes_per_rank", {}).get("total"), progress.get("memory_bytes")),
    }
    return {
        name: {"planned": planned, "measured": measured}
        for name, (planned, measured) in both.items()
        if planned is not None and measured is not None
    }


def micro_batches(run: Mapping[str, Any]) -> int:
    """Passes that each replica makes for a step."""
    training = run["training"]
    return int(training["global_batch"] // (training["micro_batch"] * run["parallel"]["data"]))
