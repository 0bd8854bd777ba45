"""What `make demo` rests on, without its minutes: its jobs, its data, and the number that it holds the loss against."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import demo
from core.files import FileFacts
from core.resolve import ClusterFacts, resolve
from core.spec import JobSpec
from engine.data.format import read_chunks, validate

ROOT = Path(__file__).resolve().parents[2]


def test_its_pretrain_becomes_two_ranks_with_sequence_parallelism_and_selective_recomputation():
    data = {"train": ["file-0123456789abcdef01234567"], **demo.PRETRAIN["data"]}
    text = FileFacts(id=data["train"][0], bytes=9, sha256="", storage_key="", format="text", examples=1, characters=9)
    run = resolve(
        JobSpec.model_validate({**demo.PRETRAIN, "data": data}),
        base=None,
        files={text.id: text},
        cluster=ClusterFacts(largest_node=2),
    ).run
    assert (run.parallel.ranks, run.parallel.tensor, run.parallel.sequence) == (2, 2, True)
    assert run.recompute.mode == "selective"


def test_its_fine_tune_is_a_valid_job_on_conversations_that_are_all_good():
    data = {"train": ["file-0123456789abcdef01234567"], **demo.FINETUNE["data"]}
    JobSpec.model_validate({**demo.FINETUNE, "model": {"base": "a"}, "data": data})
    report = validate(read_chunks(ROOT / "examples" / "chat.jsonl"))
    assert (report.format, report.examples, report.errors, report.warnings) == ("chat", 38, (), ())


def test_the_questions_beside_it_are_all_good():
    report = validate(read_chunks(ROOT / "examples" / "questions.jsonl"))
    assert (report.format, report.examples, report.errors, report.warnings) == ("choice", 12, (), ())


def test_the_pairs_beside_it_are_all_good():
    report = validate(read_chunks(ROOT / "examples" / "pairs.jsonl"))
    assert (report.format, report.examples, report.errors, report.warnings) == ("preference", 36, (), ())


def test_two_tokens_as_frequent_as_each_other_need_ln_2_nats(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert demo.unigram_entropy(tmp_path / "tokenizer.json", "a b b a") == pytest.approx(math.log(2))
