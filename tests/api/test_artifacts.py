"""Downloads: whole, in parts, again, all at once."""

import hashlib
import io
import tarfile

import pytest

from tests.api import driving
from tests.api.test_requests import envelope

WEIGHTS = "adapter/adapter_model.safetensors"
CONTENT = driving.ADAPTER[WEIGHTS]


@pytest.fixture
def job(live, http, tmp_path):
    return driving.finished(live.services, http, tmp_path)


def test_a_result_is_listed_with_sizes_hashes_and_its_manifest(http, job):
    listed = http.get(f"/v1/jobs/{job}/artifacts").json()
    found = {one["path"]: one for one in listed["data"]}
    assert set(found) == {*driving.ADAPTER, "manifest.json"}
    assert found[WEIGHTS] == {
        "path": WEIGHTS, "bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest(), "kind": "adapter",
    }  # fmt: skip
    assert listed["manifest"]["seed"] == 1
    assert http.get(f"/v1/jobs/{job}").json()["artifacts"] == listed["data"]
    assert http.get("/v1/jobs").json()["data"][0]["artifacts"] == listed["data"]


def test_before_there_is_a_result_the_list_is_empty(http):
    job = driving.submit(http)["id"]
    assert http.get(f"/v1/jobs/{job}/artifacts").json()["data"] == []
    assert http.get(f"/v1/jobs/{job}/artifacts").json()["manifest"] is None
    envelope(http.get(f"/v1/jobs/{job}/artifacts/manifest.json"), 404)


def test_a_file_comes_whole_with_its_hash_as_etag(http, job):
    answer = http.get(f"/v1/jobs/{job}/artifacts/{WEIGHTS}")
    assert answer.content == CONTENT
    assert answer.headers["etag"] == f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    assert answer.headers["content-length"] == str(len(CONTENT))
    assert answer.headers["accept-ranges"] == "bytes"
    assert 'filename="adapter_model.safetensors"' in answer.headers["content-disposition"]


@pytest.mark.parametrize(
    ("headers", "status", "part"),
    [
        pytest.param({"range": "bytes=100-"}, 206, slice(100, None), id="from an offset"),
        pytest.param({"range": "bytes=-7"}, 206, slice(-7, None), id="the end"),
        pytest.param({"range": "bytes=5-8", "if-range": "{etag}"}, 206, slice(5, 9), id="if it is still the same"),
        pytest.param({"range": "bytes=5-8", "if-range": '"other"'}, 200, slice(None), id="the whole if it is not"),
        pytest.param({"if-none-match": '"other"'}, 200, slice(None), id="the whole if mine is another"),
        pytest.param({"if-none-match": '"other", {etag}'}, 304, slice(0), id="nothing if I have it"),
        pytest.param({"if-none-match": "W/{etag}"}, 304, slice(0), id="compared weakly"),
        pytest.param({"if-none-match": "*"}, 304, slice(0), id="nothing if I have any"),
    ],
)
def test_a_part_can_be_had_and_a_good_copy_is_not_sent_again(http, job, headers, status, part):
    etag = f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    headers = {name: value.replace("{etag}", etag) for name, value in headers.items()}
    answer = http.get(f"/v1/jobs/{job}/artifacts/{WEIGHTS}", headers=headers)
    assert (answer.status_code, answer.content) == (status, CONTENT[part])
    if status == 206:
        start, end, _ = part.indices(len(CONTENT))
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(CONTENT)}"


def test_a_range_beyond_the_end_is_told_the_size(http, job):
    answer = http.get(f"/v1/jobs/{job}/artifacts/{WEIGHTS}", headers={"range": f"bytes={len(CONTENT)}-"})
    assert envelope(answer, 416)["code"] == "range_not_satisfiable"
    assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"


@pytest.mark.parametrize(
    "path", ["nothing", "../manifest.json", "%2e%2e/%2e%2e/trainshed.db", "adapter", "adapter//x", "/etc/passwd"]
)
def test_only_what_is_listed_can_be_had(http, job, path):
    envelope(http.get(f"/v1/jobs/{job}/artifacts/{path}"), 404)


def test_all_of_it_comes_as_one_archive_of_the_announced_length(http, job):
    answer = http.get(f"/v1/jobs/{job}/artifacts.tar")
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}
    assert set(found) == {*driving.ADAPTER, "manifest.json"}
    assert found[WEIGHTS] == CONTENT


def test_of_nothing_there_is_no_archive(http):
    waits = driving.submit(http)["id"]
    error = envelope(http.get(f"/v1/jobs/{waits}/artifacts.tar"), 404)
    assert error["message"] == f"Job {waits} is queued and has no artifacts; a job has them once it has succeeded."


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 200, id="the whole"),
        pytest.param({"range": "bytes=5-8"}, 206, id="a part"),
        pytest.param({"range": "bytes=5-8", "if-range": "{etag}"}, 206, id="a part of the same"),
        pytest.param({"range": "bytes=5-8", "if-range": '"other"'}, 200, id="the whole of another"),
        pytest.param({"range": "bytes=999999999-"}, 416, id="beyond the end"),
        pytest.param({"if-none-match": "{etag}"}, 304, id="what I have"),
    ],
)
@pytest.mark.parametrize("of", ["artifact", "file"])
def test_head_says_what_get_would_and_sends_no_byte_of_it(http, job, headers, status, of):
    content, path = CONTENT, f"/v1/jobs/{job}/artifacts/{WEIGHTS}"
    if of == "file":
        content = driving.TEXT
        path = f"/v1/files/{driving.upload(http)['id']}/content"
    etag = f'"{hashlib.sha256(content).hexdigest()}"'
    headers = {name: value.replace("{etag}", etag) for name, value in headers.items()}
    head, get = (http.request(method, path, headers=headers) for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (status, b"")
    assert get.status_code == status
    said = ("etag", "accept-ranges", "content-length", "content-range", "content-type", "content-disposition")
    assert {name: head.headers.get(name) for name in said} == {name: get.headers.get(name) for name in said}
    if status == 206:
        assert (get.content, head.headers["content-range"]) == (content[5:9], f"bytes 5-8/{len(content)}")
