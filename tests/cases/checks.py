"""What a case may expect, by the name that `expect.json` has for it: each a claim about a play."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engine import weights
from engine.batch import Batch
from engine.config import RunConfig
from engine.data.loader import Loader
from engine.data.prepare import prepare, tokenizer_for
from engine.generate import Sampler, Sampling
from engine.mesh import alone
from engine.model import Decoder
from tests.cases.playing import Play, trained

CPU = torch.device("cpu")
Check = Callable[[Play, Any], None]


def check(play: Play) -> None:
    """Hold a play against all that its case expects; a word that no check knows is a failure of its own."""
    for name, wanted in play.case.expect.items():
        CHECKS[name](play, wanted)


def said_before(play: Play, _: Any) -> None:
    """Part of what another word is checked by."""


def outcome(play: Play, wanted: str) -> None:
    accepted = play.is_accepted() if play.asked_for_a_job else bool(play.uploads)
    assert accepted or play.refusals
    if wanted == "accept":
        assert accepted, play.refusals
    elif wanted == "reject":
        assert not accepted
    told = play.refusals if not accepted else play.warnings() if wanted.endswith("with_warning") else []
    if (error := play.case.expect.get("error")) and (told or wanted.endswith("with_warning")):
        assert any(fits(each, error) for each in findings(told)), (told, error)


def findings(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each thing that is said, with what an error says in detail."""
    return [*told, *(finding for error in told for finding in error.get("errors", ()))]


def fits(told: dict[str, Any], error: dict[str, Any]) -> bool:
    text = told["message"].lower()
    says = all(any(word in text for word in words.lower().split("|")) for words in error.get("says_all", ()))
    line = error.get("line")
    return says and (line is None or told.get("line") == line or f"line {line}" in text)


def job_status(play: Play, wanted: str) -> None:
    assert (wanted == "succeeded") == play.is_accepted(), play.refusals


def examples(play: Play, wanted: int) -> None:
    assert play.report["examples"] == wanted
    assert play.rows[1].counts.kept == wanted


def effective_examples(play: Play, wanted: int) -> None:
    if play.is_accepted():
        assert play.rows[1].counts.kept == wanted


def loss(play: Play, wanted: str) -> None:
    if play.is_accepted():
        assert all(torch.isfinite(torch.tensor(value)) for value in losses(play.trained))


def losses(events: Any) -> list[float]:
    return [event.loss for event in events if event.type == "step"]


def steps(play: Play, wanted: int) -> None:
    assert len(losses(play.trained)) == wanted


def steps_min_if_accepted(play: Play, wanted: int) -> None:
    if play.is_accepted():
        assert len(losses(play.trained)) >= wanted


def texts(play: Play) -> list[str]:
    tokenizer, _ = play.rows
    return [tokenizer.decode(document, skip_special=False) for document in play.documents]


def keeps_characters(play: Play, wanted: list[str]) -> None:
    everything = "".join(texts(play))
    for name in wanted:
        assert chr(int(name.removeprefix("U+"), 16)) in everything, name


def never_in_tokens(play: Play, wanted: list[str]) -> None:
    if play.is_accepted():
        assert not [word for word in wanted for text in texts(play) if word in text]


def control_ids(play: Play, wanted: str) -> None:
    if not play.is_accepted():
        return
    run_dir, run = play.staged
    tokenizer, _ = play.rows
    path = run_dir / run.data.train[0]
    spelled = path.read_text(encoding="utf-8")
    neutral = spelled
    for text in sorted({*tokenizer.specials, "<|im_end|>", "<|im_start|>", "</s>", "<|endoftext|>"}, key=len)[::-1]:
        neutral = neutral.replace(text, "neutral")
    assert neutral != spelled
    path.write_text(neutral, encoding="utf-8")
    other = prepare(run, run_dir, tokenizer, lambda *_: None)
    path.write_text(spelled, encoding="utf-8")
    controls = [[identity for identity in ids if identity in tokenizer.specials.values()] for ids in play.documents]
    row = other.train.row(0)
    ids = [int(identity) for identity in row.tokens[: row.filled] if identity in tokenizer.specials.values()]
    assert controls == [ids]


