"""`python -m engine eval`: what it says is what `transformers` says, and the run's own validations, in any layout."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import exp
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engine import evaluate, workshop
from engine.__main__ import main
from engine.config import Parallel, RunConfig
from engine.evaluate import Held, asked
from engine.failure import LostContact
from engine.inventory import InvalidWeights
from engine.mesh import alone
from engine.optimizer import Optimizer
from engine.shares import ShareOptimizer
from tests.engine.train import runs
from tests.worlds import World

DEADLINE = 120.0
NOBODY = 65534
"""A user with no rights of its own, on Linux."""
HELD_OUT = [{"prompt": f"{n}?", "completion": " no" * (n % 4 + 1)} for n in range(7)]
ADAPTER = {"rank": 2, "alpha": 4, "targets": ["q", "v"]}
WORDS = "{}: shed and rail and signal"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.base_in(tmp_path_factory.mktemp("base"))


def completions(base: Path, folder: Path, **changes: Any) -> RunConfig:
    """A run that holds out `HELD_OUT`, written to its folder."""
    data = runs.COMPLETION["data"] | {"validation": "data/held-out.jsonl"}
    of_base = {"model": None, "base": str(base), "tokenizer": {"type": "base"}}
    run = runs.config(**runs.COMPLETION | of_base | {"data": data} | changes)
    runs.write(folder, run)
    (folder / "data" / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    return run


def by_transformers(base: Path) -> list[tuple[float, int]]:
    """Mean loss of each answer by the library's own loss, and its labels."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = []
    for row in HELD_OUT:
        prompt = tokenizer(row["prompt"]).input_ids
        answer = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            found.append((model(torch.tensor([[*prompt, *answer]]), labels=labels).loss.item(), len(answer)))
    return found


def test_a_base_has_the_loss_that_transformers_finds_in_all_and_of_each_document(base: Path, tmp_path: Path) -> None:
    run = completions(base, tmp_path, training={"micro_batch": 2})
    held = evaluate.evaluate(asked(run, tmp_path), tmp_path, documents=True)
    each = by_transformers(base)
    tokens = sum(count for _, count in each)
    assert held.loss == pytest.approx(sum(loss * count for loss, count in each) / tokens, rel=1e-5)
    assert (held.tokens, held.documents, held.model) == (tokens, len(HELD_OUT), str(base))
    assert held.perplexity == pytest.approx(exp(held.loss))
    assert held.lines is not None
    assert [(line.line, line.tokens) for line in held.lines] == [(n, count) for n, (_, count) in enumerate(each, 1)]
    for line, (loss, _) in zip(held.lines, each, strict=True):
        assert line.loss == pytest.approx(loss, rel=1e-5)
    assert held.tokens_per_second > 0
    (file,) = held.files
    assert (file.file, file.tokens, file.loss) == ("data/held-out.jsonl", tokens, pytest.approx(held.loss))


@pytest.mark.parametrize("layout", [name for name in runs.LAYOUTS if name != "one"])
def test_any_layout_finds_the_same(base: Path, tmp_path: Path, world2: World, layout: str) -> None:
    alone = evaluate.evaluate(asked(completions(base, tmp_path), tmp_path), tmp_path, documents=True)
    run = asked(completions(base, tmp_path, parallel=runs.LAYOUTS[layout]), tmp_path)
    found: list[Held] = world2.run(evaluate.evaluate, run, tmp_path, documents=True)
    for held in found:
        assert held.loss == pytest.approx(alone.loss, rel=1e-6)
        assert (held.tokens, held.documents, held.ranks) == (alone.tokens, alone.documents, 2)
        assert [line.loss for line in held.lines or ()] == pytest.approx(
            [line.loss for line in alone.lines or ()], rel=1e-5
        )
    assert not list(tmp_path.glob(".evaluation-*"))


@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["all", "adapter"])
def test_a_checkpoint_has_the_loss_that_the_run_found_in_any_layout(
    base: Path, tmp_path: Path, world2: World, lora: Any
) -> None:
    run = completions(base, tmp_path, lora=lora, training={"steps": 3, "lr": 0.01, "eval_every": 3})
    (evaluated,) = [event for event in runs.events_of(tmp_path, run) if event.type == "evaluated"]
    saved = tmp_path / "checkpoints" / "step-00000003"
    held = evaluate.evaluate(asked(run, tmp_path, saved), tmp_path)
    assert (held.loss, held.tokens) == (pytest.approx(evaluated.loss, rel=1e-6), evaluated.tokens)
    assert held.token_accuracy == evaluated.token_accuracy
    assert held.loss != pytest.approx(evaluate.evaluate(asked(run, tmp_path), tmp_path).loss, rel=1e-3)
    cut = asked(run.model_copy(update={"parallel": run.parallel.model_copy(update={"tensor": 2})}), tmp_path, saved)
    for found in world2.run(evaluate.evaluate, cut, tmp_path):
        assert found.loss == pytest.approx(evaluated.loss, rel=1e-5)
    exported = asked(run, tmp_path, model=tmp_path / "export" / "model")
    assert evaluate.evaluate(exported, tmp_path).loss == pytest.approx(evaluated.loss, rel=1e-5)


