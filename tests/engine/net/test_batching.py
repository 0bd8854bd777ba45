"""Answers together: each what it would be alone, whenever it came and whoever else is answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.batching import TEXTS, Batcher, Failure, Progress, Refused, Report, Request, bytes_of_a_token
from engine.generate import Sampler, end_ids
from engine.model import Decoder, Extension
from engine.tokenizer import Tokenizer
from tests.engine.net import nets
from tests.engine.net.test_traits import OTHERS, WINDOWED, theirs
from tests.engine.net.test_weights import DATA, llama


class Hearer:
    """What was reported, by request."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self.usage: dict[str, tuple[int, int]] = {}
        self.failures: dict[str, Exception] = {}

    def __call__(self, report: Report) -> None:
        if isinstance(report, Failure):
            self.failures[report.id] = report.error
            return
        assert isinstance(report, Progress)
        for number, piece in report.pieces.items():
            self.pieces[report.id, number].append(piece)
        if report.usage is not None:
            self.usage[report.id] = report.usage

    def text(self, name: str, number: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces[name, number])

    def reason(self, name: str, number: int = 0) -> Any:
        return self.pieces[name, number][-1].finish_reason


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    """A random model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.bytes()
    llama(folder, vocab_size=tokenizer.vocab_size, num_key_value_heads=2, max_position_embeddings=512)
    tokenizer.save(folder)
    return Sampler.load(folder, nets.CPU)


def ran(sampler: Sampler, *requests: Request, **options: Any) -> Hearer:
    """All answers to `requests`, each of which comes two steps after the one before."""
    hearer = Hearer()
    batcher = Batcher(sampler.decoder, sampler.tokenizer, hearer, **options)
    for request in requests:
        batcher.admit(request)
        batcher.step()
        batcher.step()
    while batcher.is_busy:
        batcher.step()
    return hearer


def asked(name: str, prompt: Any = "Once", **options: Any) -> Request:
    return Request(id=name, **{"prompt": prompt, "max_tokens": 12, "temperature": 0, **options})


def generated(model: Any, ids: Sequence[int], count: int, **options: Any) -> list[int]:
    """Greedily, by `transformers`."""
    ids_BT = torch.tensor([ids])
    whole = model.generate(
        ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=count, pad_token_id=0, **options
    )
    return list(whole[0, len(ids) :].tolist())


def grown(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, *, piece: int = 5) -> list[list[int]]:
    """Greedily, side by side, each joining a pass after the one before; prompts a `piece` at a time."""
    caches = [decoder.cache(rows=1, tokens=len(prompt) + count) for prompt in prompts]
    pending = [list(prompt) for prompt in prompts]
    out: list[list[int]] = [[] for _ in prompts]
    turn = 0
    while min(map(len, out)) < count:
        turn += 1
        here = [row for row in range(min(turn, len(prompts))) if len(out[row]) < count]
        given = [pending[row][:piece] for row in here]
        logits = decoder.extend([Extension(ids, caches[row]) for row, ids in zip(here, given, strict=True)])
        for row, ids, logits_NV in zip(here, given, logits, strict=True):
            del pending[row][: len(ids)]
            if not pending[row]:
                out[row].append(int(logits_NV[-1].argmax()))
                pending[row] = out[row][-1:]
    return out


PROMPTS = [list(range(3, 20)), [5], [90, 4, 33], list(range(60, 30, -1))]
LLAMA = [("llama", {"num_key_value_heads": 2})]


@pytest.mark.parametrize(("family", "changes"), LLAMA + WINDOWED + OTHERS)
def test_texts_that_share_passes_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = theirs(tmp_path, family, **changes)
    expected = [generated(reference, ids, 20, eos_token_id=None) for ids in PROMPTS]
    assert grown(nets.loaded(tmp_path), PROMPTS, 20) == expected


@pytest.mark.skipif(DATA is None, reason="TRAINSHED_TEST_DATA names no folder with models/stories260k")
def test_a_real_model_tells_the_stories_that_transformers_tells() -> None:
    folder = Path(DATA or "") / "models" / "stories260k"
    reference = AutoModelForCausalLM.from_pretrained(folder)
    sampler = Sampler.load(folder, nets.CPU)
    texts = ["Once upon a time", "Lily", "The big dog went to the park and then", "Tim and Tom"]
    hearer = ran(sampler, *(asked(text, text, max_tokens=60, stream=True) for text in texts), end_ids=sampler.end_ids)
    for text in texts:
        prompt = sampler.tokenizer.prompt(text)
        ids = generated(reference, prompt, 60)
        whole = sampler.tokenizer.decode([*prompt, *ids])
        assert text + hearer.text(text) == whole
        assert hearer.usage[text] == (len(prompt), len(ids))


def test_a_seed_repeats_an_answer_whoever_else_is_answered(sampler: Sampler) -> None:
    drawn = asked("drawn", "Tell me", temperature=1.2, top_p=0.9, seed=5, max_tokens=30, n=3)
    alone = ran(sampler, drawn)
    others = [asked(str(number), "x" * (1 + 9 * number), temperature=1.0, seed=number) for number in range(5)]
    among = ran(sampler, *others[:3], drawn, *others[3:])
    assert [among.text("drawn", number) for number in range(3)] == [alone.text("drawn", number) for number in range(3)]
    # The k-th has the seed plus k, so each can be had alone.
    second = ran(sampler, drawn.model_copy(update={"n": 1, "seed": 6}))
    assert second.text("drawn") == alone.text("drawn", 1) != alone.text("drawn", 0)


def test_several_prompts_and_answers_have_their_places(sampler: Sampler) -> None:
    both = ran(sampler, asked("both", ("Once", "Twice"), n=2))
    once, twice = (ran(sampler, asked("one", prompt)) for prompt in ("Once", "Twice"))
    assert [both.text("both", number) for number in range(4)] == [one.text("one") for one in (once, once, twice, twice)]
    assert both.usage["both"] == (9, 2 * (once.usage["one"][1] + twice.usage["one"][1]))


def test_a_short_answer_goes_out_while_a_long_one_is_being_made(sampler: Sampler) -> None:
    told: list[str] = []
    batcher = Batcher(sampler.decoder, sampler.tokenizer, lambda report: told.append(report.id))
    batcher.admit(asked("long", max_tokens=60))
    batcher.step()
    batcher.admit(asked("short", max_tokens=3))
    while batcher.is_busy:
        batcher.step()
    assert told == ["short", "long"]


def test_a_long_prompt_is_read_in_pieces_between_which_the_others_go_on(sampler: Sampler) -> None:
    hearer = Hearer()
    batcher = Batcher(sampler.decoder, sampler.tokenizer, hearer)
    batcher.pass_tokens = 16
    batcher.admit(asked("talks", max_tokens=40, stream=True))
    batcher.step()
    batcher.admit(asked("reads", "y" * 100, max_tokens=4, stream=True))
    for _ in range(6):
        batcher.step()
    talking = batcher.under_way["talks"].answers[0]
    assert talking.count == 7
    assert batcher.under_way["reads"].answers[0].count == 0
    while batcher.is_busy:
        batcher.step()
    assert hearer.text("reads") == ran(sampler, asked("reads", "y" * 100, max_tokens=4)).text("reads")


def test_who_does_not_fit_waits_until_others_are_done(sampler: Sampler) -> None:
    room = (4 + 12) * bytes_of_a_token(sampler.decoder)
    hearer = Hearer()
    batcher = Batcher(sampler.decoder, sampler.tokenizer, hearer, cache_bytes=2 * room)
    for number in range(5):
        batcher.admit(asked(str(number)))
    batcher.step()
    assert len(batcher.under_way) == 2
    while batcher.is_busy:
        batcher.step()
    assert len({hearer.text(str(number)) for number in range(5)}) == 1
    with pytest.raises(Refused, match=r"48 tokens in all its answers, and there is room for 32"):
        batcher.admit(asked("all", n=3))
    with pytest.raises(Refused, match="more than 32 answers"):
        batcher.admit(asked("many", n=TEXTS + 1, max_tokens=1, prompt=[1]))


def test_a_request_that_is_given_up_frees_its_place_and_is_heard_of_no_more(sampler: Sampler) -> None:
    hearer = Hearer()
    batcher = Batcher(sampler.decoder, sampler.tokenizer, hearer)
    batcher.admit(asked("goes", stream=True))
    batcher.admit(asked("stays", stream=True))
    batcher.step()
    batcher.cancel("goes")
    before = len(hearer.pieces["goes", 0])
    while batcher.is_busy:
        batcher.step()
    assert (len(hearer.pieces["goes", 0]), "goes" in hearer.usage) == (before, False)
    assert hearer.usage["stays"] == (4, 12)


def test_what_is_wrong_with_one_text_is_nothing_to_the_others(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = sampler.decoder.extend

    def broken(texts: Sequence[Extension]) -> list[Tensor]:
        return [
            logits * float("nan") if list(text.ids) == [ord("b")] else logits
            for text, logits in zip(texts, extend(texts), strict=True)
        ]

    monkeypatch.setattr(sampler.decoder, "extend", broken)
    hearer = ran(sampler, asked("good", "a"), asked("bad", "b"))
    assert "weights are damaged" in str(hearer.failures["bad"])
    assert hearer.usage["good"] == (1, 12)


def test_tokens_are_told_with_the_log_probabilities_of_transformers(sampler: Sampler, tmp_path: Path) -> None:
    vocab = sampler.tokenizer.vocab_size
    reference = llama(tmp_path, vocab_size=vocab, num_key_value_heads=2, max_position_embeddings=512)
    hearer = Hearer()
    batcher = Batcher(sampler.decoder, sampler.tokenizer, hearer)
    # In pieces, so that the logits of several passes are put together.
    batcher.pass_tokens = 4
    batcher.admit(asked("a", "Hello you", echo=True, logprobs=2, max_tokens=5))
    batcher.admit(asked("looks", "Hello you", echo=True, logprobs=2, max_tokens=0))
    while batcher.is_busy:
        batcher.step()
    said = [one for piece in hearer.pieces["a", 0] for one in piece.said]
    ids = [one.token for one in said]
    with torch.no_grad():
        logprobs_TV = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert ids[:9] == list(b"Hello you")
    assert said[0].chance is None
    for place, one in enumerate(said[1:], start=1):
        assert one.chance is not None
        assert one.chance.logprob == pytest.approx(logprobs_TV[place - 1, ids[place]].item(), abs=1e-4)
        best = logprobs_TV[place - 1].topk(2)
        assert [token for token, _ in one.chance.top] == best.indices.tolist()
    assert [one.offset for one in said[:9]] == list(range(9))
    looked = [one for piece in hearer.pieces["looks", 0] for one in piece.said]
    assert [one.token for one in looked] == ids[:9]
    assert (hearer.text("looks"), hearer.reason("looks"), hearer.usage["looks"]) == ("Hello you", "length", (9, 0))


def test_a_text_ends_where_the_models_configuration_says(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert end_ids(tmp_path) == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_ids(tmp_path) == [4, 5]
