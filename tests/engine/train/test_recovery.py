"""A loss or gradient that is not finite: which lines it comes from, and how a run goes on without them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import trainer
from engine.culprits import NonFinite, in_words
from engine.data.prepare import shuffled
from engine.model import Decoder
from engine.spikes import Spikes
from engine.stop import StopWish
from tests.engine.train import runs

LINES = 9
BAD = 5
"""The only line with the byte `BYTE`, counted from 1."""
BYTE = "~"
SEED = next(
    seed for seed in range(1000) if BAD - 1 in shuffled(LINES, seed, 0)[4:8] and BAD - 1 in shuffled(LINES, seed, 1)[7:]
)
"""With it the bad line is in the second step of four rows, and then in none before the fifth."""


def config(**changes):
    training = {"steps": 4, "seed": SEED, "schedule": "constant", "warmup": 0, "non_finite": "stop"}
    run = runs.config(**runs.COMPLETION, training=training | changes.pop("training", {}))
    data = run.data.model_copy(update={"packing": False})
    update = {"model": None, "base": "base", "data": data}
    return run.model_copy(update=update | {"parallel": runs.config(**changes).parallel})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that has infinity where the byte `BYTE` is embedded, and there alone."""
    folder = tmp_path_factory.mktemp("base")
    run = runs.config(training={"steps": 1}, model=runs.SHAPE | {"tie_embeddings": False})
    runs.events_of(folder, run)
    file = folder / "export" / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][ord(BYTE)] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    return folder / "export" / "model"


def ready(folder, base, run, *, bad="train"):
    folder.mkdir()
    runs.write(folder, run)
    (folder / "base").symlink_to(base)
    for name in ("train", "validation"):
        lines = [
            {"prompt": f"{n}{BYTE if n == BAD and name == bad else ''}?", "completion": " yes" * (n % 3 + 1)}
            for n in range(1, LINES + 1)
        ]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def tried(folder, run):
    """The losses, the warnings of training, and the words of the failure, if it failed."""
    seen, said = [], None
    try:
        trainer.train(run, folder, seen.append, StopWish())
    except NonFinite as error:
        said = str(error)
    # A model that cannot bear a byte is told of once more at its export, by the rank that writes.
    warned = [event.message for event in seen if event.type == "log" and not event.message.startswith("self-check")]
    return runs.losses(seen), warned, said


def on(world2, folder, base, run, *, bad="train"):
    ready(folder, base, run, bad=bad)
    if run.parallel.ranks == 1:
        return tried(folder, run)
    first, second = world2.run(tried, folder, run)
    assert first == second
    return first


@pytest.mark.parametrize("layout", runs.LAYOUTS)
def test_a_run_that_stops_names_the_line_of_the_data(world2, tmp_path, base, layout):
    losses, _, said = on(world2, tmp_path / "run", base, config(parallel=runs.LAYOUTS[layout]))
    assert len(losses) == 1
    assert said == f"the loss is nan at step 2; it comes from data/train.jsonl line {BAD}"


def three_steps(policy):
    return {"non_finite": policy, "checkpoint_every": 1, "steps": 3}


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory, base):
    """The losses of one rank by policy."""
    folder = tmp_path_factory.mktemp("one")
    return {
        policy: on(None, folder / policy, base, config(training=three_steps(policy)))[0]
        for policy in ("skip", "roll_back")
    }


@pytest.mark.parametrize("layout", runs.LAYOUTS)
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_every_layout_goes_on_alike_without_the_rows(world2, tmp_path, base, losses_of_one, policy, layout):
    run = config(training=three_steps(policy), parallel=runs.LAYOUTS[layout])
    losses, warned, said = on(world2, tmp_path / "run", base, run)
    assert said is None
    assert losses == pytest.approx(losses_of_one[policy], rel=2e-6)
    assert len(losses) == (2 if policy == "skip" else 3)
    (warning,) = (message for message in warned if "step 2" in message)
    assert f"data/train.jsonl line {BAD}: " in warning
    assert ("made no update" if policy == "skip" else "went back to step 1") in warning


def test_going_back_one_step_trains_what_skipping_it_trains(tmp_path, base):
    of = {}
    for policy, steps in (("skip", 4), ("roll_back", 3)):
        training = {"non_finite": policy, "checkpoint_every": 1, "steps": steps}
        of[policy], _, said = on(None, tmp_path / policy, base, config(training=training))
        assert said is None
    assert of["skip"] == of["roll_back"]
    assert len(of["skip"]) == 3


