"""From wishes to numbers: what a newcomer gets, and what is refused with what would work."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Le
from pydantic import BaseModel, ValidationError

from core import spec
from core.errors import InvalidSpec
from core.files import FileFacts
from core.resolve import BaseFacts, ClusterFacts, Resolution, resolve
from core.spec import JobSpec
from engine.config import RunConfig
from engine.events import Started
from engine.plan import budget, memory
from engine.plan.cluster import Device, Link, as_facts
from engine.plan.recompute import Setting, cost
from engine.plan.search import as_recompute
from tests import make
from tests.engine.train import runs


def upload(name: str, format: Any, *, plain: bool = False, vocab_size: int | None = None) -> FileFacts:
    return FileFacts(
        id=f"file-{name}",
        bytes=1,
        sha256="0" * 64,
        storage_key="k",
        format=format,
        examples=1 if plain else 100,
        characters=4000,
        is_plain_text=plain,
        vocab_size=vocab_size,
    )


UPLOADS = [
    upload("text", "text", plain=True),
    upload("lines", "text"),
    upload("chat", "chat"),
    upload("pairs", "completion"),
    upload("preferences", "preference"),
    upload("questions", "choice"),
    replace(upload("single", "chat"), examples=1),
    replace(upload("two", "chat"), examples=2),
    replace(upload("ids", "tokens"), container="parquet", tokens=6400, max_id=259),
    replace(upload("masked", "tokens"), container="megatron", tokens=6400, max_id=259, masked=True),
    replace(
        upload("long", "tokens"),
        container="parquet",
        tokens=6400,
        max_id=259,
        masked=True,
        longest={"line": 7, "tokens": 66},
    ),
    replace(upload("foreign", "tokens"), container="parquet", tokens=6400, max_id=260),
    upload("tokenizer", None, vocab_size=1000),
    upload("notes", None),
]
FILES = {file.id: file for file in UPLOADS}
BASE = BaseFacts("tiny", make.shape(max_seq_len=128))
SCRATCH: dict[str, Any] = {
    "kind": "pretrain",
    "model": {"architecture": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_seq_len": 128},
    "data": {"train": ["file-text"]},
}
FINETUNE: dict[str, Any] = {"kind": "finetune", "model": {"base": "tiny"}, "data": {"train": ["file-chat"]}}


def resolved(ask: dict[str, Any], cluster: ClusterFacts | None = None, **changes: Any) -> Resolution:
    spec = JobSpec.model_validate(ask | changes)
    return resolve(
        spec, base=BASE if spec.model.base else None, files=FILES, cluster=cluster or ClusterFacts(largest_node=4)
    )


PREFERENCE: dict[str, Any] = FINETUNE | {"data": {"train": ["file-preferences"]}}


def test_pairs_of_answers_are_compared_by_adapters_unless_said_otherwise() -> None:
    run = resolved(PREFERENCE).run
    assert (run.objective, run.data.format) == ("dpo", "preference")
    assert (run.dpo.beta, run.dpo.label_smoothing, run.dpo.sft_coefficient) == (0.1, 0.0, 0.0)
    assert run.lora is not None
    assert (run.lora.rank, run.training.lr, run.training.epochs) == (16, 1e-5, 1.0)
    said = {"type": "dpo", "beta": 0.3, "label_smoothing": 0.1, "sft_coefficient": 0.2}
    run = resolved(PREFERENCE, method={**said, "lora": {"rank": 4, "targets": ["q", "q"]}}).run
    assert (run.dpo.beta, run.dpo.label_smoothing, run.dpo.sft_coefficient) == (0.3, 0.1, 0.2)
    assert run.lora is not None
    assert (run.lora.rank, run.lora.targets) == (4, ("q",))
    run = resolved(PREFERENCE, method={"type": "dpo", "lora": None}).run
    assert (run.lora, run.training.lr) == (None, 1e-6)


def test_what_goes_by_the_validation_loss_has_validations_as_often_as_checkpoints() -> None:
    held_out = FINETUNE | {"data": {"train": ["file-chat"], "validation": 0.1}}
    run = resolved(
        held_out,
        training={"steps": 100, "early_stopping": {"patience": 2, "min_delta": 0.01}},
        artifacts={"checkpoint": "best"},
    ).run
    assert (run.training.checkpoint_every, run.training.eval_every, run.training.keep_best) == (10, 10, True)
    assert run.training.early_stopping is not None
    assert (run.training.early_stopping.patience, run.training.early_stopping.min_delta) == (2, 0.01)
    assert run.export.checkpoint == "best"
    run = resolved(held_out, training={"steps": 100, "keep_best": True, "eval_every": 3}).run
    assert (run.training.eval_every, run.training.keep_best, run.export.checkpoint) == (3, True, "last")
    assert resolved(held_out, training={"steps": 100}).run.training.eval_every is None


@pytest.mark.parametrize(
    ("ask", "train"),
    [(SCRATCH, "file-text"), (FINETUNE, "file-chat"), (PREFERENCE, "file-preferences"), (FINETUNE, "file-masked")],
    ids=["pretrain", "chat", "dpo", "ids"],
)
def test_any_job_may_be_asked_questions(ask: dict[str, Any], train: str) -> None:
    spec = JobSpec.model_validate(ask | {"data": {"train": [train], "evaluation": "file-questions"}})
    assert ("data.evaluation", "file-questions") in list(spec.files())
    run = resolved(ask, data={"train": [train], "evaluation": "file-questions"}).run
    assert run.data.evaluation == Path("data/evaluation.jsonl")
    assert resolved(ask).run.data.evaluation is None


@pytest.mark.parametrize(
    ("data", "param", "word"),
    [
        ({"train": ["file-questions"]}, "data.train.0", "data.evaluation"),
        ({"train": ["file-chat"], "validation": "file-questions"}, "data.validation", "data.evaluation"),
        ({"train": ["file-chat"], "evaluation": "file-chat"}, "data.evaluation", "data.validation"),
        ({"train": ["file-chat"], "evaluation": "file-notes"}, "data.evaluation", "purpose fine-tune"),
    ],
    ids=["trained on", "validated with", "no questions", "not judged"],
)
def test_questions_and_examples_in_one_anothers_place_are_refused(data: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(InvalidSpec, match=word) as refusal:
        resolved(FINETUNE, data=data)
    assert refusal.value.param == param


def test_the_shortest_finetune_is_a_whole_job() -> None:
    resolution = resolved(FINETUNE)
    run = resolution.run
    assert (run.base, run.model, run.tokenizer.type) == (Path("base"), None, "base")
    assert run.objective == "sft"
    assert run.lora is not None
    assert (run.lora.rank, run.lora.alpha) == (16, 32.0)
    assert run.lora.targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert run.export.base_name == BASE.name
    assert run.data.train == (Path("data/train-0.jsonl"),)
    assert (run.data.format, run.data.seq_len, run.data.packing) == ("chat", 128, True)
    training = run.training
    assert (training.epochs, training.steps, training.lr, training.global_batch) == (3.0, None, 2e-4, 16)
    assert (run.parallel.ranks, resolution.slots, run.recompute.mode) == (1, 1, "selective")
    assert (run.device, training.precision) == ("cpu", "fp32")
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


def test_the_shortest_pretrain_is_a_whole_job() -> None:
    run = resolved({"kind": "pretrain", "model": {"preset": "llama-15m"}, "data": {"train": ["file-text"]}}).run
    assert run.model is not None
    assert (run.model.hidden_size, run.model.head_dim, run.model.vocab_size) == (288, 48, 260)
    assert (run.tokenizer.type, run.objective, run.lora, run.training.lr) == ("bytes", "pretrain", None, 3e-4)
    assert run.data.train == (Path("data/train-0.txt"),)


def test_files_of_ids_are_streams_unless_they_say_what_is_learned() -> None:
    run = resolved(SCRATCH, data={"train": ["file-ids"], "seq_len": 64}, tokenizer={"type": "bytes"})
    assert (run.run.objective, run.run.data.format) == ("pretrain", "tokens")
    assert run.run.data.train == (Path("data/train-0.parquet"),)
    assert run.plan["estimated_rows"] == 6400 / 64
    masked = resolved(FINETUNE, data={"train": ["file-masked"]}).run
    assert (masked.objective, masked.data.train) == ("sft", (Path("data/train-0.tar"),))


def test_a_job_keeps_the_date_and_the_template_that_its_conversations_are_shown_with() -> None:
    now = datetime(2020, 1, 2, 3, 4, tzinfo=UTC)
    spec = JobSpec.model_validate(FINETUNE | {"data": {"train": ["file-chat"], "template": "plain"}})
    run = resolve(spec, base=BASE, files=FILES, cluster=ClusterFacts(), now=now).run
    assert (run.data.template, run.data.now) == ("plain", now)
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


def test_a_model_from_scratch_has_what_its_family_has() -> None:
    model = {**SCRATCH["model"], "architecture": "qwen3", "head_dim": 8, "sliding_window": 16}
    run = resolved(SCRATCH, model=model).run
    assert run.model is not None
    assert (run.model.architecture, run.model.head_dim, run.model.sliding_window) == ("qwen3", 8, 16)
    assert (run.model.qk_norm, run.model.attention_bias) == (True, "none")
    biased = resolved(SCRATCH, model=SCRATCH["model"] | {"architecture": "qwen2"}).run.model
    assert biased is not None
    assert (biased.attention_bias, biased.sliding_window) == ("qkv", None)


def test_a_gpt_has_four_times_the_width_and_the_dropout_that_is_asked_for() -> None:
    model = {**SCRATCH["model"], "architecture": "gpt2", "hidden_dropout": 0.1, "attention_dropout": 0.2}
    run = resolved(SCRATCH, model=model).run
    assert run.model is not None
    assert (run.model.ffn_hidden_size, run.model.hidden_dropout, run.model.attention_dropout) == (64, 0.1, 0.2)
    preset = resolved({"kind": "pretrain", "model": {"preset": "gpt2"}, "data": {"train": ["file-text"]}}).run.model
    assert preset is not None
    assert (preset.architecture, preset.max_seq_len, preset.hidden_dropout) == ("gpt2", 1024, 0.0)


@pytest.mark.parametrize(
    ("preset", "heads", "ffn"),
    [("gpt2", 4, 256), ("bloom-560m", 4, 256), ("llama-15m", 4, 192), ("llama-1.1b", 4, 5632)],
)
def test_what_a_preset_has_as_usual_follows_the_sizes_beside_it(preset: str, heads: int, ffn: int) -> None:
    # 4 x 64, and 8/3 x 64 rounded up to 64; TinyLlama's 5632 is its own choice and stays.
    sizes = {"preset": preset, "num_layers": 2, "hidden_size": 64, "num_heads": 4}
    model = resolved({"kind": "pretrain", "model": sizes, "data": {"train": ["file-text"]}}).run.model
    assert model is not None
    assert (model.num_kv_heads, model.ffn_hidden_size, model.head_dim) == (heads, ffn, 16)


def test_a_family_without_a_gate_has_its_other_matrices_adapted() -> None:
    gpt2 = make.shape(architecture="gpt2", num_kv_heads=4, max_seq_len=128)

    def on_gpt2(**method: Any) -> Resolution:
        asked = JobSpec.model_validate(FINETUNE | {"method": {"type": "lora", **method}})
        return resolve(asked, base=BaseFacts("tiny", gpt2), files=FILES, cluster=ClusterFacts(largest_node=4))

    assert on_gpt2().run.lora is not None
    assert on_gpt2(rslora=True, rank=4, alpha=8.0).run.lora.scale == 8 / 4**0.5  # type: ignore[union-attr]
    assert on_gpt2().run.lora.targets == ("q", "k", "v", "o", "up", "down")  # type: ignore[union-attr]
    with pytest.raises(InvalidSpec, match="gpt2 has no 'gate'; choose from q, k, v, o, up, down") as refusal:
        on_gpt2(targets=["q", "gate"])
    assert refusal.value.param == "method.targets"


def test_on_gpus_the_default_is_bf16_with_the_peak_for_mfu() -> None:
    run = resolved(FINETUNE, ClusterFacts(device="cuda", largest_node=8, slot_peak_flops=1e15)).run
    assert (run.device, run.training.precision, run.peak_flops_per_rank) == ("cuda", "bf16", 1e15)
    fp32 = resolved(FINETUNE, ClusterFacts(device="cuda", slot_peak_flops=1e15), training={"precision": "fp32"}).run
    assert fp32.peak_flops_per_rank is None


def test_a_full_finetune_learns_more_slowly() -> None:
    run = resolved(FINETUNE, method={"type": "full"}).run
    assert (run.lora, run.training.lr) == (None, 2e-5)


def test_text_for_a_finetune_is_learned_whole() -> None:
    run = resolved(FINETUNE, data={"train": ["file-lines"]}).run
    assert (run.objective, run.data.train) == ("pretrain", (Path("data/train-0.jsonl"),))


def test_files_keep_their_order_and_get_names_of_ours() -> None:
    run = resolved(SCRATCH, data={"train": ["file-text", "file-lines"], "validation": "file-text"}).run
    assert run.data.train == (Path("data/train-0.txt"), Path("data/train-1.jsonl"))
    assert run.data.validation == Path("data/validation.txt")
    assert resolved(SCRATCH, data={"train": ["file-text"], "validation": 0.05}).run.data.validation == 0.05


@pytest.mark.parametrize(
    ("model", "tokenizer", "size"),
    [
        ({}, None, 260),
        ({}, {"type": "bytes"}, 260),
        ({}, {"train": {"vocab_size": 4096}}, 4096),
        ({"vocab_size": 4608}, {"train": {"vocab_size": 4096}}, 4608),
        ({}, {"file": "file-tokenizer"}, 1000),
    ],
    ids=["default", "bytes", "trained", "padded", "given"],
)
def test_the_vocabulary_is_the_tokenizers_or_larger(model: dict[str, int], tokenizer: Any, size: int) -> None:
    run = resolved(SCRATCH, model=SCRATCH["model"] | model, tokenizer=tokenizer).run
    assert run.model is not None
    assert run.model.vocab_size == size


def test_tokens_become_steps() -> None:
    # 16 rows of 128 tokens are 2048 a step; 10,000 tokens are 4.88 of those.
    training = resolved(SCRATCH, training={"tokens": 10_000}).run.training
    assert (training.steps, training.epochs) == (5, None)


@pytest.mark.parametrize(("steps", "every"), [(100, 10), (7, 1), (100_000, 500)])
def test_a_run_saves_itself_ten_times_and_at_least_each_500_steps(steps: int, every: int) -> None:
    assert resolved(SCRATCH, training={"steps": steps}).run.training.checkpoint_every == every


def test_what_was_said_is_kept() -> None:
    said = {"global_batch": 12, "micro_batch": 3, "lr": 1e-5, "schedule": "linear", "clip": None, "checkpoint_every": 7}
    training = resolved(SCRATCH, training=said | {"steps": 9}).run.training.model_dump()
    assert {name: training[name] for name in said} == said


@pytest.mark.parametrize(
    ("parallel", "gpus", "layout"),
    [
        ({"tensor": 2}, None, (2, 1)),
        ({"tensor": 2}, 4, (2, 2)),
        ({"tensor": 2, "data": 2}, 4, (2, 2)),
        ({"data": 3}, None, (1, 3)),
        ({"tensor": 2, "context": 2}, None, (2, 1)),
        ({"context": 2}, 4, (1, 2)),
        ({"pipeline": 2}, 4, (1, 2)),
        ({"pipeline": 2, "stages": [1, 1]}, None, (1, 1)),
        ("auto", 4, (1, 4)),
        ("auto", None, (1, 1)),
    ],
)
def test_the_axes_fill_the_gpus(parallel: Any, gpus: int | None, layout: tuple[int, int]) -> None:
    resolution = resolved(SCRATCH, parallel=parallel, resources={"gpus": gpus})
    assert (resolution.run.parallel.tensor, resolution.run.parallel.data) == layout
    context = 1 if parallel == "auto" else parallel.get("context", 1)
    pipeline = 1 if parallel == "auto" else parallel.get("pipeline", 1)
    assert (resolution.run.parallel.context, resolution.run.parallel.pipeline) == (context, pipeline)
    assert resolution.slots == layout[0] * layout[1] * context * pipeline


@pytest.mark.parametrize(
    ("asked", "shared"),
    [
        ({}, (True, False, False)),
        ({"shard_gradients": True}, (True, True, False)),
        ({"shard_weights": True}, (True,) * 3),
    ],
)
def test_replicas_share_what_was_asked_and_what_it_includes(asked: dict[str, bool], shared: tuple[bool, ...]) -> None:
    parallel = resolved(SCRATCH, parallel={"data": 2, **asked}).run.parallel
    assert (parallel.shard_optimizer, parallel.shard_gradients, parallel.shard_weights) == shared


def test_sharing_weights_without_gradients_is_refused_in_words() -> None:
    with pytest.raises(ValidationError, match=r"shard_weights includes shard_gradients, which is false"):
        resolved(SCRATCH, parallel={"data": 2, "shard_weights": True, "shard_gradients": False})


def test_three_replicas_get_a_batch_that_divides() -> None:
    training = resolved(SCRATCH, parallel={"data": 3}).run.training
    assert (training.global_batch, training.micro_batch) == (18, 6)


@pytest.mark.parametrize(
    ("pipeline", "rows", "micro_batch"), [(1, 64, 64), (2, 64, 8), (4, 64, 4), (4, 16, 1), (4, 6, 1)]
)
def test_each_rank_of_a_pipeline_gets_four_micro_batches_where_there_are_rows_for_them(
    pipeline: int, rows: int, micro_batch: int
) -> None:
    model = SCRATCH["model"] | {"num_layers": 4}
    said = {"parallel": {"pipeline": pipeline}, "training": {"global_batch": rows}}
    assert resolved(SCRATCH, model=model, **said).run.training.micro_batch == micro_batch


def test_an_automatic_layout_splits_matrices_only_when_memory_asks_for_it() -> None:
    spec = {
        "kind": "pretrain",
        "model": {"preset": "llama-7b"},
        "data": {"train": ["file-text"]},
        "resources": {"gpus": 8},
    }
    # 7B: 13.5 GB of weights and 27 GB of gradients in bf16; the optimizer's share is another 13.5 GB on 8 replicas.
    roomy = resolved(spec, ClusterFacts(device="cuda", largest_node=8, slot_memory_bytes=80 * 2**30)).run.parallel
    tight = resolved(spec, ClusterFacts(device="cuda", largest_node=8, slot_memory_bytes=40 * 2**30)).run.parallel
    assert (roomy.tensor, roomy.data) == (1, 8)
    assert (tight.tensor, tight.data, tight.sequence) == (2, 4, True)


def test_without_any_node_a_job_may_need_whatever_it_likes() -> None:
    assert resolved(SCRATCH, ClusterFacts(), parallel={"tensor": 4, "data": 16}).slots == 64


def test_masks_are_planned_for_where_a_row_may_hold_several_documents() -> None:
    def activations(file: str, *, packing: bool = True) -> int:
        data = {"train": [file], "packing": packing}
        plan = resolved(SCRATCH, data=data, training={"steps": 10, "micro_batch": 2}).plan
        return int(plan["bytes_per_rank"]["activations"])

    # A number in fp32 for each of 128 x 128 pairs, in two rows.
    assert activations("file-lines") - activations("file-text") == 4 * 2 * 128 * 128
    assert activations("file-lines", packing=False) == activations("file-text")


def test_the_plan_says_what_it_will_cost() -> None:
    plan = resolved(SCRATCH, training={"steps": 10}).plan
    assert plan["parameters"] == plan["trainable_parameters"] == 2 * (4 * 256 + 3 * 16 * 64 + 32) + 16 + 260 * 16
    assert (plan["estimated_steps"], plan["estimated_tokens"]) == (10, 10 * 16 * 128)
    assert plan["bytes_per_rank"]["total"] > 16 * plan["parameters"]


def test_a_step_of_fewer_rows_than_the_batch_is_planned_as_the_rows_there_are() -> None:
    few = {"data": {"train": ["file-single"], "packing": False}, "training": {"epochs": 3}}
    plan = resolved(FINETUNE, **few).plan
    # One row, three times; a batch of 16 would have seen 48 rows in one step.
    assert (plan["estimated_rows"], plan["estimated_steps"], plan["estimated_tokens"]) == (1, 3, 3 * 1 * 128)
    assert plan["estimated_epochs"] == 3
    alone = resolved(FINETUNE, data=few["data"], training={"epochs": 3, "global_batch": 1}).plan
    assert plan["flops_per_step"] == alone["flops_per_step"]
    tokens = resolved(FINETUNE, data=few["data"], training={"tokens": 10 * 128})
    assert tokens.run.training.steps == 10


@pytest.mark.parametrize(
    ("data", "training", "rows", "steps"),
    [
        # By hand: 5 % of two examples is none, but one is held out at least; and of many, a twentieth.
        pytest.param({"train": ["file-two"], "validation": 0.05, "packing": False}, {"epochs": 3}, 1, 3, id="of two"),
        pytest.param(
            {"train": ["file-chat"], "validation": 0.05, "packing": False}, {"epochs": 3}, 95, 18, id="of a hundred"
        ),
        # 100 rows 1.1 times are 11 steps of 10, which floats make 110.00000000000001 rows.
        pytest.param(
            {"train": ["file-chat"], "packing": False},
            {"epochs": 1.1, "global_batch": 10},
            100,
            11,
            id="part of an epoch",
        ),
        # A thousand tokens would fill eight rows of 128, but an example is never in two.
        pytest.param({"train": ["file-two"]}, {"epochs": 3}, 2, 3, id="packed"),
        pytest.param({"train": ["file-two"]}, {"epochs": 3, "global_batch": 32}, 2, 3, id="a larger batch asked for"),
    ],
)
def test_rows_are_counted_as_the_engine_counts_them(data: Any, training: Any, rows: int, steps: int) -> None:
    plan = resolved(FINETUNE, data=data, training=training).plan
    assert (plan["estimated_rows"], plan["estimated_steps"]) == (rows, steps)


@pytest.mark.parametrize("kind", [runs.COMPLETION, runs.PREFERENCE], ids=["answers", "pairs"])
@pytest.mark.parametrize(
    ("share", "training"),
    [
        (None, {"epochs": 3, "global_batch": 32}),
        (0.05, {"epochs": 2, "global_batch": 16}),
        (0.3, {"epochs": 1.5, "global_batch": 4, "micro_batch": 2}),
    ],
)
def test_the_engine_begins_with_the_rows_and_steps_that_were_planned(
    tmp_path: Path, kind: dict[str, Any], share: float | None, training: dict[str, Any]
) -> None:
    data = {"packing": False, "validation": share, "seq_len": 32}
    run = runs.config(**kind | {"data": kind["data"] | data}, training={"steps": None, **training})
    started = next(event for event in runs.events_of(tmp_path, run) if isinstance(event, Started))
    # The nine examples that the run has.
    nine = replace(FILES["file-pairs"], id="file-nine", examples=9, format=kind["data"]["format"])
    spec = JobSpec.model_validate(FINETUNE | {"data": {"train": [nine.id], **data}, "training": training})
    plan = resolve(spec, base=BASE, files={nine.id: nine}, cluster=ClusterFacts(largest_node=4)).plan
    assert (plan["estimated_rows"], plan["estimated_steps"]) == (started.train_rows, started.total_steps)


def test_documents_of_ids_that_are_longer_than_a_row_are_refused_unless_a_job_says_what_becomes_of_them() -> None:
    long = {"train": ["file-long"], "seq_len": 64}
    with pytest.raises(InvalidSpec) as refused:
        resolved(FINETUNE, data={"train": ["file-masked", "file-long"], "seq_len": 64})
    assert refused.value.param == "data.train.1"
    assert "document 7 of file-long has 66 ids" in refused.value.message
    assert "set data.seq_len to 65 or data.overlong" in refused.value.message
    # A row of n has n + 1 ids, as each but the first is predicted.
    for data in (long | {"seq_len": 65}, long | {"overlong": "drop"}, long | {"overlong": "truncate"}):
        assert resolved(FINETUNE, data=data).run.objective == "sft"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_time_of_such_a_step_is_that_of_a_batch_of_these_rows(ranks: int) -> None:
    toy = Device("toy", {"fp32": 1e9}, bandwidth=1e12, efficiency=1.0, launch=0.0, measured=True)
    cluster = ClusterFacts(largest_node=2, rates=as_facts(toy, Link(1e9, 1e-5)))
    parallel = {"data": ranks}
    of_two = {"data": {"train": ["file-two"], "packing": False}, "parallel": parallel}
    few = resolved(FINETUNE, cluster, training={"steps": 5}, **of_two).plan
    two = resolved(FINETUNE, cluster, training={"steps": 5, "global_batch": 2}, **of_two).plan
    for number in ("step_seconds", "eta_seconds", "tokens_per_second", "estimated_tokens"):
        assert few[number] == pytest.approx(two[number]), number
    # A thousand tokens fill eight rows.
    eight = resolved(FINETUNE, cluster, training={"steps": 5}, parallel=parallel).plan
    assert eight["step_seconds"] == pytest.approx(4 * few["step_seconds"], rel=0.01)


REFUSALS: list[Any] = [
    pytest.param(SCRATCH, {"parallel": {"tensor": 3}}, "parallel.tensor", "num_heads=4; try 1", id="heads"),
    pytest.param(
        SCRATCH,
        {"parallel": {"tensor": 2}, "model": SCRATCH["model"] | {"hidden_size": 24, "num_heads": 6, "num_kv_heads": 3}},
        "parallel.tensor", "num_kv_heads=3; try 1", id="kv heads",
    ),
    pytest.param(
        SCRATCH,
        {"parallel": {"tensor": 4}, "model": SCRATCH["model"] | {"num_heads": 2, "ffn_hidden_size": 33}},
        "parallel.tensor",
        "num_heads=2; try 1",
        id="heads and width together",
    ),
    pytest.param(
        SCRATCH, {"parallel": {"tensor": 4, "data": 2}}, "parallel", "needs 8 slots; the largest node has 4", id="ranks"
    ),
    pytest.param(
        SCRATCH, {"resources": {"gpus": 8}}, "resources.gpus", "needs 8 slots; the largest node has 4", id="gpus"
    ),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-text"], "seq_len": 129}}, "data.seq_len", "use at most that", id="too long"
    ),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-text"], "seq_len": 101}, "parallel": {"tensor": 2, "sequence": True}},
        "parallel.sequence", "try seq_len=100", id="sequence",
    ),
    pytest.param(SCRATCH, {"parallel": {"virtual": 2}}, "parallel.virtual", "needs a pipeline", id="virtual"),
    pytest.param(
        SCRATCH, {"parallel": {"pipeline": 2, "virtual": 2}}, "parallel.virtual", "each needs a layer; try virtual=1",
        id="more stages than layers",
    ),
    pytest.param(
        SCRATCH, {"parallel": {"pipeline": 2, "stages": [2, 1]}}, "parallel.stages", "that sum up to num_layers=2",
        id="stages of other layers",
    ),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-text"], "seq_len": 102}, "parallel": {"context": 2}}, "parallel.context",
        "seq_len=102 must be a multiple of 4; try seq_len=100", id="rows that context cannot share",
    ),
    pytest.param(
        SCRATCH,
        {
            "data": {"train": ["file-text"], "seq_len": 100},
            "parallel": {"context": 2, "tensor": 4, "sequence": True}, "resources": {"gpus": 8},
        },
        "parallel", "needs 8 slots; the largest node has 4: lower tensor x context x data", id="context ranks",
    ),
    pytest.param(
        SCRATCH, {"parallel": {"tensor": 2, "context": 2}, "resources": {"gpus": 6}}, "resources.gpus",
        "no multiple of parallel.tensor=2 x parallel.context=2; use 4 or 8", id="gpus that axes do not divide",
    ),
    pytest.param(
        SCRATCH, {"parallel": {"context": 2, "data": 2}, "resources": {"gpus": 2}}, "resources.gpus",
        "tensor=1 x context=2 x data=2 = 4", id="inconsistent gpus with context",
    ),
    pytest.param(SCRATCH, {"resources": {"nodes": 2}}, "resources.nodes", "use 1 node", id="nodes"),
    pytest.param(
        SCRATCH, {"parallel": {"tensor": 2}, "resources": {"gpus": 3}}, "resources.gpus", "use 2 or 4", id="odd gpus"
    ),
    pytest.param(
        SCRATCH, {"parallel": {"tensor": 2, "data": 2}, "resources": {"gpus": 2}}, "resources.gpus",
        "tensor=2 x data=2 = 4", id="inconsistent gpus",
    ),
    pytest.param(
        SCRATCH, {"parallel": {"data": 4}, "training": {"global_batch": 6}}, "training.global_batch", "use 4 or 8",
        id="batch over replicas",
    ),
    pytest.param(
        SCRATCH, {"training": {"global_batch": 6, "micro_batch": 4}}, "training.global_batch", "use 4 or 8",
        id="batch over micro-batches",
    ),
    pytest.param(
        SCRATCH, {"training": {"keep_best": True}}, "training.keep_best", "set data.validation", id="best of nothing"
    ),
    pytest.param(
        SCRATCH, {"training": {"early_stopping": {"patience": 2}}}, "training.early_stopping", "set data.validation",
        id="patience with nothing",
    ),
    pytest.param(
        SCRATCH, {"artifacts": {"checkpoint": "best"}}, "artifacts.checkpoint", "set data.validation", id="best result"
    ),
    pytest.param(SCRATCH, {"artifacts": {"gguf": True}}, "artifacts.gguf", "tokenizer", id="gguf of bytes"),
    pytest.param(
        SCRATCH, {"model": {"preset": "gpt2"}, "artifacts": {"gguf": True}}, "artifacts.gguf",
        "not available for gpt2; only for llama, mistral, qwen2, qwen3", id="gguf of gpt2",
    ),
    pytest.param(SCRATCH, {"data": {"train": ["file-chat"]}}, "data.train", 'kind "finetune"', id="chat"),
    pytest.param(SCRATCH, {"data": {"train": ["file-masked"]}}, "data.train", 'kind "finetune"', id="ids with a mask"),
    pytest.param(FINETUNE, {"data": {"train": ["file-foreign"]}}, "data.train.0", "the id 260", id="another's ids"),
    pytest.param(SCRATCH, {"data": {"train": ["file-ids"]}}, "tokenizer", "tokenizer.json", id="ids of no tokenizer"),
    pytest.param(
        SCRATCH | {"model": SCRATCH["model"] | {"vocab_size": 128256}},
        {"data": {"train": ["file-foreign"]}, "tokenizer": {"type": "bytes"}}, "data.train.0",
        "the tokenizer's vocabulary has 260 entries", id="ids that bytes are not",
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-masked", "file-ids"]}}, "data.train.0", "file-ids does not",
        id="some ids with a mask and some without",
    ),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-ids"]}, "tokenizer": {"train": {"vocab_size": 300}}},
        "tokenizer.train", "no text", id="a tokenizer of ids",
    ),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-text"], "template": "plain"}}, "data.template", "leave it out", id="template"
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-preferences"]}, "method": {"type": "lora"}}, "method.type", '"dpo" alone',
        id="preference without dpo",
    ),
    pytest.param(FINETUNE, {"method": {"type": "dpo"}}, "method.type", "these files are chat data", id="dpo on chat"),
    pytest.param(
        SCRATCH, {"data": {"train": ["file-preferences"]}}, "data.train", 'kind "finetune"', id="preference, pretrain"
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-chat", "file-pairs"]}}, "data.train.1", "one format at a time", id="mixed"
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-single"], "validation": 0.5}}, "data.validation", "of a single example",
        id="a share of one",
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-chat"], "validation": "file-text"}}, "data.validation",
        "the files before it are chat", id="mixed validation",
    ),
    pytest.param(
        FINETUNE, {"data": {"train": ["file-chat"], "format": "completion"}}, "data.format", 'say "chat"', id="format"
    ),
    pytest.param(FINETUNE, {"data": {"train": ["file-notes"]}}, "data.train.0", "purpose fine-tune", id="notes"),
    pytest.param(FINETUNE, {"tokenizer": {"type": "bytes"}}, "tokenizer", "leave this out", id="other ids"),
    pytest.param(SCRATCH, {"tokenizer": {"from": "base"}}, "tokenizer.from", "there is no base", id="no base"),
    pytest.param(SCRATCH, {"tokenizer": {"file": "file-text"}}, "tokenizer.file", "no tokenizer", id="text"),
    pytest.param(SCRATCH, {"method": {"type": "lora"}}, "method.type", '"base"', id="lora from scratch"),
    pytest.param(
        SCRATCH, {"model": SCRATCH["model"] | {"vocab_size": 100}}, "model.vocab_size", "at least 260", id="vocabulary"
    ),
    pytest.param(
        SCRATCH, {"model": {"architecture": "llama", "num_layers": 2, "num_heads": 4}}, "model.hidden_size", "needs",
        id="missing size",
    ),
    pytest.param(
        SCRATCH, {"model": {"preset": "llama-15m", "sliding_window": 8}}, "model.sliding_window", "use mistral",
        id="window of a family that has none",
    ),
    pytest.param(
        SCRATCH, {"model": {"preset": "gpt2", "num_kv_heads": 4}}, "model.num_kv_heads", "use num_kv_heads=12",
        id="groups of a family that has none",
    ),
    pytest.param(
        SCRATCH, {"model": {"preset": "llama-15m", "hidden_dropout": 0.1}}, "model.hidden_dropout", "use gpt2",
        id="dropout of a family that has none",
    ),
    pytest.param(
        SCRATCH, {"model": SCRATCH["model"] | {"num_heads": 3}}, "model.num_heads", "try num_heads=2", id="head size"
    ),
    pytest.param(
        SCRATCH, {"model": SCRATCH["model"] | {"num_kv_heads": 3}}, "model.num_kv_heads", "try 1", id="key heads",
    ),
    pytest.param(FINETUNE, {"model": SCRATCH["model"]}, "model.base", "starts from a model", id="tune nothing"),
    *(
        pytest.param(SCRATCH, {"model": SCRATCH["model"] | {"rope_scaling": scaling}}, param, says, id=f"rope {says}")
        for scaling, param, says in [
            ({"rope_type": "longrope"}, "model.rope_scaling", "supported: default, linear"),
            ({"rope_type": "linear"}, "model.rope_scaling", "needs factor"),
            ({"rope_type": "linear", "factor": 0}, "model.rope_scaling.factor", "such as 2.0"),
            ({"rope_type": "linear", "factor": 2, "beta": 1}, "model.rope_scaling.beta", "not supported"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "changes", "param", "says"), REFUSALS)
def test_what_cannot_run_is_refused_with_what_would(ask: dict[str, Any], changes: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        resolved(ask, **changes)
    assert refusal.value.param == param
    assert says in refusal.value.message


def test_what_cannot_fit_is_refused_with_the_item_that_breaks_it() -> None:
    spec = {"kind": "pretrain", "model": {"preset": "llama-7b"}, "data": {"train": ["file-text"]}}
    with pytest.raises(InvalidSpec, match=r"GiB of it optimizer; a slot has 24 GiB.*parallel.tensor"):
        resolved(spec, ClusterFacts(device="cuda", largest_node=1, slot_memory_bytes=24 * 2**30))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"training": {"lr": "2e-5"}}, "training.lr"),
        ({"training": {"steps": True}}, "training.steps"),
        ({"training": {"steps": 10**30}}, "training.steps"),
        ({"training": {"lr": float("nan")}}, "training.lr"),
        ({"training": {"learning_rate": 1.0}}, "training.learning_rate"),
        ({"data": {"train": ["file-text"], "packing": "yes"}}, "data.packing"),
        ({"data": {"train": ["../../etc/passwd"]}}, "data.train.0"),
        ({"labels": {"team": "a\x00b"}}, "labels.team"),
        ({"max_runtime": "99999999999999d"}, "max_runtime"),
        # Each within what a timedelta holds, and their sum beyond it.
        ({"max_runtime": "999999999d999999999h"}, "max_runtime"),
        ({"max_runtime": "0s"}, "max_runtime"),
        ({"max_runtime": True}, "max_runtime"),
        ({"max_runtime": "soon"}, "max_runtime"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"method": {"type": "lora", "rank": 1025}}, "method.lora.rank"),
        # More than fp32 holds; nothing could be learned with any of these.
        ({"method": {"type": "lora", "alpha": 1e308}}, "method.lora.alpha"),
        ({"training": {"weight_decay": 1e308}}, "training.weight_decay"),
        ({"model": SCRATCH["model"] | {"norm_eps": 1e308}}, "model.norm_eps"),
        ({"model": SCRATCH["model"] | {"rope_theta": 1e308}}, "model.rope_theta"),
        ({"model": SCRATCH["model"] | {"init_std": 1e308}}, "model.init_std"),
        ({"artifacts": {"gguf": True, "merged": False}}, "artifacts"),
        # Each of these would be tried divisor by divisor, or layer by layer, for minutes.
        ({"resources": {"gpus": 2**31 - 1}}, "resources.gpus"),
        ({"model": SCRATCH["model"] | {"num_heads": 2**31 - 1}}, "model.num_heads"),
        ({"model": SCRATCH["model"] | {"num_layers": 2**31 - 1}}, "model.num_layers"),
        ({"model": {"base": "x\x00"}}, "model.base"),
    ],
)  # fmt: skip
def test_a_spec_takes_no_guesses(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        JobSpec.model_validate(SCRATCH | change)
    assert where in {".".join(map(str, error["loc"])) for error in refusal.value.errors()}


def test_no_bound_of_a_spec_is_overruled_by_a_wider_one() -> None:
    """Of two bounds of one kind pydantic takes the last; a field's default comes before its type."""
    models = [model for model in vars(spec).values() if isinstance(model, type) and issubclass(model, BaseModel)]
    most = {
        (model.__name__, name): [float(str(bound.le)) for bound in field.metadata if isinstance(bound, Le)]
        for model in models
        for name, field in model.model_fields.items()
    }
    assert sum(len(bounds) > 1 for bounds in most.values()) >= 2
    assert [where for where, bounds in most.items() if bounds and bounds[-1] != min(bounds)] == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43_200), ("1d6h", 108_000), ("90m", 5400), (30, 30), ("PT1H", 3600)]
)
def test_a_runtime_is_a_duration(text: Any, seconds: float) -> None:
    ask = JobSpec.model_validate(SCRATCH | {"max_runtime": text})
    assert ask.max_runtime is not None
    assert ask.max_runtime.total_seconds() == seconds
    assert JobSpec.model_validate(ask.model_dump(mode="json", exclude_unset=True)) == ask


