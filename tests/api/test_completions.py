"""Completions over HTTP, in OpenAI's shapes. The sampler's part is played here: it answers what it was asked."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from api.routes import completions
from core import sampling
from tests.api.conftest import DEADLINE_SECONDS
from tests.api.test_models import base
from tests.api.test_requests import envelope

__all__ = ["base"]

ALIVE = sampling.ALIVE


@pytest.fixture(scope="module")
def sampler(live):
    """What a sampler was asked, while one is there. It answers a prompt with that prompt turned round."""
    client = redis.Redis.from_url(live.services.settings.redis)
    requests, stop, lives = [], threading.Event(), threading.Event()

    def serve():
        while not stop.is_set():
            client.set(ALIVE, 1, ex=sampling.ALIVE_SECONDS)
            lives.set()
            if taken := client.brpop([sampling.REQUESTS], timeout=1):
                request = json.loads(taken[1])
                requests.append(request)
                said = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
                answer = {"id": request["id"], "text": said[::-1], "finish_reason": "stop", "prompt_tokens": 3,
                          "completion_tokens": 2}  # fmt: skip
                if said == "broken":
                    answer = {"id": request["id"], "error": "the model has no chat template"}
                client.lpush(sampling.answers(request["id"]), json.dumps(answer))

    thread = threading.Thread(target=serve)
    thread.start()
    assert lives.wait(DEADLINE_SECONDS)
    yield requests
    stop.set()
    thread.join(DEADLINE_SECONDS)
    client.delete(ALIVE)
    client.close()


@pytest.fixture(autouse=True)
def asked(sampler):
    """What it is asked in this test."""
    sampler.clear()
    return sampler


def test_a_text_is_continued(http, base, asked):
    body = {"model": base, "prompt": "abc", "max_tokens": 5, "temperature": 0, "seed": 7, "stop": "x", "user": "me"}
    answer = http.post("/v1/completions", json=body).json()
    assert (answer["object"], answer["model"]) == ("text_completion", base)
    assert answer["choices"] == [{"index": 0, "text": "cba", "finish_reason": "stop", "logprobs": None}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    (request,) = asked
    assert request.items() >= {
        "model": base, "prompt": "abc", "max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 7, "stop": ["x"],
    }.items()  # fmt: skip


def test_several_prompts_and_several_answers_each_have_their_place(http, base, asked):
    answer = http.post("/v1/completions", json={"model": base, "prompt": ["ab", "cd"], "n": 2, "seed": 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ba", "ba", "dc", "dc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request["seed"] for request in asked] == [1, 2, 1, 2]


def test_a_conversation_is_answered(http, base, asked):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"model": base, "messages": messages, "max_completion_tokens": 9}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "olleh", "refusal": None}
    assert asked[0]["messages"] == messages
    assert asked[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        pytest.param("completions", {"stream": True}, "stream", id="a stream"),
        pytest.param("completions", {"temperature": 9}, "temperature", id="too hot"),
        pytest.param("completions", {"prompt": [1, 2]}, "prompt", id="token ids"),
        pytest.param("completions", {"max_tokens": 10**9}, "max_tokens", id="too long"),
        pytest.param("completions", {"temperature": "1"}, "temperature", id="a number in words"),
        pytest.param("completions", {"n": True}, "n: ", id="a truth value for a number"),
        pytest.param("completions", {"prompt": "\ud83d"}, "prompt: this text has half", id="half a character"),
        pytest.param("completions", {"stop": ["\ud83d"]}, "stop", id="half a character to stop at"),
        pytest.param(
            "chat/completions",
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "messages.0.content: this text has half",
            id="half a character said",
        ),
        pytest.param("completions", {"prompt": "broken"}, "no chat template", id="what the sampler refuses"),
        pytest.param("chat/completions", {"messages": []}, "messages", id="nothing said"),
        pytest.param("chat/completions", {"tools": [{"type": "function"}]}, "tools", id="tools"),
    ],
)
def test_what_is_not_done_here_is_refused_in_words(http, base, path, change, said):
    whole = {"completions": {"prompt": "a"}, "chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
    # Spelled in ASCII, as JSON can what no UTF-8 has.
    body = json.dumps({"model": base, **whole[path], **change}).encode()
    answer = http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert said in envelope(answer, 400)["message"]


def test_a_model_that_is_not_there_is_not_found(http):
    envelope(http.post("/v1/completions", json={"model": "nothing", "prompt": "a"}), 404)


def test_without_a_sampler_one_is_told_to_start_it(live, http, base, monkeypatch):
    monkeypatch.setattr(sampling, "ALIVE", "trainshed:nobody")
    answer = http.post("/v1/completions", json={"model": base, "prompt": "a"})
    assert "trainshed worker" in envelope(answer, 503)["message"]


def test_however_many_wait_for_a_sampler_others_are_answered(live, http, base, monkeypatch):
    inside, most, free, lock = [], [], threading.Event(), threading.Lock()
    full = threading.Barrier(completions.AT_ONCE + 1)

    def ask(request, *, timeout):
        with lock:
            inside.append(request)
            most.append(len(inside))
        if not free.is_set():
            full.wait(DEADLINE_SECONDS)
        assert free.wait(DEADLINE_SECONDS)
        with lock:
            inside.remove(request)
        return {"text": "", "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}

    monkeypatch.setattr(live.services.sampler, "ask", ask)
    waiting = 3 * completions.AT_ONCE
    with ThreadPoolExecutor(waiting) as pool:
        body = {"model": base, "prompt": "a"}
        answers = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(waiting)]
        full.wait(DEADLINE_SECONDS)
        assert http.get("/v1/jobs").status_code == 200
        free.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert max(most) == completions.AT_ONCE