def file_must_not_exist(play: Play, wanted: str) -> None:
    assert not Path(wanted).exists()


def also_try(play: Play, wanted: list[str]) -> None:
    request = play.case.said["request"][0]
    for name in wanted:
        answer = play.upload(request, filename=name)
        if answer.is_success:
            shown = answer.json()["filename"]
            assert shown
            assert not {"/", "\\", "\0"} & set(shown)
            assert len(shown) <= 255
            if name.startswith("/"):
                assert not Path(name).exists()


def variants(play: Play, wanted: list[dict[str, Any]]) -> None:
    asked = play.asked
    for variant in wanted:
        wishes = asked["hyperparameters"] | {"learning_rate_multiplier": variant["value"]}
        answer = play.submit({**asked, "hyperparameters": wishes})
        assert answer is not None
        assert answer.is_success == (variant["outcome"] == "accept"), (variant, answer.text)


def weights_change(play: Play, wanted: bool) -> None:
    run_dir, run = play.staged
    assert play.is_accepted()
    assert run.base is not None
    before, after = tensors(run_dir / run.base), tensors(run_dir / "export" / "model")
    assert any(not torch.equal(before[name], after[name]) for name in before) == wanted


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def compare_runs(play: Play, wanted: list[dict[str, Any]]) -> None:
    tolerance = play.case.expect["tolerance"]
    results = []
    for number, layout in enumerate(wanted):
        run_dir, run = play.stage(f"layout-{number}")
        training = run.training.model_copy(
            update={
                "micro_batch": layout["micro_batch_size"],
                "global_batch": layout["micro_batch_size"] * layout["accumulation"],
            }
        )
        data = run.data.model_copy(update={"packing": False})
        events = trained(run.model_copy(update={"training": training, "data": data}), run_dir, play.refusals)
        assert not play.refusals
        results.append((losses(events), tensors(run_dir / "export" / "model")))
    (loss_a, weights_a), (loss_b, weights_b) = results
    assert loss_a
    for a, b in zip(loss_a, loss_b, strict=True):
        assert abs(a - b) <= tolerance["loss_rel"] * abs(a)
    assert (
        max((weights_a[name] - weights_b[name]).abs().max().item() for name in weights_a)
        <= tolerance["weights_max_abs"]
    )


def second_example_loss_equal(play: Play, wanted: bool) -> None:
    """The two files differ in their first example alone; both examples share a row."""
    found = []
    for number, name in enumerate(play.uploads):
        play.submit({**play.asked, "training_file": name})
        run_dir, run = play.stage(f"file-{number}")
        tokenizer = tokenizer_for(run, run_dir, lambda *_: None)
        prepared = prepare(run, run_dir, tokenizer, lambda *_: None)
        assert len(prepared.train) == 1
        lines = [line for _, line in prepared.train.origins(0)]
        assert run.base is not None
        decoder = loaded(run_dir / run.base)
        (batch,) = Loader(prepared.train, seed=1, global_batch=1, micro_batch=1).sweep()
        found.append(loss_of(decoder, batch, document=lines.index(2)))
    assert (abs(found[0] - found[1]) <= play.case.expect["tolerance"]) == wanted


def loss_of(decoder: Decoder, batch: Batch, *, document: int) -> float:
    assert batch.documents_BT is not None
    labels_BT = batch.labels_BT.where(batch.documents_BT == document, torch.tensor(-100))
    of_it = Batch(batch.tokens_BT, labels_BT, batch.positions_BT, batch.documents_BT)
    with torch.no_grad():
        parts = decoder.loss(of_it)
    return float(parts.loss_sum)


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(weights.read_shape(folder), alone(CPU), dtype=torch.float32)
    weights.load(decoder, folder)
    return decoder.eval()


