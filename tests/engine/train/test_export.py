"""What a run leaves behind, as `transformers`, `peft` and a sceptic with sha256sum see it."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from engine import assemble, checkpoint, export, trainer, weights
from engine.checkpoint import BadCheckpoint
from engine.failure import RunFailure
from engine.mesh import alone
from engine.model import Decoder
from engine.progress import Reporter
from engine.stop import StopWish
from tests.engine.train import runs

CPU = torch.device("cpu")
IDS = torch.arange(2 * 20).view(2, 20)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run from random weights, whose export is a base for others."""
    folder = tmp_path_factory.mktemp("base")
    runs.events_of(folder, runs.config(training={"steps": 3}))
    return folder


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A LoRA run on that base."""
    folder = tmp_path_factory.mktemp("adapted")
    run = runs.config(
        **runs.COMPLETION,
        model=None,
        base=str(base / "export" / "model"),
        tokenizer={"type": "base"},
        lora={"rank": 4, "alpha": 8.0},
        training={"steps": 3, "lr": 0.02},
        export={"base_name": "tiny"},
    )
    runs.write(folder, run)
    (folder / "spec.json").write_text('{"kind": "finetune"}')
    assert not [event for event in runs.events_of(folder, run) if event.type == "log"]
    return folder


def logits(folder):
    """Ours, of an exported model."""
    decoder = Decoder(weights.read_shape(folder), alone(CPU), dtype=torch.float32)
    weights.load(decoder, folder)
    return decoder.logits(IDS)


def theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_transformers_loads_the_export_and_gives_the_same_logits(base):
    folder = base / "export" / "model"
    model = theirs(folder)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits(folder), rtol=1e-5, atol=1e-5)
    assert model.generation_config.pad_token_id is not None


def test_a_base_that_never_chatted_stops_at_the_end_of_a_turn_and_samples_as_its_makers_said(base, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    before = base / "export" / "model"
    shutil.copytree(before, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.6}')
    run = runs.config(
        objective="sft",
        data={"train": ["data/train.jsonl"], "format": "completion", "seq_len": 32},
        model=None, base="base", tokenizer={"type": "base"}, training={"steps": 1},
    )  # fmt: skip
    runs.events_of(tmp_path, run)
    generation = GenerationConfig.from_pretrained(tmp_path / "export" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export" / "model")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert (generation.eos_token_id, generation.temperature) == (ends, 0.6)
    assert (generation.bos_token_id, generation.pad_token_id) == (tokenizer.bos_token_id, tokenizer.pad_token_id)


def test_an_adapter_has_the_tokenizer_and_the_ends_that_the_merged_model_has(adapted):
    from transformers import AutoTokenizer, GenerationConfig

    chat = [{"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": "yes"}]
    said = []
    for part in ("adapter", "model"):
        folder = adapted / "export" / part
        generation, tokenizer = GenerationConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        said.append(
            (generation.eos_token_id, generation.pad_token_id, tokenizer.apply_chat_template(chat)["input_ids"])
        )
    assert said[0] == said[1]
    assert said[0][2].count(said[0][0][1]) == 2, "each turn ends in the token that ends generation"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_adapter_and_gives_the_logits_of_the_merged_model(base, adapted):
    from peft import PeftModel

    model = PeftModel.from_pretrained(theirs(base / "export" / "model"), adapted / "export" / "adapter")
    with torch.no_grad():
        got = model(IDS).logits
    torch.testing.assert_close(got, logits(adapted / "export" / "model"), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, logits(base / "export" / "model"), atol=1e-3)


def test_the_manifest_names_every_file_with_its_sha256_and_what_the_model_was_made_of(adapted):
    export = adapted / "export"
    manifest = json.loads((export / "manifest.json").read_text())
    there = {file.relative_to(export).as_posix() for file in export.rglob("*") if file.is_file()} - {"manifest.json"}
    assert {file["path"] for file in manifest["files"]} == there
    for file in manifest["files"]:
        content = (export / file["path"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    data = (adapted / "data" / "train.jsonl").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    assert manifest["data"] == [{"path": "data/train.jsonl", "bytes": len(data), "sha256": sha256}]
    assert manifest["spec"] == {"kind": "finetune"}
    assert (manifest["seed"], manifest["layout"]["tensor"]) == (5, 1)
    assert len(manifest["code_sha256"]) == 64
    assert manifest["run"]["lora"]["rank"] == 4
    assert manifest["torch"] == torch.__version__
    assert {path.split("/")[0] for path in there} == {"adapter", "model"}


def test_an_adapter_names_its_base(adapted):
    described = json.loads((adapted / "export" / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "tiny"


def test_a_lora_checkpoint_holds_the_adapters_alone_and_knows_its_base(adapted, base):
    folder = adapted / "checkpoints" / "step-00000003"
    index = json.loads((folder / "index.json").read_text())
    assert all(".adapter." in name for name in index["parameters"])
    assert index["base"] == checkpoint.fingerprint(base / "export" / "model")
    held = load_file(folder / "rank-00000.safetensors")
    # Rank 4 beside q and o (32, 32), k and v (32, 16), gate, up and down (32, 48); two layers; weight and two moments.
    each = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert sum(tensor.numel() for tensor in held.values()) == 3 * 2 * each


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "describe", full)
    with pytest.raises(OSError, match="No space"):
        runs.events_of(tmp_path, runs.config(training={"steps": 1}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "data", "prepared", "run.json"]


def test_without_merging_there_is_only_an_adapter_and_types_are_kept_or_asked_for(base, tmp_path):
    run = runs.config(
        model=None,
        base=str(base / "export" / "model"),
        tokenizer={"type": "base"},
        lora={"rank": 2, "targets": ["q"]},
        training={"steps": 1, "precision": "bf16"},
        export={"merged": False},
    )
    runs.events_of(tmp_path, run)
    assert not (tmp_path / "export" / "model").exists()
    full = runs.config(
        model=None, base=str(base / "export" / "model"), tokenizer={"type": "base"},
        training={"steps": 1, "precision": "bf16"},
    )  # fmt: skip
    for asked, dtype in (("keep", torch.float32), ("bf16", torch.bfloat16)):
        run = full.model_copy(update={"export": full.export.model_copy(update={"dtype": asked})})
        runs.events_of(tmp_path, run)
        tensors = load_file(tmp_path / "export" / "model" / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_a_run_does_not_go_on_under_another_scale_of_its_adapters(base, adapted, tmp_path):
    run = runs.RunConfig.model_validate_json((adapted / "run.json").read_text())
    longer = {"resume": adapted / "checkpoints" / "step-00000003"}
    other = run.model_copy(update=longer | {"lora": run.lora.model_copy(update={"alpha": 16.0})})
    runs.write(tmp_path, other)
    with pytest.raises(BadCheckpoint, match="trained with a scale of 2 and this run's is 4"):
        runs.events_of(tmp_path, other)
    # 8 / 4 is 4 / sqrt(4): the same function by other words.
    same = run.model_copy(update=longer | {"lora": run.lora.model_copy(update={"alpha": 4.0, "rslora": True})})
    assert runs.events_of(tmp_path, same)[-1].type == "finished"


def test_adapters_beside_a_bf16_base_learn_in_fp32_masters_as_plain_adamw_does(base, tmp_path):
    run = runs.config(
        model=None, base=str(base / "export" / "model"), tokenizer={"type": "base"}, lora={"rank": 4},
        training={"steps": 12, "precision": "bf16", "lr": 1e-5, "schedule": "constant", "warmup": 0, "clip": None},
    )  # fmt: skip
    runs.write(tmp_path, run)
    mesh = alone(CPU)
    tokenizer, prepared = trainer.ready_data(
        run, tmp_path, mesh, Reporter(lambda event: None, mesh.stopwatch.whereabouts)
    )
    decoder, plain = (trainer.ready_model(run, tmp_path, mesh, tokenizer) for _ in range(2))
    work = trainer.Work(run, tmp_path, mesh, lambda event: None, StopWish(), tokenizer, prepared, decoder)
    frozen = {name: p.detach().clone() for name, p in decoder.named_parameters() if not p.requires_grad}
    assert work.all_steps()

    weights_of = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().requires_grad_() for name, p in weights_of.items()}
    plain_adamw = torch.optim.AdamW(masters.values(), lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(12):
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        batches = work.loader.step(step)
        labels = sum(batch.num_labels for batch in batches)
        for batch in batches:
            (plain.loss(batch).loss_sum / labels).backward()
            for name, p in weights_of.items():
                sums[name] += p.grad.float()
                p.grad = None
        for name, p in masters.items():
            p.grad = sums[name]
        plain_adamw.step()
        with torch.no_grad():
            for name, p in weights_of.items():
                p.copy_(masters[name])

    for piece in work.optimizer.pieces():
        assert piece.tensors["weight"].dtype == torch.float32
        torch.testing.assert_close(piece.tensors["weight"], masters[piece.parameter].detach(), rtol=1e-6, atol=1e-9)
    now = dict(decoder.named_parameters())
    assert {p.dtype for p in now.values()} == {torch.bfloat16}
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())


def test_a_gguf_file_is_asked_for_and_its_comparison_is_in_the_manifest(tmp_path):
    run = runs.config(
        model={"vocab_size": 300}, tokenizer={"type": "train", "vocab_size": 280}, training={"steps": 1},
        export={"gguf": True},
    )  # fmt: skip
    runs.events_of(tmp_path, run)
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    assert "gguf/model.gguf" in {file["path"] for file in manifest["files"]}
    (check,) = (check for check in manifest["checks"] if check["name"] == "gguf_equals_model")
    assert (check["passed"], check["figure"]) == (True, 0)
    assert "20 tensors" in check["message"]


def test_a_gguf_file_that_can_not_be_is_refused_before_training(tmp_path):
    with pytest.raises(RunFailure, match="bytes alone"):
        runs.events_of(tmp_path, runs.config(export={"gguf": True}))
    assert not (tmp_path / "checkpoints").exists()


def train_shared(folder, run):
    runs.events_of(folder, run)


def test_replicas_that_share_weights_leave_the_export_of_those_that_do_not(world2, adapted, base, tmp_path):
    original = runs.RunConfig.model_validate_json((adapted / "run.json").read_text())
    run = original.model_copy(update={"parallel": runs.config(parallel={"data": 2, "shard_weights": True}).parallel})
    runs.write(tmp_path, run)
    world2.run(train_shared, tmp_path, run)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (load_file(folder / "export" / file) for folder in (tmp_path, adapted))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made_by", "kind", "part"),
    [
        pytest.param("base", "checkpoint", "checkpoints/step-00000003", id="all weights"),
        pytest.param("adapted", "checkpoint", "checkpoints/step-00000003", id="adapters beside a base"),
        pytest.param("adapted", "adapter", "export/adapter", id="an exported adapter"),
    ],
)
def test_a_checkpoint_and_an_adapter_become_the_model_that_the_run_exported(
    made_by, kind, part, request, tmp_path, monkeypatch
):
    run_dir = request.getfixturevalue(made_by)
    into = tmp_path / "model"
    assemble.main(run_dir / "run.json", kind, run_dir / part, into)
    exported = run_dir / "export" / "model"
    assert {path.name for path in into.iterdir()} == {path.name for path in exported.iterdir()}
    for path in exported.iterdir():
        assert (into / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_that_is_damaged_or_of_another_base_becomes_no_model(base, adapted, tmp_path):
    damaged = tmp_path / "step-00000003"
    shutil.copytree(base / "checkpoints" / "step-00000003", damaged)
    with (damaged / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(ValueError, match="is damaged"):
        assemble.main(base / "run.json", "checkpoint", damaged, tmp_path / "model")
    with pytest.raises(ValueError, match="other base weights"):
        assemble.main(adapted / "run.json", "checkpoint", base / "checkpoints" / "step-00000003", tmp_path / "model")
    with pytest.raises(ValueError, match="no adapter"):
        assemble.main(base / "run.json", "adapter", adapted / "export" / "adapter", tmp_path / "model")