def test_recomputation_is_asked_for_by_operation_or_by_budget() -> None:
    named = resolved(FINETUNE, recompute={"mode": "selective", "operations": ["activation", "norm"]})
    assert named.run.recompute.replayed == {"norm", "activation"}
    assert named.plan["recomputed"] == ["norm", "activation"]
    papers = resolved(FINETUNE, recompute={"mode": "selective", "operations": ["attention_core", "gelu", "norm"]})
    assert papers.run.recompute.replayed == {"attention_core", "activation", "norm"}
    # A row of 128 tokens of this model takes less than a MiB.
    roomy = resolved(FINETUNE, recompute={"mode": "budget", "budget_gib": 1})
    assert (roomy.run.recompute.budget_gib, roomy.plan["recomputed"]) == (1.0, [])


def test_what_is_recomputed_by_itself_costs_no_matrix_product_unless_scores_would_be_kept() -> None:
    assert resolved(FINETUNE).plan["recomputed"] == ["norm", "activation"]
    gpt = {"architecture": "gpt2", "hidden_dropout": 0.1}
    scratch = SCRATCH | {"model": SCRATCH["model"] | gpt}
    assert resolved(scratch).plan["recomputed"] == ["norm", "activation", "dropout"]
    scratch = SCRATCH | {"model": SCRATCH["model"] | gpt | {"attention_dropout": 0.1}}
    assert set(resolved(scratch).plan["recomputed"]) == {"norm", "activation", "dropout", "attention_core"}


