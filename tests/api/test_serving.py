"""Models tried through the unmodified openai client: a real socket, a real worker, and `transformers` as the oracle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import psutil
import pytest
import torch
from peft import PeftModel
from sqlalchemy import select
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from api.cli import app
from core import artifacts, catalog, checkpoints, jobs
from core.models import Job, Model
from engine import assemble
from engine.config import RunConfig
from engine.tokenizer import Tokenizer
from tests.api import driving
from tests.api.conftest import wait_for
from tests.engine.net.test_weights import llama
from tests.engine.train import runs
from workers import staging

START_SECONDS, ANSWER_SECONDS = 120.0, 120.0
BASE = "tried-base"
PROMPTS = ["Once upon a time", "x", "It was the best of times, it was the worst of times", "né€ 😀"]


@pytest.fixture(scope="module")
def base(live) -> Path:
    """A random model in the models directory, made by `transformers`, with a tokenizer of bytes."""
    folder = live.services.settings.models / BASE
    tokenizer = Tokenizer.bytes()
    llama(folder, vocab_size=tokenizer.vocab_size, num_key_value_heads=2, max_position_embeddings=256)
    tokenizer.save(folder)
    # As exports have it: a text ends where the tokenizer says, and where a turn does.
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = {"eos_token_id": list(tokenizer.stop_ids)}
    (folder / "generation_config.json").write_text(json.dumps({**generation, **ends}))
    return folder


class Worker:
    """The process that answers, as a node keeps it."""

    def __init__(self, live) -> None:
        self.live = live
        self.start()

    def start(self) -> None:
        settings = self.live.services.settings
        foreign = ("TRAINSHED_", "DATABASE_URL", "REDIS_URL", "STORAGE_URL")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        with (settings.data_dir / "sampler.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.sampler"],
                env=inherited | settings.environment() | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(self.live.services.sampler.is_alive, START_SECONDS)

    def models(self) -> list[psutil.Process]:
        """The processes in which models are loaded."""
        children = psutil.Process(self.process.pid).children()
        return [one for one in children if one.status() != psutil.STATUS_ZOMBIE and "serve" in one.cmdline()]

    def stop(self, number: int = signal.SIGTERM) -> None:
        models = self.models()
        self.process.send_signal(number)
        self.process.wait(START_SECONDS)
        # They end by themselves, also where nobody could tell them to.
        for model in models:
            model.wait(START_SECONDS)


@pytest.fixture(scope="module")
def worker(live) -> Iterator[Worker]:
    worker = Worker(live)
    yield worker
    if worker.process.poll() is None:
        worker.stop()


@pytest.fixture
def sdk(live, key, worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=ANSWER_SECONDS) as client:
        yield client


def greedy(model, tokenizer, text: str, count: int) -> str:
    """What `transformers` says after `text`."""
    ids_BT = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    whole = model.generate(
        ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return tokenizer.decode(whole[0, ids_BT.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def expected(base) -> dict[str, str]:
    """Forty tokens after each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    return {prompt: greedy(model, tokenizer, prompt, 40) for prompt in PROMPTS}


def test_a_greedy_answer_is_that_of_transformers_also_among_others(live, key, sdk, expected) -> None:
    for prompt in PROMPTS:
        answer = sdk.completions.create(model=BASE, prompt=prompt, temperature=0, max_tokens=40)
        assert answer.choices[0].text == expected[prompt]

    async def at_once() -> list[str]:
        options = {"base_url": f"{live.url}/v1", "api_key": key, "max_retries": 0, "timeout": ANSWER_SECONDS}
        async with openai.AsyncOpenAI(**options) as client:

            async def one(number: int) -> str:
                prompt = PROMPTS[number % len(PROMPTS)]
                asked = {"model": BASE, "prompt": prompt, "temperature": 0, "max_tokens": 40}
                if number % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
                return "".join(chunk.choices[0].text for chunk in chunks)

            return await asyncio.gather(*(one(number) for number in range(24)))

    texts = asyncio.run(at_once())
    assert texts == [expected[PROMPTS[number % len(PROMPTS)]] for number in range(24)]


def test_pieces_of_a_stream_are_the_whole_answer_and_none_has_half_a_character(sdk) -> None:
    asked = {"model": BASE, "messages": [{"role": "user", "content": "Grüß Gott"}], "seed": 11, "max_tokens": 60}
    whole = sdk.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    said = whole.choices[0].message.content
    stream = sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == said
    assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == (
        "assistant", whole.choices[0].finish_reason,
    )  # fmt: skip
    assert (last.choices, last.usage) == ([], whole.usage)
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == said
    assert all(token.logprob <= token.top_logprobs[0].logprob <= 0 for token in content)


