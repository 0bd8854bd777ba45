"""Completions over HTTP, in OpenAI's shapes. The sampler's part is played here: it answers what it was asked."""

import json
import threading

import httpx
import pytest
import redis

from api import keyring
from api.app import SAMPLING_OF_A_PROJECT
from core import sampling
from tests.api.conftest import DEADLINE_SECONDS, wait_for
from tests.api.test_models import base
from tests.api.test_requests import envelope

__all__ = ["base"]

ALIVE = sampling.ALIVE


def piece(index, text, reason=None, **more):
    return {"index": index, "text": text, "finish_reason": reason, **more}


def token(text, logprob, *, offset=0, top=()):
    return {
        "token": text, "bytes": list(text.encode()), "logprob": logprob, "offset": offset,
        "top": [{"token": name, "bytes": list(name.encode()), "logprob": value} for name, value in top],
    }  # fmt: skip


def said_to(request):
    """What a model that turns prompts round says: a letter at a time in a stream."""
    prompts = request.get("prompt") or request["messages"][-1]["content"]
    texts = [text[::-1] for text in ([prompts] if isinstance(prompts, str) else prompts) for _ in range(request["n"])]
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    match texts[0][::-1]:
        case "unsaid":
            return [{"error": {"code": "context_length_exceeded", "message": "shorten it", "param": "prompt"}}]
        case "gone":
            return [{"error": {"code": "not_found", "message": "there is no such model", "param": "model"}}]
        case "slow":
            return [{"error": {"code": "timeout", "message": "too long"}}]
        case "bug":
            return [{"error": {"code": "internal", "message": "KeyError"}}]
        case "breaks":
            return [{"choices": [piece(0, "br")]}, {"error": {"code": "unavailable", "message": "it has died"}}]
        case "silent":
            return []
        case "endless":
            return [{"choices": [piece(0, "and so on")]}]
    told = {}
    if request["logprobs"] is not None:
        told = {"tokens": [token("c", -0.5, top=[("c", -0.5), ("d", -1.5)]), token("\ufffd", -2.0, offset=1)]}
    last = {"choices": [piece(index, text, "stop", **told) for index, text in enumerate(texts)], "usage": usage}
    if not request["stream"]:
        return [last]
    lines = [{"choices": [piece(index, letter)]} for index, text in enumerate(texts) for letter in text]
    return [*lines, {**last, "choices": [piece(index, "", "stop", **told) for index in range(len(texts))]}]


@pytest.fixture(scope="module")
def sampler(live):
    """What a sampler was asked, while one is there."""
    client = redis.Redis.from_url(live.services.settings.redis)
    requests, stop, lives = [], threading.Event(), threading.Event()

    def serve():
        while not stop.is_set():
            client.set(ALIVE, 1, ex=sampling.ALIVE_SECONDS)
            client.set(sampling.alive("fake"), 1, ex=sampling.ALIVE_SECONDS)
            lives.set()
            if taken := client.brpop([sampling.REQUESTS], timeout=1):
                request = json.loads(taken[1])
                requests.append(request)
                for line in ({"taken": "fake"}, *said_to(request)):
                    client.rpush(sampling.answers(request["id"]), json.dumps(line))

    thread = threading.Thread(target=serve)
    thread.start()
    assert lives.wait(DEADLINE_SECONDS)
    yield requests
    stop.set()
    thread.join(DEADLINE_SECONDS)
    client.delete(ALIVE, sampling.alive("fake"))
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
        "prompt": "abc", "max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 7, "stop": ["x"],
        "n": 1, "stream": False, "echo": False, "logprobs": None,
    }.items()  # fmt: skip


def test_what_is_not_said_has_openais_default_and_null_says_nothing(http, base, asked):
    nothing = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "stream", "max_tokens", "logprobs", "echo"))
    for body in ({}, nothing):
        http.post("/v1/completions", json={"model": base, "prompt": "abc", **body})
    first, second = asked
    assert (first["max_tokens"], first["temperature"], first["top_p"], first["n"]) == (16, 1.0, 1.0, 1)
    assert first["seed"] != second["seed"]
    assert {**first, "seed": 0, "id": 0} == {**second, "seed": 0, "id": 0}


def test_several_prompts_and_several_answers_each_have_their_place(http, base, asked):
    answer = http.post("/v1/completions", json={"model": base, "prompt": ["ab", "cd"], "n": 2, "seed": 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ba", "ba", "dc", "dc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    (request,) = asked
    assert (request["prompt"], request["n"], request["seed"]) == (["ab", "cd"], 2, 1)


def test_a_conversation_is_answered(http, base, asked):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"model": base, "messages": messages, "max_completion_tokens": 9, "response_format": {"type": "text"}}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "olleh", "refusal": None}
    assert asked[0]["messages"] == messages
    assert asked[0]["max_tokens"] == 9


