"""Uploads in parts over HTTP: each part stays through crashes, and the whole is judged like any file."""

import hashlib
import socket

import pytest

from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS, MAX_FILE_BYTES, wait_for
from tests.api.test_files import CHAT, megatron, parquet
from tests.api.test_requests import envelope


def begin(http, size=None, **fields):
    ask = {
        "bytes": size or len(CHAT),
        "filename": "chat.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "fine-tune",
        **fields,
    }
    answer = http.post("/v1/uploads", json=ask)
    assert answer.status_code == 200, answer.text
    return answer.json()


def send(http, upload, content, **kwargs):
    return http.post(f"/v1/uploads/{upload}/parts", files={"data": ("upload", content)}, **kwargs)


def complete(http, upload, part_ids, **fields):
    return http.post(f"/v1/uploads/{upload}/complete", json={"part_ids": part_ids, **fields})


def test_an_interrupted_upload_goes_on_where_it_was(http):
    content = CHAT * 5
    upload = begin(http, len(content))
    assert (upload["object"], upload["status"], upload["file"]) == ("upload", "pending", None)
    assert upload["expires_at"] - upload["created_at"] == 3600
    for start in (0, 100):
        part = send(http, upload["id"], content[start : start + 100]).json()
        assert (part["object"], part["upload_id"]) == ("upload.part", upload["id"])

    # Whoever sent these has forgotten everything but the upload's id.
    assert http.get(f"/v1/uploads/{upload['id']}").json() == upload
    there = http.get(f"/v1/uploads/{upload['id']}/parts").json()
    assert [part["bytes"] for part in there["data"]] == [100, 100]
    assert there["data"][0]["md5"] == hashlib.md5(content[:100]).hexdigest()
    rest = send(http, upload["id"], content[200:]).json()
    ids = [*(part["id"] for part in there["data"]), rest["id"]]
    page = http.get(f"/v1/uploads/{upload['id']}/parts", params={"after": ids[0], "limit": 1}).json()
    assert ([part["id"] for part in page["data"]], page["has_more"]) == ([ids[1]], True)

    done = complete(http, upload["id"], ids, md5=hashlib.md5(content).hexdigest()).json()
    assert (done["status"], done["file"]["status"], done["file"]["bytes"]) == ("completed", "processed", len(content))
    assert http.get(f"/v1/files/{done['file']['id']}").json() == done["file"]
    assert http.get(f"/v1/files/{done['file']['id']}/content").content == content
    assert http.get(f"/v1/uploads/{upload['id']}/parts").json()["data"] == []
    assert complete(http, upload["id"], ids).json() == done
    assert envelope(send(http, upload["id"], b"more"), 409)["code"] == "invalid_state"
    assert envelope(http.post(f"/v1/uploads/{upload['id']}/cancel"), 409)["code"] == "invalid_state"
    http.delete(f"/v1/files/{done['file']['id']}")
    assert http.get(f"/v1/uploads/{upload['id']}").json()["file"] is None


def test_a_bad_line_is_named_as_in_a_file_that_comes_at_once(http):
    content = CHAT * 2 + b"{\n"
    upload = begin(http, len(content))
    ids = [send(http, upload["id"], part).json()["id"] for part in (content[:30], content[30:])]
    error = envelope(complete(http, upload["id"], ids), 400)
    assert (error["code"], error["param"]) == ("invalid_file", "file:3")
    assert http.get("/v1/files").json()["data"] == []
    assert http.get(f"/v1/uploads/{upload['id']}").json()["status"] == "pending"


@pytest.mark.parametrize(
    "content",
    [pytest.param(parquet(input_ids=[[1, 2], [3, 4, 259]]), id="Parquet"), pytest.param(megatron(idx=b"x"), id="tar")],
)
def test_files_of_ids_may_come_in_parts_too(http, content):
    upload = begin(http, len(content), purpose="pretrain")
    ids = [send(http, upload["id"], part).json()["id"] for part in (content[:2], content[2:])]
    answer = complete(http, upload["id"], ids)
    if content.startswith(b"PAR1"):
        assert http.get(f"/v1/files/{answer.json()['file']['id']}/report").json()["tokens"] == 5
    else:
        assert "end in .bin" in envelope(answer, 400)["message"]


def raw(http, upload, body):
    path = f"/v1/uploads/{upload}/parts"
    return http.post(path, content=body, headers={"content-type": "multipart/form-data; boundary=b"})


PART = b'--b\r\ncontent-disposition: form-data; name="data"; filename="upload"\r\n\r\nabc\r\n'


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(PART * 2 + b"--b--\r\n", id="two parts in one form"),
        pytest.param(PART.replace(b'"data"', b'"file"') + b"--b--\r\n", id="a part of another name"),
        pytest.param(PART.replace(b'; filename="upload"', b"") + b"--b--\r\n", id="a text"),
        pytest.param(
            PART + PART.replace(b'; filename="upload"', b"") + b"--b--\r\n", id="a text of the same name beside it"
        ),
        pytest.param(PART[:-10], id="cut short"),
        pytest.param(b"--b--\r\n", id="nothing"),
        pytest.param(b"{}", id="something else"),
    ],
)
# The spooled beginning of a part that broke off is left to the garbage collector by the parser.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_form_that_is_not_one_part_is_a_bad_request_and_nothing_is_kept(live, http, body):
    upload = begin(http)["id"]
    envelope(raw(http, upload, body), 400)
    assert http.get(f"/v1/uploads/{upload}/parts").json()["data"] == []
    assert list(live.services.storage.list(f"uploads/{upload}")) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_part_whose_sender_dies_is_not_kept_and_can_be_sent_again(live, key, http):
    upload = begin(http)["id"]
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        head = (
            f"POST /v1/uploads/{upload}/parts HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n"
        )
        connection.sendall(head.encode() + PART[:-2])
    part = send(http, upload, CHAT).json()["id"]
    assert [one["id"] for one in http.get(f"/v1/uploads/{upload}/parts").json()["data"]] == [part]
    assert complete(http, upload, [part]).json()["status"] == "completed"