LATE = next(
    seed for seed in range(1000) if BAD - 1 in shuffled(LINES, seed, 0)[4:6] and BAD - 1 in shuffled(LINES, seed, 1)[3:]
)
"""With it the bad line is in the third step of two rows, and then in none before the seventh."""


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_run_goes_back_by_as_many_checkpoints_as_it_was_told(tmp_path, base, monkeypatch, back):
    # The third step is bad, so the run has two checkpoints, and the oldest is all that three can go back to.
    training = {"seed": LATE, "non_finite": "roll_back", "checkpoint_every": 1, "steps": 4, "global_batch": 2,
                "micro_batch": 2, "roll_back_checkpoints": back}  # fmt: skip
    losses, (*_, warning), said = on(None, tmp_path / "back", base, config(training=training))
    assert said is None
    step = max(1, 3 - back)
    assert f"went back to step {step}, and leaves out the rows since" in warning

    # The same as a run that has left out those rows in the first place.
    save = trainer.Work.save

    def leave_out(work):
        save(work)
        if work.step == step:
            work.loader.go_on(step=step, rows=6)

    monkeypatch.setattr(trainer.Work, "save", leave_out)
    other, _, _ = on(None, tmp_path / "left-out", base, config(training=training))
    assert [*losses[:step], *losses[2:]] == other


def test_going_back_is_told_after_what_was_saved_until_then(tmp_path, base):
    training = {"seed": LATE, "non_finite": "roll_back", "checkpoint_every": 1, "steps": 3, "global_batch": 2,
                "micro_batch": 2, "roll_back_checkpoints": 2}  # fmt: skip
    run = config(training=training)
    ready(tmp_path / "run", base, run)
    seen = []
    trainer.train(run, tmp_path / "run", seen.append, StopWish())
    told = [event for event in seen if event.type in {"checkpoint", "rolled_back"}]
    assert [(event.type, event.step) for event in told] == [
        ("checkpoint", 1), ("checkpoint", 2), ("rolled_back", 1), ("checkpoint", 2), ("checkpoint", 3),
    ]  # fmt: skip
    # Three steps of two rows were read, of which two counted.
    assert (told[2].from_step, told[2].rows) == (2, 6)


def test_a_run_that_went_back_forgets_which_losses_were_usual(tmp_path, base, monkeypatch):
    known = []
    begins = Spikes.begins

    def noted(spikes, loss):
        known.append(len(spikes._losses))
        return begins(spikes, loss)

    monkeypatch.setattr(Spikes, "begins", noted)
    training = {"seed": LATE, "non_finite": "roll_back", "checkpoint_every": 1, "steps": 3, "global_batch": 2,
                "micro_batch": 2}  # fmt: skip
    _, _, said = on(None, tmp_path / "back", base, config(training=training))
    assert said is None
    # The third step has no loss, and comes again.
    assert known == [0, 1, 0]


def test_without_a_checkpoint_a_run_goes_back_to_its_start(tmp_path, base, monkeypatch):
    run = config(training={"non_finite": "roll_back", "steps": 2})
    losses, _, _ = on(None, tmp_path / "back", base, run)
    # A new run that begins with the rows after those of the two steps.
    monkeypatch.setattr(trainer.Work, "resume", lambda work: work.loader.go_on(step=0, rows=8))
    fresh, _, _ = on(None, tmp_path / "fresh", base, run)
    assert losses[1:] == fresh
    assert len(fresh) == 2


def test_after_so_many_times_the_run_stops_all_the_same(tmp_path, base):
    run = config(training={"non_finite": "skip", "max_recoveries": 2, "steps": 20})
    losses, warned, said = on(None, tmp_path / "run", base, run)
    assert [message.rsplit("(", 1)[1] for message in warned if "no update" in message] == [
        "training.non_finite, 1 of 2)", "training.non_finite, 2 of 2)",
    ]  # fmt: skip
    assert f"line {BAD}" in said
    # The bad line comes once in an epoch of nine rows; in the third of them the run stops.
    place = 2 * LINES + shuffled(LINES, SEED, 2).tolist().index(BAD - 1)
    assert len(losses) == place // 4 - 2