def test_the_chat_template_is_the_models_own(sdk, base) -> None:
    messages = [{"role": "system", "content": "Say <|im_end|>."}, {"role": "user", "content": "Hi"}]
    tokenizer = Tokenizer.load(base)
    answer = sdk.chat.completions.create(model=BASE, messages=messages, temperature=0, max_tokens=20)
    ids = tokenizer.chat(messages)
    same = sdk.completions.create(model=BASE, prompt=ids, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == len(ids) == same.usage.prompt_tokens


def test_the_command_line_says_the_answer_as_it_comes(live, sdk, key) -> None:
    told = CliRunner().invoke(
        app, ["chat", BASE, "-m", "Hi", "--temperature", "0", "--max-tokens", "20"],
        env={"TRAINSHED_URL": live.url, "TRAINSHED_API_KEY": key},
    )  # fmt: skip
    asked = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 20}
    expected = sdk.chat.completions.create(**asked).choices[0].message.content
    assert (told.exit_code, told.output) == (0, expected + "\n")


def test_a_conversation_on_the_command_line_knows_what_was_said_until_it_begins_anew(live, key, sdk, base, monkeypatch):
    monkeypatch.setattr("api.cli.chat.at_a_terminal", lambda: True)
    told = CliRunner().invoke(
        app, ["chat", BASE, "--temperature", "0", "--max-tokens", "20"], input="Hi\nAnd?\n\n/new\nHi\n/exit\nno more\n",
        env={"TRAINSHED_URL": live.url, "TRAINSHED_API_KEY": key},
    )  # fmt: skip
    messages, answers = [], []
    for said in ("Hi", "And?"):
        messages.append({"role": "user", "content": said})
        answer = sdk.chat.completions.create(model=BASE, messages=messages, temperature=0, max_tokens=20)
        answers.append(answer.choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert told.exit_code == 0, told.output
    assert told.stdout == f"> {answers[0]}\n> {answers[1]}\n> > > {answers[0]}\n> "


def test_a_seed_and_a_stop_text_do_as_they_say(sdk) -> None:
    asked = {"model": BASE, "prompt": "Tell me", "temperature": 1.0, "top_p": 0.9, "max_tokens": 40}
    first = sdk.completions.create(**asked, seed=3, n=2)
    again = sdk.completions.create(**asked, seed=4)
    assert again.choices[0].text == first.choices[1].text != first.choices[0].text
    text = first.choices[0].text
    stop = text[2:4]
    assert stop
    cut = sdk.completions.create(**asked, seed=3, stop=[stop])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


def test_what_the_model_cannot_do_is_a_bad_request_with_its_field(sdk) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=BASE, prompt="x" * 300)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="no token 999") as caught:
        sdk.completions.create(model=BASE, prompt=[999], stream=True)
    assert caught.value.param == "prompt"