def test_parts_of_a_message_are_one_text(http, base, asked):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    http.post("/v1/chat/completions", json={"model": base, "messages": [{"role": "user", "content": parts}]})
    assert asked[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_log_probabilities_have_each_dialects_form(http, base):
    text = http.post("/v1/completions", json={"model": base, "prompt": "ab", "logprobs": 2}).json()
    assert text["choices"][0]["logprobs"] == {
        "tokens": ["c", "bytes:\\xef\\xbf\\xbd"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"c": -0.5, "d": -1.5}, {"bytes:\\xef\\xbf\\xbd": -2.0}],
        "text_offset": [0, 1],
    }
    body = {"model": base, "messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 2}
    chat = http.post("/v1/chat/completions", json=body).json()
    first, second = chat["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "c", "bytes": [0x63], "logprob": -0.5,
        "top_logprobs": [
            {"token": "c", "bytes": [0x63], "logprob": -0.5}, {"token": "d", "bytes": [0x64], "logprob": -1.5},
        ],
    }  # fmt: skip
    assert (second["bytes"], second["top_logprobs"]) == ([0xEF, 0xBF, 0xBD], [])


def frames(answer):
    """The data of each event of a stream, which is closed by a blank line."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_a_stream_of_text_has_a_frame_for_each_piece(http, base):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = frames(http.post("/v1/completions", json={"model": base, "prompt": "a\u2028b", **options}))
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "b\u2028a"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(http, base):
    body = {"model": base, "messages": [{"role": "user", "content": "ab"}], "stream": True, "n": 2}
    *chunks, done = frames(http.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        (of,) = ([c for chunk in chunks for c in chunk["choices"] if c["index"] == index],)
        assert [choice["delta"] for choice in of] == [
            {"role": "assistant", "content": ""}, {"content": "b"}, {"content": "a"}, {},
        ]  # fmt: skip
        assert [choice["finish_reason"] for choice in of] == [None, None, None, "stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "code", "param"),
    [
        ("unsaid", 400, "context_length_exceeded", "prompt"),
        ("gone", 404, "not_found", "model"),
        ("slow", 504, "timeout", None),
        ("bug", 500, "internal", None),
    ],
)
def test_what_goes_wrong_before_the_answer_begins_has_its_status(http, base, prompt, status, code, param, stream):
    answer = http.post("/v1/completions", json={"model": base, "prompt": prompt, "stream": stream})
    error = envelope(answer, status)
    assert (error["code"], error["param"]) == (code, param)


def test_what_goes_wrong_in_the_midst_of_a_stream_is_its_last_frame(http, base):
    first, last = frames(http.post("/v1/completions", json={"model": base, "prompt": "breaks", "stream": True}))
    assert json.loads(first)["choices"][0]["text"] == "br"
    assert json.loads(last)["error"] == {
        "message": "it has died", "type": "server_error", "param": None, "code": "unavailable",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_works_for_a_client_that_has_left(live, http, base, asked, stream):
    client = redis.Redis.from_url(live.services.settings.redis)
    body = {"model": base, "prompt": "endless" if stream else "silent", "stream": stream}
    leaving = httpx.Client(base_url=live.url, headers=http.headers, timeout=DEADLINE_SECONDS)
    if stream:
        with leaving.stream("POST", "/v1/completions", json=body) as answer:
            # Kept, as httpx closes the connection of an iterator that is dropped.
            lines = answer.iter_lines()
            first = next(lines)
            assert (answer.status_code, "and so on" in first) == (200, True), first
            (request,) = asked
            assert client.exists(sampling.wanted(request["id"]))
    else:
        # Nothing comes before the client's patience ends.
        with pytest.raises(httpx.ReadTimeout):
            leaving.post("/v1/completions", json=body, timeout=0.5)
        wait_for(lambda: asked)
        (request,) = asked
    leaving.close()
    wait_for(lambda: not client.exists(sampling.wanted(request["id"])))
    client.close()


@pytest.mark.parametrize(
    ("path", "change", "param", "said"),
    [
        pytest.param("completions", {"temperature": 9}, "temperature", "", id="too hot"),
        pytest.param("completions", {"top_p": 0}, "top_p", "", id="an empty nucleus"),
        pytest.param("completions", {"max_tokens": 10**9}, "max_tokens", "", id="too long"),
        pytest.param("completions", {"max_tokens": 0}, "max_tokens", "set echo", id="no text"),
        pytest.param("completions", {"temperature": "1"}, "temperature", "", id="a number in words"),
        pytest.param("completions", {"n": True}, "n", "", id="a truth value for a number"),
        pytest.param("completions", {"n": 9}, "n", "", id="too many answers"),
        pytest.param("completions", {"seed": -1}, "seed", "", id="a seed below zero"),
        pytest.param("completions", {"logprobs": 21}, "logprobs", "", id="too many log-probabilities"),
        pytest.param("completions", {"logprobs": True}, "logprobs", "", id="the other dialect's log-probabilities"),
        pytest.param("completions", {"best_of": 3}, "best_of", "than n", id="best of"),
        pytest.param("completions", {"stream_options": {}}, "stream_options", "set stream", id="options of no stream"),
        pytest.param("completions", {"stream": "yes"}, "stream", "", id="a stream in words"),
        pytest.param("completions", {"frequency_penalty": 0.5}, "frequency_penalty", "leave it out", id="a penalty"),
        pytest.param("completions", {"logit_bias": {"1": 1}}, "logit_bias", "leave it out", id="a bias"),
        pytest.param("completions", {"suffix": "x"}, "suffix", "leave it out", id="a suffix"),
        pytest.param("completions", {"prompt": []}, "prompt", "at least one", id="no prompt"),
        pytest.param("completions", {"prompt": [-1]}, "prompt", "ids from 0 on", id="an id below zero"),
        pytest.param("completions", {"prompt": ["a", 1]}, "prompt", "of its kind", id="a text and an id"),
        pytest.param("completions", {"prompt": ["a"] * 17}, "prompt", "up to 16", id="too many prompts"),
        pytest.param("completions", {"prompt": "\ud83d"}, "prompt", "half", id="half a character"),
        pytest.param("completions", {"stop": ""}, "stop", "leave it out", id="an empty stop"),
        pytest.param("completions", {"stop": ["\ud83d"]}, "stop.0", "half", id="half a character to stop at"),
        pytest.param(
            "chat/completions", {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content", "half",
            id="half a character said",
        ),
        pytest.param(
            "chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content", "text only", id="a picture",
        ),
        pytest.param(
            "chat/completions", {"messages": [{"role": "me", "content": ""}]}, "messages.0.role", "", id="who",
        ),
        pytest.param("chat/completions", {"messages": []}, "messages", "", id="nothing said"),
        pytest.param("chat/completions", {"tools": [{"type": "function"}]}, "tools", "leave it out", id="tools"),
        pytest.param(
            "chat/completions", {"response_format": {"type": "json_object"}}, "response_format", "", id="JSON",
        ),
        pytest.param("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs", id="top of nothing"),
        pytest.param(
            "chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "not both",
            id="two limits",
        ),
    ],
)  # fmt: skip
def test_what_is_not_done_here_is_refused_by_its_name(http, base, asked, path, change, param, said):
    whole = {"completions": {"prompt": "a"}, "chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
    # Spelled in ASCII, as JSON can what no UTF-8 has.
    body = json.dumps({"model": base, **whole[path], **change}).encode()
    error = envelope(http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"}), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert not asked


def test_a_model_that_is_not_there_is_not_found(http):
    assert envelope(http.post("/v1/completions", json={"model": "nothing", "prompt": "a"}), 404)["param"] == "model"


def test_without_a_sampler_one_is_told_to_start_it(live, http, base, monkeypatch):
    monkeypatch.setattr(sampling, "ALIVE", "trainshed:nobody")
    answer = http.post("/v1/completions", json={"model": base, "prompt": "a"})
    assert "trainshed worker" in envelope(answer, 503)["message"]


def test_however_many_wait_for_a_sampler_others_are_answered(live, http, base, asked):
    waiting = SAMPLING_OF_A_PROJECT
    with httpx.Client(base_url=live.url, headers=http.headers, timeout=DEADLINE_SECONDS) as many:
        body = {"model": base, "prompt": "endless", "stream": True}
        streams = [many.stream("POST", "/v1/completions", json=body) for _ in range(waiting)]
        answers = [stream.__enter__() for stream in streams]
        assert {answer.status_code for answer in answers} == {200}
        assert http.get("/v1/jobs").status_code == 200
        # More of this project would wait. Another's is asked for at once.
        with live.http(live.key()) as others:
            assert others.post("/v1/completions", json={"model": base, "prompt": "abc"}).status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
    assert len(asked) == waiting + 1


def test_a_stream_that_a_key_opened_ends_with_an_error_when_it_is_revoked(live, http, base, asked, monkeypatch):
    monkeypatch.setattr(keyring, "LOOK_SECONDS", 0.05)
    key = http.post("/v1/keys", json={"name": "brief", "scopes": ["read"]}).json()
    body = {"model": base, "prompt": "endless", "stream": True}
    with live.http(key["secret"]) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert "and so on" in next(lines)
        http.delete(f"/v1/keys/{key['id']}")
        (last,) = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
    assert len(asked) == 1