@pytest.mark.parametrize(
    ("recompute", "param", "says"),
    [
        ({"mode": "full", "operations": ["norm"]}, "recompute.operations", 'belong to mode "selective"'),
        ({"mode": "budget"}, "recompute.budget_gib", 'what mode "budget" needs'),
        ({"mode": "budget", "budget_gib": 1e-6}, "recompute.budget_gib", "is too little"),
    ],
)
def test_recomputation_that_can_not_be_is_refused(recompute: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says) as refusal:
        resolved(FINETUNE, recompute=recompute)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"decay": 0.1}, 'belongs to schedule "wsd"'),
        ({"schedule": "wsd", "warmup": 0.5, "decay": 0.6}, "more than all together"),
    ],
)
def test_a_rate_that_falls_where_it_does_not_or_before_it_has_risen_is_refused(
    training: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidSpec, match=says) as refusal:
        resolved(FINETUNE, training=training)
    assert refusal.value.param == "training.decay"


# Time, and layouts that are left open


def rates(**more: Any) -> dict[str, Any]:
    """A node that computes at a billion FLOP/s a slot and has memory and links so fast that nothing else counts."""
    device = Device("toy", {"fp32": 1e9, "bf16": 2e9}, bandwidth=1e30, efficiency=1.0, measured=True)
    return as_facts(device, Link(1e30)) | more