def with_validation(**changes):
    run = config(**changes)
    return run.model_copy(
        update={
            "data": run.data.model_copy(update={"validation": Path("data/validation.jsonl")}),
            "training": run.training.model_copy(update={"eval_every": 1}),
        }
    )


@pytest.mark.parametrize("layout", runs.LAYOUTS)
def test_a_validation_that_stops_the_run_names_the_line_of_its_data(world2, tmp_path, base, layout):
    run = with_validation(parallel=runs.LAYOUTS[layout])
    losses, _, said = on(world2, tmp_path / "run", base, run, bad="validation")
    assert len(losses) == 1
    assert said == f"the validation loss is nan at step 1; it comes from data/validation.jsonl line {BAD}"


@pytest.mark.parametrize("layout", ["one", "data-weights"])
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_bad_validation_data_cost_the_validation_loss_and_nothing_else(world2, tmp_path, base, policy, layout):
    # More validations than recoveries.
    training = {"non_finite": policy, "max_recoveries": 1, "steps": 3}
    run = with_validation(training=training, parallel=runs.LAYOUTS[layout])
    losses, warned, said = on(world2, tmp_path / "run", base, run, bad="validation")
    assert said is None
    undisturbed = config(training=training, parallel=runs.LAYOUTS[layout])
    assert (losses, [], None) == on(world2, tmp_path / "undisturbed", base, undisturbed, bad="nowhere")
    assert warned == [
        f"the validation loss is nan at step {step}; it comes from data/validation.jsonl line {BAD}: "
        "there is no validation loss, and training goes on (training.non_finite)"
        for step in (1, 2, 3)
    ]


def test_weights_that_a_validation_finds_broken_are_gone_back_from_before_they_are_saved(tmp_path, base, monkeypatch):
    rates = iter([1e-3, 1e38])
    monkeypatch.setattr(trainer, "learning_rate", lambda *_, **__: next(rates, 1e-3))
    training = {"non_finite": "roll_back", "checkpoint_every": 1, "steps": 3}
    run = with_validation(training=training)
    losses, (same_data, warning), said = on(None, tmp_path / "run", base, run, bad="nowhere")
    assert "byte for byte" in same_data
    assert said is None
    assert len(losses) == 4
    assert warning == (
        "the validation loss is nan at step 2; each of its 9 rows gives it, so it is the weights and not the data: "
        "the run went back to step 1, and leaves out the rows since (training.non_finite, 1 of 3)"
    )


class Exploding(torch.autograd.Function):
    """Forward: nothing. Backward: infinity."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf


def explode_at_the_byte(run_dir, run):
    run_stage = Decoder.run

    def exploding(decoder, chunk, batch, hidden=None, **how):
        parts = run_stage(decoder, chunk, batch, hidden, **how)
        bad = (batch.tokens_BT == ord(BYTE)).any() and torch.is_grad_enabled() and decoder.stages[chunk].last
        return type(parts)(Exploding.apply(parts.loss_sum), parts.label_count, parts.correct) if bad else parts

    Decoder.run = exploding
    try:
        return tried(run_dir, run)
    finally:
        Decoder.run = run_stage


@pytest.mark.parametrize("layout", ["one", "data", "data-weights", "pipeline"])
def test_a_gradient_that_is_not_finite_is_traced_as_a_loss_is(world2, tmp_path, base, layout):
    run = config(parallel=runs.LAYOUTS[layout]).model_copy(update={"model": runs.config().model, "base": None})
    ready(tmp_path / "run", base, run)
    args = (explode_at_the_byte, tmp_path / "run", run)
    losses, _, said = args[0](*args[1:]) if layout == "one" else world2.run(*args)[0]
    assert len(losses) == 1
    assert said.startswith("the gradient's norm is ")
    assert said.endswith(f" at step 2; it comes from data/train.jsonl line {BAD}")


@pytest.mark.parametrize(
    ("found", "of", "says"),
    [
        (0, 4, "no row of the step gives it alone"),
        (4, 4, "each of its 4 rows gives it, so it is the weights and not the data"),
        (1, 1, "it comes from a line 1"),
        (3, 4, "it comes from a line 1; and 2 rows more"),
    ],
)
def test_words_for_what_was_found(found, of, says):
    assert in_words(["a line 1"] * min(found, 1), found=found, of=of) == says
