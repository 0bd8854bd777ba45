"""What a model makes of what its run holds out, beside any training: `python -m engine eval RUN_JSON`.

The same rows, weighed the same, as the run's own validations. Nothing in the run directory is changed: rows are made in
a folder beside it that goes again.

N documents of all rows.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import checkpoint, crew, weights
from engine.config import Parallel, RunConfig
from engine.counting import counted
from engine.culprits import in_validation
from engine.data.rows import Array, Rows
from engine.failure import LostContact, RunFailure
from engine.loss import SUMS, means
from engine.makings import ready_data, ready_loader, ready_model
from engine.mesh import build
from engine.model import Decoder
from engine.passes import Passes
from engine.progress import Reporter
from engine.restored import Restored
from engine.standing import standing
from engine.tally import Tally
from engine.together import said_once
from engine.trainer import CHECKPOINTS, PATIENCE
from engine.workshop import sweep, workshop

_LARGEST = 700.0
"""Of a loss, of which there is a perplexity: e to more is no number here."""


@dataclass(frozen=True)
class Part:
    """A file, or a document of one."""

    file: str
    line: int | None
    """None of a whole file."""
    documents: int
    tokens: int
    loss: float
    """Nats a token."""
    perplexity: float | None


@dataclass(frozen=True)
class Held:
    """What was found."""

    model: str
    loss: float
    """Nats a token: the mean over all labels held out."""
    perplexity: float | None
    """e to the loss; None where that is beyond all numbers."""
    token_accuracy: float
    """Share of the labels that are what the model holds likeliest."""
    tokens: int
    """Labels."""
    documents: int
    seconds: float
    """Of the passes through the model alone."""
    tokens_per_second: float
    """Tokens read, padding left out."""
    ranks: int
    files: list[Part]
    lines: list[Part] | None
    """Of each document; None: not asked for."""


def main(
    run_file: Path,
    *,
    as_json: bool,
    checkpoint: Path | None = None,
    model: Path | None = None,
    ranks: int | None = None,
    documents: bool = False,
) -> int:
    """Evaluate as this rank; with nobody else there, start the ranks that are needed. The exit code."""
    run_dir, me = run_file.absolute().parent, standing()
    run = asked(RunConfig.model_validate_json(run_file.read_bytes()), run_dir, checkpoint, model=model, ranks=ranks)
    if me.world_size == 1 and run.parallel.ranks > 1:
        # What can't be evaluated is refused once, and not by every rank.
        shape = run.model if run.base is None else weights.read_shape(run_dir / run.base)
        assert shape is not None
        run.check_shape(shape)
        named = {"--checkpoint": checkpoint, "--model": model}
        options = [text for name, path in named.items() if path is not None for text in (name, str(path.absolute()))]
        options += [] if ranks is None else ["--ranks", str(ranks)]
        options += [name for name, is_set in (("--json", as_json), ("--documents", documents)) if is_set]
        try:
            return crew.run(["eval", str(run_file.absolute()), *options], ranks=run.parallel.ranks)
        finally:
            # A rank that was killed could not.
            sweep(run_dir)
    try:
        held = evaluate(run, run_dir, documents=documents)
    except LostContact:
        # Another rank says why.
        return 0
    except RunFailure as failure:
        raise ValueError(" ".join(filter(None, (str(failure), failure.hint)))) from failure
    if me.world_rank == 0:
        sys.stdout.write(f"{json.dumps(asdict(held)) if as_json else in_words(held)}\n")
    return 0


def asked(
    run: RunConfig,
    run_dir: Path,
    checkpoint: Path | None = None,
    *,
    model: Path | None = None,
    ranks: int | None = None,
) -> RunConfig:
    """The run, of the model that is meant and laid out as it is to be. ValueError where nothing could be told of it."""
    if run.data.validation is None:
        raise ValueError(
            "the run holds nothing out: set data.validation in run.json to a share of the data, such as 0.05, or a file"
        )
    if run.objective == "dpo":
        raise ValueError(
            "the run's objective is dpo, which compares answers in pairs, so there is no loss of a token; "
            "its own validations tell reward_margin and reward_accuracy"
        )
    if checkpoint is None and model is None and run.base is None:
        there = sorted((run_dir / CHECKPOINTS).glob("step-*"))
        such = f", such as {there[-1]}" if there else ""
        raise ValueError(
            "the run starts from random weights, of which nothing is to be told: name a model with --model, or a "
            f"checkpoint with --checkpoint{such}"
        )
    # What an evaluation has no use for is left at what is always possible.
    changes: dict[str, Any] = {"export": {}, "resume": None if checkpoint is None else checkpoint.absolute()}
    training = run.training.model_dump() | {"samples": 0, "keep_best": False, "early_stopping": None}
    data = run.data.model_dump() | {"evaluation": None}
    if checkpoint is None:
        changes["lora"] = None
    if model is not None:
        changes |= {"model": None, "base": model.absolute(), "tokenizer": {"type": "base"}}
    if ranks is not None:
        changes["parallel"] = Parallel(data=ranks).model_dump()
        training["global_batch"] = ranks * run.training.micro_batch
    return RunConfig.model_validate(run.model_dump() | changes | {"training": training, "data": data})


def evaluate(run: RunConfig, run_dir: Path, *, documents: bool = False) -> Held:
    """What `asked` made of a run, evaluated. All ranks call it together; LostContact where another one says why not."""
    mesh = build(run.parallel, run.device, timeout=PATIENCE)
    report = Reporter(lambda event: None, mesh.stopwatch.whereabouts)
    with workshop(run_dir, mesh) as into:
        tokenizer, prepared = ready_data(run, run_dir, mesh, report, into=into)
        assert prepared.validation is not None
        with said_once(mesh):
            decoder = ready_model(run, run_dir, mesh, tokenizer)
        # All have one: what follows asks the other stages for theirs.
        with said_once(mesh):
            load(run, run_dir, decoder)
        if run.parallel.is_shared_out:
            # What it imports takes seconds and 50 MB, which other layouts need not spend.
            from engine.sharding import share_out

            # In no such block: the replicas wait for one another in it.
            share_out(decoder, weights=run.parallel.shard_weights)
        held = _evaluated(run, decoder.eval(), prepared.validation, documents=documents)
    mesh.close()
    return held


def load(run: RunConfig, run_dir: Path, decoder: Decoder) -> None:
    """Take the checkpoint's weights, if one is meant; nothing trains. All ranks come here together."""
    if run.resume is not None:
        # First, as the stages make it together: from here on one may have raised.
        restored = Restored(decoder)
        base = checkpoint.fingerprint(run_dir / run.base) if run.lora is not None and run.base else None
        scale = None if run.lora is None else run.lora.scale
        checkpoint.load(run.resume, restored, base=base, scale=scale)
    decoder.requires_grad_(False)