CALIBRATED = ClusterFacts(largest_node=4, slot_memory_bytes=2**34, rates=rates())


def test_a_plan_says_how_long_a_step_takes_where_a_node_is_calibrated() -> None:
    plan = resolved(SCRATCH, CALIBRATED, training={"steps": 10}).plan
    # A job alone on a host has the cores of its four slots. 16 rows of 128 tokens; six operations a weight, of two
    # layers and the output, and four times three for each of 128 x 128 pairs and 16 features, over both layers.
    tokens = 16 * 128
    flops = 6 * tokens * (2 * (4 * 256 + 3 * 16 * 64) + 260 * 16) + 12 * 2 * tokens * 128 * 16
    assert plan["step_seconds"] == pytest.approx(flops / 4e9)
    assert plan["tokens_per_second"] == pytest.approx(tokens / plan["step_seconds"])
    assert plan["eta_seconds"] == pytest.approx(10 * plan["step_seconds"])
    assert sum(plan["seconds_by_term"].values()) == pytest.approx(plan["step_seconds"])
    assert plan["calibration"] == "measured on a node (toy)"
    # 4000 characters of bytes are 32 rows.
    assert plan["estimated_epochs"] == pytest.approx(10 * 16 / plan["estimated_rows"])


def test_a_plan_says_that_no_node_is_calibrated_yet() -> None:
    plan = resolved(SCRATCH).plan
    assert plan["calibration"].startswith("not calibrated yet")
    assert plan["step_seconds"] is plan["eta_seconds"] is None