def base_logits(play: Play, wanted: str) -> None:
    reference = play.case.reference
    ids = torch.tensor([reference["input_ids"]])
    with torch.no_grad():
        logits = loaded(play.case.folder / "model").logits(ids)[0].float()
    vocabulary = logits.shape[-1]
    expected = torch.tensor(reference["logits_last_position_first_8"])
    torch.testing.assert_close(logits[-1, :8], expected, rtol=0, atol=reference["tolerance_abs"])
    assert logits.argmax(-1).tolist() == reference["argmax_per_position"]
    mean = functional.cross_entropy(logits[:-1], ids[0, 1:]).item()
    assert abs(mean - reference["loss_mean_next_token"]) <= reference["tolerance_abs"]
    assert vocabulary > max(reference["input_ids"])


def artifact_loads_in(play: Play, wanted: str) -> None:
    assert play.is_accepted(), play.refusals
    folder = play.staged[0] / "export" / "model"
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([play.case.reference["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(folder).logits(ids), theirs(ids).logits, rtol=0, atol=2e-4)


def after_training(play: Play, wanted: str) -> None:
    assert wanted == "lm_head is embed_tokens"
    theirs = AutoModelForCausalLM.from_pretrained(play.staged[0] / "export" / "model")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def artifact(play: Play, wanted: str) -> None:
    assert wanted == "embed rows == config.vocab_size"
    theirs = AutoModelForCausalLM.from_pretrained(play.staged[0] / "export" / "model")
    assert theirs.model.embed_tokens.weight.shape[0] == theirs.config.vocab_size


def trained_ids_include(play: Play, wanted: str) -> None:
    assert wanted == "eos of each assistant turn"
    tokenizer, prepared = play.rows
    # Every conversation of the file has an answer or more, each of which ends in one.
    answers = sum(message["role"] == "assistant" for line in lines_of(play) for message in line["messages"])
    assert play.learned.count(tokenizer.eos_id or -1) == answers
    assert prepared.counts.kept == len(lines_of(play))


def lines_of(play: Play) -> list[dict[str, Any]]:
    text = (play.case.folder / "train.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def after_overfit(play: Play, wanted: str) -> None:
    assert wanted == "generation ends with eos"
    run_dir, run = play.stage("overfit")
    training = run.training.model_copy(
        update={"epochs": None, "steps": 120, "lr": 1e-2, "global_batch": 2, "micro_batch": 2, "checkpoint_every": 1000}
    )
    data = run.data.model_copy(update={"seq_len": 96, "overlong": "truncate"})
    run = RunConfig.model_validate(run.model_copy(update={"training": training, "data": data}).model_dump())
    trained(run, run_dir, play.refusals)
    assert not play.refusals
    sampler = Sampler.load(run_dir / "export" / "model", CPU)
    first = lines_of(play)[0]["messages"]
    prompt = sampler.tokenizer.chat(first[:-1])
    assert sampler.complete(prompt, Sampling(temperature=0, max_tokens=80)).finish_reason == "stop"


def bos_count_per_example(play: Play, wanted: int) -> None:
    tokenizer, _ = play.rows
    assert tokenizer.bos_id is not None
    assert [document.count(tokenizer.bos_id) for document in play.documents] == [wanted] * len(play.documents)


CHECKS: dict[str, Check] = {
    "outcome": outcome, "job_status": job_status, "examples": examples, "effective_examples": effective_examples,
    "loss": loss, "steps": steps, "steps_min_if_accepted": steps_min_if_accepted, "keeps_characters": keeps_characters,
    "never_in_tokens": never_in_tokens, "control_ids": control_ids, "file_must_not_exist": file_must_not_exist,
    "also_try": also_try, "variants": variants, "weights_change": weights_change, "compare_runs": compare_runs,
    "second_example_loss_equal": second_example_loss_equal, "base_logits": base_logits,
    "artifact_loads_in": artifact_loads_in, "after_training": after_training, "artifact": artifact,
    "trained_ids_include": trained_ids_include, "after_overfit": after_overfit,
    "bos_count_per_example": bos_count_per_example,
    "at": said_before, "http": said_before, "error": said_before, "tolerance": said_before,
}  # fmt: skip
