"""What an export's checks of itself say of one that is right, and of one that somebody spoiled."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import layerwise, weights
from engine.config import RunConfig
from engine.data.prepare import open_prepared
from engine.selfcheck import Subject, checks_of
from tests.engine.train import runs


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A LoRA run on conversations, beside its base."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapted")
    runs.events_of(base, runs.config(model={"max_seq_len": 64}, data={"seq_len": 32}, training={"steps": 2}))
    run = runs.config(
        objective="sft", model=None, base=str(base / "export" / "model"), tokenizer={"type": "base"},
        data={"train": ["data/chat.jsonl"], "format": "chat", "seq_len": 63}, lora={"rank": 4},
        training={"steps": 2, "lr": 0.02},
    )  # fmt: skip
    runs.write(folder, run)
    question, answer = {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d."}
    chats = [{"messages": [question, answer | {"content": "d." * (n % 3 + 1)}]} for n in range(9)]
    (folder / "data" / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    runs.events_of(folder, run)
    return folder


@pytest.fixture
def subject(adapted, tmp_path):
    """The run with an export of its own, to spoil."""
    export = tmp_path / "export"
    shutil.copytree(adapted / "export", export)
    run = RunConfig.model_validate_json((adapted / "run.json").read_text())
    shape = weights.read_shape(export / "model")
    return Subject(run, adapted, export, shape, open_prepared(adapted), lambda: None)


def checked(subject):
    return {check.name: check for check in checks_of(subject)}


def scale(path, factor):
    tensors = {name: tensor * factor for name, tensor in load_file(path).items()}
    save_file(tensors, path)


def test_a_sound_export_passes_each_check_and_its_manifest_says_so(adapted, subject):
    checks = checked(subject)
    assert list(checks) == ["adapter_equals_merged", "differs_from_base", "turns_end", "template_round_trip"]
    assert all(check.passed for check in checks.values()), checks
    assert "9 of 9 learned turns" in checks["turns_end"].message
    told = json.loads((adapted / "export" / "manifest.json").read_text())["checks"]
    assert [(check["name"], check["passed"]) for check in told] == [(name, True) for name in checks]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_logits_a_layer_at_a_time_are_those_of_transformers_and_peft(subject):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids_BT = torch.arange(40).view(2, 20)
    base = AutoModelForCausalLM.from_pretrained(subject.base, dtype=torch.float32)
    adapter = subject.folder / "adapter"
    with torch.no_grad():
        plain = base(ids_BT).logits
        adapted = PeftModel.from_pretrained(base, adapter)(ids_BT).logits
    for under, expected in ((None, plain), ((subject.run.lora, adapter), adapted)):
        with layerwise.opened(subject.base, subject.shape, adapter=under, went_on=lambda: None) as decoder:
            for _ in range(2):
                torch.testing.assert_close(decoder.logits(ids_BT), expected, rtol=1e-5, atol=1e-5)
            layers = [p for name, p in decoder.named_parameters() if ".mlp." in name and ".adapter." not in name]
            assert {p.device.type for p in layers} == {"meta"}
    assert (adapted - plain).abs().max() > 1e-3


def retemplated(subject):
    (subject.folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    )


def without_end(subject):
    path = subject.folder / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [256]}))


@pytest.mark.parametrize(
    ("spoil", "name", "says"),
    [
        pytest.param(
            lambda subject: scale(subject.folder / "adapter" / "adapter_model.safetensors", 1.5),
            "adapter_equals_merged", "beyond", id="a merge by another scale",
        ),
        pytest.param(
            lambda subject: shutil.copy(subject.base / "model.safetensors", subject.folder / "model"),
            "differs_from_base", "all 20 tensors are the base's", id="a merge that merges nothing",
        ),
        pytest.param(
            lambda subject: (subject.folder / "model" / "model.safetensors").write_bytes(b"short"),
            "adapter_equals_merged", "could not be carried out", id="a damaged file",
        ),
        pytest.param(without_end, "turns_end", "0 of 9", id="an end that does not stop"),
        pytest.param(retemplated, "template_round_trip", "0 of 8", id="another template"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_export_fails_a_check_in_words(subject, spoil, name, says):
    spoil(subject)
    check = checked(subject)[name]
    assert not check.passed
    assert says in check.message


def test_a_check_that_fails_is_a_warning_and_the_export_is_there(tmp_path):
    # The longer answers are cut, and their ends with them.
    run = runs.config(objective="sft", data=runs.COMPLETION["data"] | {"seq_len": 17, "overlong": "truncate"})
    events = runs.events_of(tmp_path, run)
    warnings = [event.message for event in events if event.type == "log" and "self-check" in event.message]
    (check,) = [c for c in json.loads((tmp_path / "export" / "manifest.json").read_text())["checks"] if not c["passed"]]
    assert (check["name"], len(warnings)) == ("turns_end", 1)
    assert check["message"] in warnings[0]
    assert 0 < check["figure"] < 1


def test_weights_that_are_not_numbers_do_not_pass_for_weights_that_differ(subject):
    scale(subject.folder / "model" / "model.safetensors", float("nan"))
    checks = checked(subject)
    assert (checks["differs_from_base"].passed, checks["differs_from_base"].figure) == (False, None)
    assert "not finite" in checks["differs_from_base"].message
    assert (checks["adapter_equals_merged"].passed, checks["adapter_equals_merged"].figure) == (False, None)
    json.dumps([check.figure for check in checks.values()], allow_nan=False)