@pytest.mark.parametrize("rated", [False, True], ids=["nobody measured", "measured"])
def test_auto_replays_the_cheapest_set_that_fits_and_whole_layers_only_where_nothing_else_does(rated: bool) -> None:
    model = {"architecture": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "max_seq_len": 128,
             "hidden_dropout": 0.1, "attention_dropout": 0.1}  # fmt: skip
    ask = SCRATCH | {"model": model}
    setting = {"training": {"steps": 10, "global_batch": 8, "micro_batch": 8}}

    def on(size: int) -> RunConfig:
        facts = ClusterFacts(largest_node=4, slot_memory_bytes=size, rates=rates() if rated else None)
        return resolved(ask, facts, **setting).run

    whole = on(2**40)
    assert whole.recompute.replayed == frozenset()
    assert whole.model is not None
    most = max(memory.of_run(whole, whole.model), key=lambda one: one.total).total
    seen = set()
    for percent in range(100, 20, -4):
        size = int(most / 0.9 * percent / 100)
        try:
            run = on(size)
        except InvalidSpec:
            break
        # Brute force: no set with fewer operations done again fits.
        one = Setting.of(run, whole.model)
        fitting = [
            cost(one, some).flops
            for some in budget.choices(one)
            if memory.of_run(run.model_copy(update={"recompute": as_recompute(some)}), whole.model)[0].fits(size)
        ]
        assert cost(one, run.recompute.replayed).flops == min(fitting)
        seen.add(run.recompute.replayed)
    # Between nothing and whole layers there are several.
    assert len(seen) > 4