def _evaluated(run: RunConfig, decoder: Decoder, rows: Rows, *, documents: bool) -> Held:
    passes, loader = Passes(decoder), ready_loader(run, decoder, rows)
    tally = Tally.of(rows, decoder.context, decoder.device)
    sums = passes.evaluate([])
    began = time.perf_counter()
    for batch, parts in passes.losses(loader.sweep()):
        sums += parts.sums()
        tally.add(batch, parts)
    # The sums come to the host here, so that all is done.
    summed, _ = passes.over_ranks(torch.cat([sums, tally.sums]))
    seconds = time.perf_counter() - began
    total, by_document = summed[: len(SUMS)], np.array(summed[len(SUMS) :]).reshape(2, -1)[:, :-1]
    told = means(total)
    files = [run.data.validation] if isinstance(run.data.validation, Path) else run.data.train
    if not isfinite(told["loss"]):
        failure = in_validation(0, loss=told["loss"], loader=loader, files=files, passes=passes)
        # All have found the same.
        raise failure if decoder.mesh.world_rank == 0 else LostContact("rank 0 says why")
    losses_N, tokens_N, origins_N = _by_origin(rows, *by_document)
    by_file = [
        _part(str(file), None, origins_N["file"] == number, losses_N, tokens_N) for number, file in enumerate(files)
    ]
    return Held(
        model=str(run.resume or run.base),
        loss=told["loss"],
        perplexity=perplexity(told["loss"]),
        token_accuracy=told["token_accuracy"],
        tokens=int(total[SUMS.index("labels")]),
        documents=int((tokens_N > 0).sum()),
        seconds=seconds,
        tokens_per_second=rows.tokens / seconds,
        ranks=run.parallel.ranks,
        files=[part for part in by_file if part is not None],
        lines=_lines(files, losses_N, tokens_N, origins_N) if documents else None,
    )


_ORIGIN = np.dtype([("file", "<i4"), ("line", "<i8")])


def _by_origin(rows: Rows, losses_N: Array, tokens_N: Array) -> tuple[Array, Array, Array]:
    """Loss, tokens and origin of each document, where rows may have pieces of it."""
    origins = np.empty(len(losses_N), dtype=_ORIGIN)
    origins["file"], origins["line"] = rows.all_origins()
    known, number_N = np.unique(origins, return_inverse=True)
    return np.bincount(number_N, losses_N, len(known)), np.bincount(number_N, tokens_N, len(known)), known


def _lines(files: tuple[Path, ...] | list[Path], losses_N: Array, tokens_N: Array, origins_N: Array) -> list[Part]:
    found = []
    for number, (file, line) in enumerate(origins_N.tolist()):
        chosen = slice(number, number + 1)
        if (part := _part(str(files[file]), line, chosen, losses_N, tokens_N)) is not None:
            found.append(part)
    return found


def _part(file: str, line: int | None, chosen: Array | slice, losses_N: Array, tokens_N: Array) -> Part | None:
    """None where no label of it is held out."""
    tokens = float(tokens_N[chosen].sum())
    if not tokens:
        return None
    loss = float(losses_N[chosen].sum()) / tokens
    return Part(file, line, int((tokens_N[chosen] > 0).sum()), round(tokens), loss, perplexity(loss))


def perplexity(loss: float) -> float | None:
    """e to the loss in nats a token (Jelinek et al. 1977)."""
    return exp(loss) if loss < _LARGEST else None


def in_words(held: Held) -> str:
    """Lines for a person."""
    lines = [
        f"{'model':12} {held.model}",
        f"{'loss':12} {held.loss:.6f} nats a token",
        f"{'perplexity':12} {_shown(held.perplexity)}",
        f"{'accuracy':12} {held.token_accuracy:.4f} of {held.tokens:,} tokens in {held.documents:,} documents",
        f"{'speed':12} {held.tokens_per_second:,.0f} tokens a second, in {held.seconds:.2f} s, on "
        f"{counted(held.ranks, 'rank')}",
    ]
    # One file alone is the whole.
    parts = [*(held.files if len(held.files) > 1 else []), *(held.lines or [])]
    if parts:
        lines.append(f"{'loss':>10} {'perplexity':>12} {'tokens':>12}  where")
    for part in parts:
        where = part.file if part.line is None else f"{part.file}:{part.line}"
        lines.append(f"{part.loss:>10.6f} {_shown(part.perplexity):>12} {part.tokens:>12,}  {where}")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