def test_a_document_that_fills_several_rows_is_one_and_files_are_told_apart(base: Path, tmp_path: Path) -> None:
    data = {"train": ["data/a.txt", "data/b.txt"], "format": "text", "validation": 0.5, "packing": True}
    run = runs.config(model=None, base=str(base), tokenizer={"type": "base"}, data=data)
    runs.write(tmp_path, run)
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.txt").write_text(" ".join(WORDS.format(name * n) for n in range(40)))
    held = evaluate.evaluate(asked(run, tmp_path), tmp_path, documents=True)
    assert [file.file for file in held.files] == ["data/a.txt", "data/b.txt"]
    assert sum(file.tokens for file in held.files) == held.tokens
    total = sum(file.loss * file.tokens for file in held.files)
    assert total / held.tokens == pytest.approx(held.loss, rel=1e-7)
    assert (held.documents, len(held.lines or ())) == (2, 2)
    assert "data/b.txt:1" in evaluate.in_words(held)


def test_as_a_person_calls_it_on_two_ranks_and_nothing_in_the_folder_changes(base: Path, tmp_path: Path) -> None:
    run = completions(base, tmp_path, training={"global_batch": 3, "micro_batch": 3})
    alone = evaluate.evaluate(asked(run, tmp_path), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    command = [sys.executable, "-m", "engine", "eval", str(tmp_path / "run.json"), "--ranks", "2", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    told = json.loads(ended.stdout)
    assert (told["loss"], told["ranks"], told["tokens"]) == (pytest.approx(alone.loss, rel=1e-6), 2, alone.tokens)
    assert told["lines"] is None
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert after == before


def test_a_checkpoint_is_read_without_what_training_it_would_take(base: Path, tmp_path: Path, world2: World) -> None:
    run = completions(base, tmp_path, training={"steps": 2, "lr": 0.01, "eval_every": 2})
    (evaluated,) = [event for event in runs.events_of(tmp_path, run) if event.type == "evaluated"]
    saved = tmp_path / "checkpoints" / "step-00000002"
    for layout in ("data-weights", "pipeline"):
        shared = asked(
            run.model_copy(update={"parallel": Parallel.model_validate(runs.LAYOUTS[layout])}), tmp_path, saved
        )
        for found in world2.run(evaluated_untrained, shared, tmp_path):
            assert found.loss == pytest.approx(evaluated.loss, rel=1e-5)


def evaluated_untrained(run: RunConfig, run_dir: Path) -> Held:
    nothing = AssertionError("nothing is trained")
    with (
        patch.object(Optimizer, "__init__", side_effect=nothing),
        patch.object(ShareOptimizer, "__init__", side_effect=nothing),
    ):
        return evaluate.evaluate(run, run_dir)


def reason(run: RunConfig, run_dir: Path, bad: list[int], where: str) -> str:
    """What this rank raises where some can't go on from there; then all are at the same point again."""
    damaged = InvalidWeights(f"damaged for rank {dist.get_rank()}")
    broken = patch(where, side_effect=damaged) if dist.get_rank() in bad else nullcontext()
    with broken, pytest.raises((ValueError, LostContact)) as raised:
        evaluate.evaluate(run, run_dir)
    dist.barrier()
    return f"{raised.typename}: {raised.value}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from random weights, with a checkpoint."""
    folder = tmp_path_factory.mktemp("scratch")
    runs.events_of(folder, runs.config(data={"validation": 0.2}, training={"steps": 1}))
    return folder


@pytest.mark.parametrize(("bad", "who_says"), [([0], 0), ([1], 1), ([0, 1], 0)])
@pytest.mark.parametrize(
    ("where", "of_base"),
    [
        ("engine.weights.Folder.piece", True),
        ("engine.makings.Decoder", True),
        ("engine.makings.lora.adapt", True),
        ("engine.makings.Decoder", False),
        ("engine.checkpoint.verify", False),
    ],
)
def test_whichever_rank_meets_what_is_wrong_its_reason_is_said_and_once(
    base: Path, tmp_path: Path, scratch: Path, world2: World, bad: list[int], who_says: int, where: str, of_base: bool
) -> None:
    layout: dict[str, Any] = {"parallel": runs.LAYOUTS["pipeline"]}
    if of_base:
        run = completions(base, tmp_path, **layout, lora=ADAPTER)
        run = asked(run, tmp_path).model_copy(update={"lora": run.lora})
    else:
        run = runs.config(data={"validation": 0.2}, **layout)
        runs.write(tmp_path, run)
        run = asked(run, tmp_path, scratch / "checkpoints" / "step-00000001")
    said = world2.run(reason, run, tmp_path, bad, where, seconds=30)
    assert said[who_says] == f"InvalidWeights: damaged for rank {who_says}"
    assert said[1 - who_says].startswith("LostContact")


def test_one_that_was_killed_leaves_nothing_for_longer_than_to_the_next(base: Path, tmp_path: Path) -> None:
    run = completions(base, tmp_path)
    code = (
        "import sys, tempfile, time; from pathlib import Path; from engine import workshop; "
        "print(workshop._made(Path(sys.argv[1]))[0], flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        folder = Path(killed.stdout.readline().strip())
        # One that is at work beside it takes nothing from it.
        evaluate.evaluate(asked(run, tmp_path), tmp_path)
        assert [*tmp_path.glob(".evaluation-*")] == [folder]
        killed.kill()
        killed.wait(DEADLINE)
    evaluate.evaluate(asked(run, tmp_path), tmp_path)
    assert not list(tmp_path.glob(".evaluation-*"))


def test_what_another_user_left_stays_and_refuses_nobody() -> None:
    # The folders that pytest makes are one user's alone.
    with tempfile.TemporaryDirectory() as anywhere:
        run_dir = Path(anywhere)
        run_dir.chmod(0o777)
        left, held = workshop._made(run_dir)
        assert held is not None
        os.close(held)
        left.chmod(0)
        with another_user():
            with workshop.workshop(run_dir, alone(torch.device("cpu"))) as mine:
                assert {*run_dir.glob(".evaluation-*")} == {left, mine}
            workshop.sweep(run_dir)
        assert [*run_dir.glob(".evaluation-*")] == [left]
        left.chmod(0o700)


def test_one_that_is_stopped_as_it_clears_up_keeps_the_next_for_a_moment_only(base: Path, tmp_path: Path) -> None:
    run = asked(completions(base, tmp_path), tmp_path)
    _, left = workshop._made(tmp_path)
    assert left is not None
    os.close(left)
    stopped = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with patch.object(workshop, "LONGEST_SECONDS", 0.1):
        evaluate.evaluate(run, tmp_path)
    assert len([*tmp_path.glob(".evaluation-*")]) == 1
    os.close(stopped)
    evaluate.evaluate(run, tmp_path)
    assert not list(tmp_path.glob(".evaluation-*"))


@contextmanager
def another_user() -> Iterator[None]:
    """Whom permissions bind, as they do not root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_cannot_be_evaluated_is_refused_in_words(base: Path, tmp_path: Path, capsys: Any) -> None:
    def said(*arguments: str) -> str:
        assert main(["eval", str(tmp_path / "run.json"), *arguments]) == 1
        return str(capsys.readouterr().err)

    scratch = runs.config(data={"validation": 0.5})
    for run, words in (
        (runs.config(), "set data.validation"),
        (runs.config(**runs.PREFERENCE | {"data": runs.PREFERENCE["data"] | {"validation": 0.5}}), "dpo"),
        (scratch, "--checkpoint"),
    ):
        runs.write(tmp_path, run)
        assert words in said()
    (tmp_path / "empty").mkdir()
    assert "no manifest.json" in said("--checkpoint", str(tmp_path / "empty"))
    assert "no tokenizer.json" in said("--model", str(tmp_path / "empty"))
    completions(base, tmp_path)
    (tmp_path / "data" / "held-out.jsonl").write_text('{"prompt": 7}\n')
    assert "line 1" in said()
    assert not list(tmp_path.glob(".evaluation-*"))


@pytest.mark.slow
def test_under_torchrun_one_rank_tells_it(base: Path, tmp_path: Path) -> None:
    completions(base, tmp_path, parallel={"data": 2})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    ended = subprocess.run(
        [*command, "engine", "eval", str(tmp_path / "run.json"), "--json"],
        capture_output=True, text=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    assert json.loads(ended.stdout)["ranks"] == 2