def test_of_a_pipeline_auto_lets_late_stages_replay_less() -> None:
    spread = SCRATCH | {
        "model": {"architecture": "llama", "num_layers": 8, "hidden_size": 64, "num_heads": 4, "max_seq_len": 128}
    }
    said = {"parallel": {"pipeline": 4}, "training": {"steps": 10, "global_batch": 8, "micro_batch": 1}}
    whole = resolved(spread, ClusterFacts(largest_node=4, slot_memory_bytes=2**40), **said).run
    assert whole.model is not None
    most = max(memory.of_run(whole, whole.model), key=lambda one: one.total).total
    tight = resolved(spread, ClusterFacts(largest_node=4, slot_memory_bytes=int(most / 0.9 * 0.95)), **said).run
    by_rank = budget.replayed_by_rank(tight, whole.model)
    setting = Setting.of(tight, whole.model)
    work = [cost(setting, some).flops for some in by_rank]
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]


def test_auto_takes_the_fastest_layout_that_fits_where_it_is_known_how_fast_the_nodes_are() -> None:
    # Links that cost a second a message: whoever says least is fastest, and a pipeline says more than replicas.
    slow = replace(CALIBRATED, rates=rates(inside={"bytes_per_second": 1e30, "latency": 1.0}))
    parallel = resolved(SCRATCH, slow, resources={"gpus": 4}).run.parallel
    assert (parallel.data, parallel.tensor, parallel.pipeline, parallel.context) == (4, 1, 1, 1)
    # Samples are answered without a pipeline.
    said = {"training": {"steps": 10, "samples": 2}, "data": SCRATCH["data"] | {"validation": 0.5}}
    assert resolved(SCRATCH, slow, resources={"gpus": 4}, **said).run.parallel.pipeline == 1


