"""Generation: the tokens of `transformers`, the ends that were asked for, and the line protocol."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.answer import first_stop
from engine.batching import Request
from engine.generate import Sampler
from engine.sampling import NUCLEUS, Sampling, chance, choose, nucleus
from engine.serve import serve
from engine.tokenizer import Tokenizer
from tests.engine.data.make import llama as llama_tokenizer
from tests.engine.net import nets
from tests.engine.net.test_weights import llama

GREEDY = Sampling(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.bytes()
    llama(folder, vocab_size=tokenizer.vocab_size, num_key_value_heads=2)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Sampler:
    return Sampler.load(folder, nets.CPU)


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = llama(tmp_path, num_key_value_heads=2)
    ids = nets.batch(97, rows=1, tokens=7).tokens_BT
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
    )[0, 7:]
    model = nets.loaded(tmp_path)
    cache = model.cache(rows=1, tokens=30)
    got, pending = [], ids
    for _ in range(20):
        logits = model.logits(pending, cache, last_only=True)[0, -1]
        got.append(choose(logits, GREEDY, Random()))
        pending = torch.tensor([got[-1:]])
    assert got == expected.tolist()


def test_the_cache_gives_the_logits_of_one_pass() -> None:
    model = nets.decoder(nets.shape())
    ids = nets.batch().tokens_BT
    cache = model.cache(rows=2, tokens=16)
    parts = [model.logits(piece, cache) for piece in ids.split([5, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model.logits(ids), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="17 tokens don't fit a cache of 16"):
        model.logits(ids[:, :1], cache)


def test_a_seed_repeats_a_text_and_another_gives_another(sampler: Sampler) -> None:
    prompt = sampler.tokenizer.prompt("Once")
    first, again, other = (sampler.complete(prompt, Sampling(max_tokens=12, seed=seed)).text for seed in (1, 1, 2))
    assert first == again != other


def test_a_stop_text_ends_the_answer_and_is_left_out(sampler: Sampler) -> None:
    prompt = sampler.tokenizer.prompt("Once")
    whole = sampler.complete(prompt, GREEDY)
    assert whole.finish_reason == "length"
    assert whole.completion_tokens == 20
    stop = next(character for character in whole.text if character != "\ufffd")
    cut = sampler.complete(prompt, GREEDY.model_copy(update={"stop": (stop,)}))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def saying(token: int, tokenizer: Tokenizer) -> Sampler:
    """A model that says `token`, whatever it is asked."""
    model = nets.decoder(nets.shape(vocab_size=tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # What is left: all ids have one direction, and this one's is twice as long.
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        model.model.embed_tokens.weight[token] = 2
    return Sampler(model, tokenizer)


def test_a_stop_text_before_half_a_character_ends_the_answer() -> None:
    # Three letters that begin with the same byte: "stop" and that byte become one token.
    tokenizer = Tokenizer.train(["stop\u00e9 stop\u00e8 stop\u00ea "] * 20, 300)
    (token,) = (token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == "stop\ufffd")
    cut = saying(token, tokenizer).complete([0], Sampling(temperature=0, max_tokens=1, stop=("stop",)))
    assert (cut.text, cut.finish_reason) == ("", "stop")


def test_a_continuation_goes_after_its_prompt_as_it_is_and_an_answer_stands_alone(tmp_path: Path) -> None:
    # SentencePiece's rule: the space before a word belongs to it, and none is shown where a text begins.
    tokenizer = llama_tokenizer(tmp_path)
    (the,) = tokenizer.encode("the")
    sampler, two = saying(the, tokenizer), Sampling(temperature=0, max_tokens=2)
    assert sampler.complete(tokenizer.prompt("hello"), two).text == " the the"
    asked = Request(id="a", messages=({"role": "user", "content": "hello"},), temperature=0, max_tokens=2)
    assert sampler.answer(asked).text == "the the"


def test_the_first_of_several_stops_counts() -> None:
    assert first_stop("one two three", ["three", "two", "none"]) == 4
    assert first_stop("one", ["two"]) is None


def test_the_models_length_ends_an_answer_and_a_longer_prompt_is_refused(sampler: Sampler) -> None:
    end = sampler.complete([65] * 60, Sampling(temperature=0, max_tokens=100))
    assert (end.finish_reason, end.prompt_tokens) == ("length", 60)
    assert end.completion_tokens <= 4
    with pytest.raises(ValueError, match="64 tokens and the model takes 64"):
        sampler.complete([65] * 64, GREEDY)


def test_top_p_leaves_the_likeliest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    random = Random(0)

    def drawn(top_p: float) -> set[int]:
        return {choose(logits, Sampling(top_p=top_p), random) for _ in range(200)}

    assert drawn(0.4) == {0}
    assert drawn(0.6) == {0, 1}
    assert drawn(0.9) == {0, 1, 2}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_a_nucleus_of_many_tokens_is_the_sorted_beginning_that_reaches_it() -> None:
    # All alike but for their order: half of the chances are half of the tokens, more than are sorted at first.
    count = 4 * NUCLEUS
    chances = torch.linspace(1.0, 1.0001, count, dtype=torch.float64)
    chances /= chances.sum()
    kept = nucleus(chances, 0.5).nonzero().flatten()
    assert kept.tolist() == list(range(count - len(kept), count))
    assert len(kept) == pytest.approx(count / 2, abs=2)


def test_a_tokens_chance_is_its_log_probability_before_temperature() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log() + 7
    told = chance(logits, 2, top=2)
    assert told.logprob == pytest.approx(torch.tensor(0.2).log().item(), abs=1e-6)
    assert [token for token, _ in told.top] == [0, 1]
    assert told.top[0][1] == pytest.approx(torch.tensor(0.5).log().item(), abs=1e-6)


def test_chances_follow_the_temperature() -> None:
    # Chances 0.8 and 0.2; at temperature 2 their square roots: 0.8944 to 0.4472, that is 2/3 and 1/3.
    logits = torch.tensor([0.8, 0.2]).log()
    random = Random(0)
    draws = [choose(logits, Sampling(temperature=2.0), random) for _ in range(4000)]
    assert draws.count(0) / 4000 == pytest.approx(2 / 3, abs=0.03)


def test_however_low_the_temperature_the_likeliest_token_is_left() -> None:
    assert choose(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=1e-310), Random()) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(broken: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="weights are damaged"):
        choose(torch.tensor([1.0, broken]), Sampling(temperature=temperature), Random())


def said(folder: Path, *orders: Any) -> list[dict[str, Any]]:
    lines = "".join((order if isinstance(order, str) else json.dumps(order)) + "\n" for order in orders)
    writer = io.StringIO()
    serve(folder, io.StringIO(lines), writer, device=nets.CPU)
    return [json.loads(line) for line in writer.getvalue().splitlines()]


def of(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("id") == name]


def test_a_request_gets_one_line_and_a_streamed_one_several(folder: Path) -> None:
    asked = {"prompt": "Once", "max_tokens": 6, "temperature": 0, "top_p": 1, "seed": 1, "stop": []}
    lines = said(
        folder,
        {"id": "a", **asked},
        {"id": "b", **asked, "stream": True},
        {"id": "c", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0},
    )
    assert lines[0] == {"ready": True}
    (whole,) = of(lines, "a")
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 6}
    streamed = of(lines, "b")
    assert "".join(choice["text"] for line in streamed for choice in line["choices"]) == whole["choices"][0]["text"]
    assert [("usage" in line) for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    (answer,) = of(lines, "c")
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("order", "message", "param", "code"),
    [
        pytest.param("{", "Expecting", None, "invalid_request", id="not JSON"),
        pytest.param({"id": "a"}, "exactly one of prompt and messages", None, "invalid_request", id="nothing asked"),
        pytest.param({"id": "a", "prompt": "x", "top_p": 0}, "top_p", "top_p", "invalid_request", id="top_p"),
        pytest.param(
            {"id": "a", "prompt": "x" * 100}, "shorten the prompt", "prompt", "context_length_exceeded", id="too long"
        ),
        pytest.param({"id": "a", "prompt": "x", "stop": ""}, "stop", "stop", "invalid_request", id="empty stop"),
        pytest.param({"id": "a", "prompt": [9999]}, "no token 9999", "prompt", "invalid_request", id="strange token"),
        pytest.param({"id": "a", "prompt": "x", "n": 99}, "more than 32 answers", "n", "invalid_request", id="n"),
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_served(
    folder: Path, order: Any, message: str, param: str | None, code: str
) -> None:
    lines = said(folder, order, {"id": "b", "prompt": "x", "max_tokens": 1})
    (bad,) = of(lines[1:], None if isinstance(order, str) else "a")  # type: ignore[arg-type]
    assert message in bad["error"]["message"]
    assert (bad["error"]["param"], bad["error"]["code"]) == (param, code)
    (good,) = of(lines, "b")
    assert "text" in good["choices"][0]


def test_a_model_that_cannot_be_loaded_is_said_in_a_line(tmp_path: Path) -> None:
    writer = io.StringIO()
    with pytest.raises(ValueError, match=r"needs a config\.json"):
        serve(tmp_path, io.StringIO(), writer, device=nets.CPU)
    assert json.loads(writer.getvalue())["error"]["code"] == "invalid_model"
