"""Generation: the tokens of `transformers`, the ends that were asked for, and the line protocol."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.generate import Sampler, Sampling, choose, first_stop, serve
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
        got.append(choose(logits, GREEDY, torch.Generator()))
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
    prompt = tokenizer.prompt("hello")
    assert sampler.complete(prompt, two).text == " the the"
    assert sampler.complete(prompt, two, begins_anew=True).text == "the the"


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
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {choose(logits, Sampling(top_p=top_p), generator) for _ in range(200)}

    assert drawn(0.4) == {0}
    assert drawn(0.6) == {0, 1}
    assert drawn(0.9) == {0, 1, 2}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_chances_follow_the_temperature() -> None:
    # Chances 0.8 and 0.2; at temperature 2 their square roots: 0.8944 to 0.4472, that is 2/3 and 1/3.
    logits = torch.tensor([0.8, 0.2]).log()
    generator = torch.Generator().manual_seed(0)
    draws = [choose(logits, Sampling(temperature=2.0), generator) for _ in range(4000)]
    assert draws.count(0) / 4000 == pytest.approx(2 / 3, abs=0.03)


def test_however_low_the_temperature_the_likeliest_token_is_left() -> None:
    assert choose(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=1e-310), torch.Generator()) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(broken: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="weights are damaged"):
        choose(torch.tensor([1.0, broken]), Sampling(temperature=temperature), torch.Generator())


def said(folder: Path, *orders: Any) -> list[dict[str, Any]]:
    lines = "".join((order if isinstance(order, str) else json.dumps(order)) + "\n" for order in orders)
    writer = io.StringIO()
    serve(folder, io.StringIO(lines), writer, device=nets.CPU)
    return [json.loads(line) for line in writer.getvalue().splitlines()]


def test_each_request_gets_one_line_in_order(folder: Path) -> None:
    ready, first, second = said(
        folder,
        {"id": "a", "prompt": "Once", "max_tokens": 3, "temperature": 0, "top_p": 1, "seed": 1, "stop": []},
        {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0},
    )
    assert ready == {"ready": True}
    assert (first["id"], first["prompt_tokens"], first["completion_tokens"]) == ("a", 4, 3)
    assert (second["id"], second["finish_reason"]) == ("b", "length")


@pytest.mark.parametrize(
    ("order", "message"),
    [
        pytest.param("{", "Expecting", id="not JSON"),
        pytest.param({"id": "a"}, "exactly one of prompt and messages", id="nothing asked"),
        pytest.param({"id": "a", "prompt": "x", "top_p": 0}, "top_p", id="top_p"),
        pytest.param({"id": "a", "prompt": "x" * 100}, "shorten the prompt", id="too long"),
        pytest.param({"id": "a", "prompt": "x", "stop": ""}, "stop", id="empty stop"),
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_served(folder: Path, order: Any, message: str) -> None:
    _, bad, good = said(folder, order, {"id": "b", "prompt": "x", "max_tokens": 1})
    assert message in bad["error"]
    assert bad["id"] == (None if isinstance(order, str) else "a")
    assert good["id"] == "b"
    assert "text" in good