def test_what_fits_in_no_layout_is_refused_with_why_the_obvious_ones_do_not() -> None:
    small = replace(CALIBRATED, slot_memory_bytes=2**16)
    with pytest.raises(
        InvalidSpec, match=r"no layout of 4 slots fits: replicas alone refused: a rank needs"
    ) as refused:
        resolved(SCRATCH, small, resources={"gpus": 4})
    assert refused.value.param == "resources"


def test_no_more_is_replayed_than_memory_requires() -> None:
    roomy = ClusterFacts(largest_node=4, slot_memory_bytes=2**34)
    training = {"steps": 10, "micro_batch": 4}
    plan = resolved(SCRATCH, roomy, training=training).plan
    assert plan["recomputed"] == []
    needs = plan["bytes_per_rank"]["total"]
    # A tenth stays free; a little less than what it needs is too little to replay nothing.
    tight = replace(roomy, slot_memory_bytes=int(needs / 0.9 * 0.99))
    assert resolved(SCRATCH, tight, training=training).plan["recomputed"] != []
    # Where nobody knows how much there is, what costs next to nothing is replayed.
    unknown = replace(roomy, slot_memory_bytes=None)
    assert resolved(SCRATCH, unknown, training=training).plan["recomputed"] == ["norm", "activation"]


def test_what_a_job_says_of_stalls_replicas_and_going_back_reaches_its_run() -> None:
    asked = {"stall_seconds": 30, "check_replicas_every": None, "non_finite": "roll_back", "roll_back_checkpoints": 2}
    run = resolved(SCRATCH, training={"steps": 10, **asked}).run
    assert (run.stall_seconds, run.training.check_replicas_every, run.training.roll_back_checkpoints) == (30.0, None, 2)
    usual = resolved(SCRATCH, training={"steps": 10}).run
    assert (usual.stall_seconds, usual.training.check_replicas_every) == (600.0, 100)


def test_a_job_cannot_go_back_by_more_checkpoints_than_it_keeps() -> None:
    with pytest.raises(InvalidSpec, match="which is 1"):
        resolved(SCRATCH, training={"steps": 10, "keep_checkpoints": 1, "roll_back_checkpoints": 2})