def test_a_client_that_leaves_a_stream_frees_the_model_for_others(sdk, live, base) -> None:
    streams = [sdk.completions.create(model=BASE, prompt="x", n=8, max_tokens=250, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    # They had all the room there is.
    assert sdk.completions.create(model=BASE, prompt="x", n=8, max_tokens=1).usage.completion_tokens == 8
    wait_for(lambda: not live.services.bell._ringing.keys("trainshed:sample:*"))


class Tuned(NamedTuple):
    """A job of a project of its own, and what it left."""

    key: str
    checkpoint: str
    result: str
    run_dir: Path
    job_id: str


@pytest.fixture(scope="module")
def tuned(live, base, tmp_path_factory) -> Tuned:
    """A LoRA job on the base without a merged model, run by the real engine."""
    services, key = live.services, live.key()
    with live.http(key) as http:
        rows = [{"prompt": f"{n} and {n}?", "completion": " " + "yes " * (n % 4 + 1)} for n in range(12)]
        file = driving.upload(http, b"".join(json.dumps(row).encode() + b"\n" for row in rows), "rows.jsonl")["id"]
        asked = [{"question": f"{n} and {n}?", "choices": ["no", "yes yes"], "answer": n % 2} for n in range(3)]
        content = b"".join(json.dumps(row).encode() + b"\n" for row in asked)
        questions = driving.upload(http, content, "questions.jsonl")["id"]
        data = {"train": [file], "evaluation": questions, "seq_len": 64}
        spec = {
            "kind": "finetune", "model": {"base": BASE}, "data": data,
            "method": {"type": "lora", "rank": 4}, "artifacts": {"merged": False},
            "training": {"steps": 4, "lr": 0.05, "precision": "fp32", "global_batch": 4, "eval_every": 2},
        }  # fmt: skip
        answer = http.post("/v1/jobs", json=spec)
        assert answer.status_code == 201, answer.text
        job_id = answer.json()["id"]
        fence = driving.claim(services, job_id)
        with services.db.reading() as session:
            job = session.get_one(Job, job_id)
        run_dir = tmp_path_factory.mktemp("tuned") / "run"
        run = staging.stage(services, job, run_dir)
        driving.record(services, job_id, fence, driving.started())
        told = runs.events_of(run_dir, RunConfig.model_validate(run))
        driving.record(services, job_id, fence, *(event for event in told if event.type in ("step", "choices")))
        saved = run_dir / "checkpoints" / "step-00000004"
        checkpoints.publish(services, job_id, fence=fence, step=4, folder=saved, metrics={})
        artifacts.publish(services, job, run_dir / "export")
        (listed,) = http.get(f"/v1/jobs/{job_id}/checkpoints").json()["data"]
        result = http.get(f"/v1/jobs/{job_id}").json()["model"]
        assert result in {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert http.get(f"/v1/models/{listed['id']}").json()["job_id"] == job_id
    with services.db.reading() as session:
        assert jobs.held(session, job_id, fence=fence).result_model == result
    return Tuned(key, listed["id"], result, run_dir, job_id)


def test_a_job_tells_how_its_model_answered_the_questions_in_its_file(live, tuned) -> None:
    with live.http(tuned.key) as http:
        progress = http.get(f"/v1/jobs/{tuned.job_id}").json()["progress"]
        asked = http.get(f"/v1/jobs/{tuned.job_id}/events", params={"type": "choices"}).json()["data"]
        names = "choice_accuracy,choice_accuracy_normalized"
        series = http.get(f"/v1/jobs/{tuned.job_id}/metrics", params={"names": names}).json()["series"]
    assert [(event["data"]["step"], event["data"]["questions"]) for event in asked] == [(2, 3), (4, 3)]
    assert series["choice_accuracy"] == [[event["data"]["step"], event["data"]["accuracy"]] for event in asked]
    last = asked[-1]["data"]
    # Trained to say yes, it holds "yes yes" likelier than "no" for its length: right where n is odd.
    assert (last["correct_normalized"], last["accuracy_normalized"]) == (1, pytest.approx(1 / 3))
    assert progress["choice_accuracy"] == last["accuracy"]
    assert progress["choice_accuracy_normalized"] == last["accuracy_normalized"]


# peft reads a property that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_checkpoint_is_a_model_that_says_what_its_adapter_says_in_peft(live, worker, base, tuned) -> None:
    checkpoint = tuned.checkpoint
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned.run_dir / "export" / "adapter")
    expected = greedy(model, AutoTokenizer.from_pretrained(base), "3 and 3?", 20)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=tuned.key, max_retries=0, timeout=ANSWER_SECONDS) as client:
        answer = client.completions.create(model=checkpoint, prompt="3 and 3?", temperature=0, max_tokens=20)
        assert answer.choices[0].text == expected
        assert (
            expected
            != client.completions.create(model=BASE, prompt="3 and 3?", temperature=0, max_tokens=20).choices[0].text
        )
    with live.http(live.key()) as stranger:
        refused = stranger.post("/v1/completions", json={"model": checkpoint, "prompt": "x"})
        assert refused.status_code == 404


def test_an_adapter_without_a_model_is_one_with_its_base(live, tuned, tmp_path) -> None:
    name, run_dir = tuned.result, tuned.run_dir
    with live.services.db.reading() as session:
        (model,) = session.scalars(select(Model).where(Model.id == name))
        source = catalog.source_of(session, model.key)
    staging.stage_model(live.services, source, tmp_path / "staged")
    assert {path.name for path in tmp_path.iterdir()} == {"staged"}, "nothing else is left"
    assemble.main(run_dir / "run.json", "checkpoint", run_dir / "checkpoints" / "step-00000004", tmp_path / "made")
    for path in (tmp_path / "made").iterdir():
        assert (tmp_path / "staged" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_death_of_the_worker_is_told(sdk, worker) -> None:
    stream = sdk.completions.create(model=BASE, prompt="x", n=8, max_tokens=250, stream=True)
    next(iter(stream))
    worker.stop(signal.SIGKILL)
    with pytest.raises(openai.APIError, match="sampler that worked at the answer has died"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="No sampler is online"):
        sdk.completions.create(model=BASE, prompt="x")
