"""The unmodified openai client on this server: files, models, completions, and its own view of our errors."""

import asyncio
import hashlib
import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import openai
import pytest
from openai.resources.chat import Completions

from tests.api import driving
from tests.api.conftest import wait_for
from tests.api.test_files import CHAT
from tests.api.test_models import MODEL, base

__all__ = ["base"]


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sdk(live, key):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
        yield client


def test_files_are_created_waited_for_listed_read_and_deleted(sdk):
    file = sdk.files.create(file=io.BytesIO(CHAT), purpose="fine-tune")
    assert sdk.files.wait_for_processing(file.id).status == "processed"
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.content(file.id).read() == CHAT
    more = [sdk.files.create(file=("b.jsonl", CHAT), purpose="fine-tune").id for _ in range(2)]
    assert [one.id for one in sdk.files.list(limit=1)] == [*more[::-1], file.id]
    assert sdk.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(file.id)


@pytest.mark.parametrize("page", ["README.md", "docs/openai.md"])
def test_what_a_page_shows_waits_for_the_job_and_asks_what_came_of_it(
    live, http, key, base, monkeypatch, tmp_path, page
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINSHED_URL", live.url)
    monkeypatch.setenv("TRAINSHED_API_KEY", key)
    blocks = re.findall(r"^```python\n(.*?)^```", Path(page).read_text(), re.MULTILINE | re.DOTALL)
    example = next(block for block in blocks if "fine_tuning" in block)
    # No model is loaded here: what it would be asked is enough.
    with ThreadPoolExecutor() as pool, patch.object(Completions, "create", autospec=True) as asked:
        job = pool.submit(succeed_the_first, live, http, tmp_path)
        exec(compile(example.replace("smollm2-135m", base), page, "exec"), {})
    assert asked.call_args.kwargs["model"] == http.get(f"/v1/jobs/{job.result()}").json()["model"] is not None


def succeed_the_first(live, http, folder):
    job = wait_for(lambda: http.get("/v1/jobs").json()["data"])[0]["id"]
    fence = driving.run(live.services, job)
    driving.publish(live.services, job, folder, MODEL)
    driving.succeed(live.services, job, fence)
    return job


def test_a_bad_file_is_a_bad_request_with_its_line(sdk):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.create(file=("chat.jsonl", CHAT + b"{\n"), purpose="fine-tune")
    assert "line 2" in caught.value.message
    assert (caught.value.param, caught.value.code) == ("file:2", "invalid_file")
    assert caught.value.request_id.startswith("req-")


def test_a_file_expires_when_it_was_told_to(sdk):
    stay = {"anchor": "created_at", "seconds": 3600}
    file = sdk.files.create(file=io.BytesIO(CHAT), purpose="fine-tune", expires_after=stay)
    assert file.expires_at == file.created_at + 3600


def test_a_large_file_is_uploaded_in_chunks(sdk, tmp_path):
    content = CHAT * 7
    (tmp_path / "chat.jsonl").write_bytes(content)
    upload = sdk.uploads.upload_file_chunked(
        file=tmp_path / "chat.jsonl", mime_type="application/jsonl", purpose="fine-tune", part_size=100,
        md5=hashlib.md5(content).hexdigest(),
    )  # fmt: skip
    assert (upload.status, upload.file.status, upload.file.filename) == ("completed", "processed", "chat.jsonl")
    assert sdk.files.content(upload.file.id).read() == content


def test_an_interrupted_upload_is_resumed(sdk):
    stay = {"anchor": "created_at", "seconds": 3600}
    upload = sdk.uploads.create(
        bytes=2 * len(CHAT), filename="a.jsonl", mime_type="text/plain", purpose="fine-tune", expires_after=stay
    )
    sdk.uploads.parts.create(upload.id, data=CHAT)
    # The client has no calls to ask what is there, but reaches ours.
    there = sdk.get(f"/uploads/{upload.id}/parts", cast_to=object)["data"]
    assert [(part["bytes"], part["md5"]) for part in there] == [(len(CHAT), hashlib.md5(CHAT).hexdigest())]
    rest = sdk.uploads.parts.create(upload.id, data=CHAT)
    with pytest.raises(openai.BadRequestError, match="md5"):
        sdk.uploads.complete(upload.id, part_ids=[there[0]["id"], rest.id], md5="0" * 32)
    done = sdk.uploads.complete(upload.id, part_ids=[there[0]["id"], rest.id])
    assert done.file.expires_at == done.file.created_at + 3600
    with pytest.raises(openai.ConflictError) as caught:
        sdk.uploads.cancel(upload.id)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_an_async_client_uploads_in_chunks(live, key):
    async def chunked():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
            return await client.uploads.upload_file_chunked(
                file=CHAT,
                filename="a.jsonl",
                bytes=len(CHAT),
                mime_type="text/plain",
                purpose="fine-tune",
                part_size=50,
            )

    assert asyncio.run(chunked()).status == "completed"


def test_models_are_listed_and_retrieved(sdk, base):
    assert base in {model.id for model in sdk.models.list()}
    assert sdk.models.retrieve(base).owned_by == "trainshed"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("ft:meta/llama:org::abc")


def test_a_model_is_deleted(live, sdk, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path, MODEL)
    name = f"ft:tiny/mine::{job}"
    http.post("/v1/models", json={"id": name, "source": {"job": job}})
    gone = sdk.models.delete(name)
    assert (gone.id, gone.object, gone.deleted) == (name, "model", True)
    with pytest.raises(openai.NotFoundError):
        sdk.models.delete(name)


def test_a_completion_without_a_sampler_is_an_error_that_may_pass(sdk, base):
    with pytest.raises(openai.InternalServerError) as caught:
        sdk.with_options(max_retries=0).completions.create(model=base, prompt="a")
    assert caught.value.code == "unavailable"


def test_a_wrong_key_is_an_authentication_error(live):
    wrong = openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong")
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_conflict_that_stays_one_is_not_tried_again(live, sdk, http, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    with pytest.raises(openai.ConflictError) as caught:
        sdk.post(f"/jobs/{job}/cancel", cast_to=object)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_native_routes_are_within_its_reach(live, sdk, http):
    job = driving.submit(http)["id"]
    driving.run(live.services, job)
    metrics = sdk.get(f"/jobs/{job}/metrics", cast_to=object, options={"params": {"names": "loss"}})
    assert len(metrics["series"]["loss"]) == 4