def test_a_part_that_is_too_large_is_refused_while_it_comes_in(http):
    upload = begin(http, MAX_FILE_BYTES)["id"]

    def endless():
        yield PART[:-5]
        for _ in range(1024):
            yield b"a" * 65536

    path, kind = f"/v1/uploads/{upload}/parts", {"content-type": "multipart/form-data; boundary=b"}
    envelope(http.post(path, content=endless(), headers=kind), 413)
    error = envelope(
        http.post("/v1/uploads", json={"bytes": MAX_FILE_BYTES + 1, "filename": "a", "purpose": "batch"}), 413
    )
    assert (error["code"], error["param"]) == ("file_too_large", "bytes")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        pytest.param({"bytes": 0}, "bytes", id="no bytes"),
        pytest.param({"bytes": -1}, "bytes", id="fewer"),
        pytest.param({"bytes": True}, "bytes", id="a truth value"),
        pytest.param({"bytes": 1e300}, "bytes", id="too large a number"),
        pytest.param({"purpose": "fun"}, "purpose", id="no such purpose"),
        pytest.param({"purpose": "fine-tune-results"}, "purpose", id="a purpose of ours"),
        pytest.param({"filename": ""}, "filename", id="no name"),
        pytest.param(
            {"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds", id="too soon"
        ),
        pytest.param({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after.anchor", id="since when"),
        pytest.param({"mime": "text/plain"}, "mime", id="a misspelt field"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_a_byte_of_it(http, changes, param):
    ask = {"bytes": 1, "filename": "a.txt", "mime_type": "text/plain", "purpose": "pretrain"} | changes
    assert envelope(http.post("/v1/uploads", json=ask), 400)["param"] == param


def test_a_cancelled_upload_leaves_nothing(live, http):
    upload = begin(http)["id"]
    part = send(http, upload, CHAT).json()["id"]
    assert [http.post(f"/v1/uploads/{upload}/cancel").json()["status"] for _ in range(2)] == ["cancelled"] * 2
    envelope(send(http, upload, CHAT), 409)
    answer = complete(http, upload, [part])
    assert envelope(answer, 409)["code"] == "invalid_state"
    assert answer.headers["x-should-retry"] == "false"
    wait_for(lambda: not list(live.services.storage.list(f"uploads/{upload}")))


def test_nobody_learns_that_another_projects_upload_exists(live, http):
    upload = begin(http)["id"]
    with live.http(live.key()) as stranger:
        for method, path in [("GET", ""), ("GET", "/parts"), ("POST", "/cancel"), ("POST", "/complete")]:
            body = {"part_ids": []} if path == "/complete" else None
            answers = [stranger.request(method, f"/v1/uploads/{id_}{path}", json=body) for id_ in (upload, "upload-0")]
            errors = [envelope(answer, 404) for answer in answers]
            assert errors[0]["message"].replace(upload, "upload-0") == errors[1]["message"]
        envelope(send(stranger, upload, CHAT), 404)


def test_a_file_says_when_it_expires(http):
    stay = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    answer = http.post("/v1/files", data={"purpose": "pretrain", **stay}, files={"file": ("a.txt", b"to be")}).json()
    assert answer["expires_at"] == answer["created_at"] + 7200
    assert driving.upload(http)["expires_at"] is None
    upload = begin(http, expires_after={"anchor": "created_at", "seconds": 3600})["id"]
    file = complete(http, upload, [send(http, upload, CHAT).json()["id"]]).json()["file"]
    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        *(
            ({"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}, "expires_after[seconds]")
            for seconds in ("3599", "2592001", "-1", "1e4", "", "9" * 5000, "\u0663\u0666\u0660\u0660")
        ),
    ],
)
def test_a_stay_that_there_is_not_is_refused(http, fields, param):
    answer = http.post("/v1/files", data={"purpose": "pretrain", **fields}, files={"file": ("a.txt", b"to be")})
    assert envelope(answer, 400)["param"] == param
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("purpose", ["fine-tune-results", "assistants_output", "batch_output"])
def test_a_purpose_that_only_a_service_writes_is_refused_in_words(http, purpose):
    answer = http.post("/v1/files", data={"purpose": purpose}, files={"file": ("a.txt", b"to be")})
    assert "a service writes itself" in envelope(answer, 400)["message"]


@pytest.mark.parametrize("purpose", ["assistants", "batch", "vision", "user_data", "evals"])
def test_files_for_what_is_not_training_are_kept_as_they_are(http, purpose):
    content = b"\x89PNG \xff\x00 anything"
    file = driving.upload(http, content, "any.bin", purpose)
    assert (file["purpose"], file["status"]) == (purpose, "processed")
    assert http.get(f"/v1/files/{file['id']}/content").content == content
