"""Files over HTTP, in OpenAI's shapes: judged as they come in, named as one likes; of a bad one nothing is kept."""

import io
import socket
import struct
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.api import driving
from tests.api.conftest import DEADLINE_SECONDS, MAX_FILE_BYTES
from tests.api.test_requests import envelope

CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def test_a_file_is_uploaded_listed_described_read_and_deleted(http):
    file = driving.upload(http, CHAT * 3, "chat.jsonl")
    assert (file["object"], file["bytes"], file["filename"]) == ("file", len(CHAT) * 3, "chat.jsonl")
    assert (file["purpose"], file["status"]) == ("fine-tune", "processed")
    assert http.get(f"/v1/files/{file['id']}").json() == file
    assert http.get("/v1/files").json()["data"] == [file]
    assert http.get("/v1/files", params={"purpose": "batch"}).json()["data"] == []
    assert http.get(f"/v1/files/{file['id']}/content").content == CHAT * 3
    report = http.get(f"/v1/files/{file['id']}/report").json()
    assert (report["format"], report["examples"], report["errors"]) == ("chat", 3, [])
    assert http.delete(f"/v1/files/{file['id']}").json() == {"id": file["id"], "object": "file", "deleted": True}
    for path in ("", "/content", "/report"):
        envelope(http.get(f"/v1/files/{file['id']}{path}"), 404)


def test_a_malformed_line_is_named_in_the_message_and_in_the_parameter(http):
    answer = http.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("chat.jsonl", CHAT * 2 + b'{"messages": [}\n')}
    )
    error = envelope(answer, 400)
    assert "line 3" in error["message"]
    assert error["param"] == "file:3"
    assert error["code"] == "invalid_file"
    assert [finding["line"] for finding in error["errors"]] == [3]
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "empty", id="nothing in it"),
        pytest.param(b"\xff\xfe\x00\x01", "UTF-8", id="not text"),
        pytest.param(b'{"prompt": 1, "completion": "b"}\n', "line 1", id="a field of a wrong type"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_a_reason(http, content, said):
    answer = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", content)})
    assert said in envelope(answer, 400)["message"]


@pytest.mark.parametrize(
    "name",
    [
        "../../../../tmp/evil.jsonl",
        "/etc/x.jsonl",
        "n" * 300 + ".jsonl",
        "..",
        "a\u2028b.jsonl",
        'q"; x="y.jsonl',
        "ü.jsonl",
    ],
)
def test_a_file_name_is_a_label_and_nothing_else(live, http, name):
    before = sorted(live.services.settings.data_dir.parent.glob("*"))
    file = driving.upload(http, CHAT, name)
    assert 0 < len(file["filename"]) <= 255
    assert "/" not in file["filename"]
    content = http.get(f"/v1/files/{file['id']}/content")
    assert content.content == CHAT
    assert content.headers["content-disposition"].startswith("attachment; ")
    assert sorted(live.services.settings.data_dir.parent.glob("*")) == before


def raw(http, body: bytes):
    return http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})


def part(name: str, content: bytes, filename: bytes | None = None) -> bytes:
    label = b"" if filename is None else b'; filename="' + filename + b'"'
    return (
        b'--b\r\ncontent-disposition: form-data; name="'
        + name.encode()
        + b'"'
        + label
        + b"\r\n\r\n"
        + content
        + b"\r\n"
    )


PURPOSE = part("purpose", b"fine-tune")


@pytest.mark.parametrize("filename", [b"a\x00b.jsonl", b"", b"\xff\xfe.jsonl"])
def test_names_that_no_client_library_would_send_are_harmless_too(http, filename):
    answer = raw(http, PURPOSE + part("file", CHAT, filename) + b"--b--\r\n")
    assert answer.status_code in {200, 400}
    if answer.status_code == 200:
        assert answer.json()["filename"].isprintable()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(PURPOSE + b"--b--\r\n", "file", id="no file"),
        pytest.param(part("file", CHAT, b"a.jsonl") + b"--b--\r\n", "purpose", id="no purpose"),
        pytest.param(part("purpose", b"fun") + part("file", CHAT, b"a") + b"--b--", "purpose", id="no such purpose"),
        pytest.param(PURPOSE + part("file", b"text as a field") + b"--b--\r\n", "file", id="a file that is none"),
        pytest.param(PURPOSE + part("file", CHAT, b"a") * 2 + b"--b--\r\n", "file", id="two files"),
        pytest.param(PURPOSE + part("prupose", b"") + part("file", CHAT, b"a") + b"--b--\r\n", "prupose", id="other"),
        pytest.param(PURPOSE + part("file", CHAT, b"a")[:-20], "file", id="cut short"),
        pytest.param(b"", "file", id="empty"),
        pytest.param(b"not multipart at all", "file", id="something else"),
    ],
)  # fmt: skip
# The spooled beginning of a part that broke off is left to the garbage collector by the parser.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_form_that_is_not_one_file_and_its_purpose_is_a_bad_request(http, body, param):
    error = envelope(raw(http, body), 400)
    assert param is None or error["param"] == param
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("charset", ["undefined", "punycode"])
def test_a_form_in_a_charset_that_reads_nothing_is_told_to_use_utf8(http, charset):
    body = PURPOSE + part("file", CHAT, b"a.jsonl") + b"--b--\r\n"
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    error = envelope(http.post("/v1/files", content=body, headers={"content-type": kind}), 400)
    assert charset in error["message"]
    assert "UTF-8" in error["message"]
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("charset", ["utf-8", "ISO-8859-1", "nobody-knows-it"])
def test_a_form_in_another_charset_is_read(http, charset):
    body = PURPOSE + part("file", CHAT, b"a.jsonl") + b"--b--\r\n"
    kind = f"Multipart/Form-Data; charset={charset}; boundary=b"
    assert http.post("/v1/files", content=body, headers={"content-type": kind}).status_code == 200


def test_a_body_that_can_hold_no_file_is_refused_before_it_comes(live, key):
    """A parser of names and values takes a minute for each 100 MB of separators, and everybody waits for it."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/x-www-form-urlencoded\r\ncontent-length: 100000\r\n\r\n".encode()
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_json_instead_of_a_form_is_told_what_to_send(http):
    assert "multipart/form-data" in envelope(http.post("/v1/files", json={"purpose": "fine-tune"}), 400)["message"]


def test_a_file_that_is_too_large_is_refused_whether_its_length_is_announced_or_not(http):
    most = b"a" * MAX_FILE_BYTES
    assert driving.upload(http, most)["bytes"] == MAX_FILE_BYTES
    answer = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.txt", most + b"a")})
    assert envelope(answer, 413)["code"] == "file_too_large"

    def endless():
        yield PURPOSE + part("file", b"", b"a.txt")[:-2]
        for _ in range(1024):
            yield b"a" * 65536

    answer = http.post("/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=b"})
    envelope(answer, 413)
    assert len(http.get("/v1/files").json()["data"]) == 1


def test_files_come_in_pages_by_age(http):
    made = [driving.upload(http, filename=f"{n}.txt")["id"] for n in range(3)]
    first = http.get("/v1/files", params={"limit": 2}).json()
    assert [file["id"] for file in first["data"]] == [made[2], made[1]]
    assert first["has_more"]
    rest = http.get("/v1/files", params={"limit": 2, "after": made[1]}).json()
    assert [file["id"] for file in rest["data"]] == [made[0]]
    assert not rest["has_more"]
    assert [file["id"] for file in http.get("/v1/files", params={"order": "asc"}).json()["data"]] == made


def test_a_file_that_a_job_needs_stays(http):
    job = driving.submit(http)
    (file,) = job["spec"]["data"]["train"]
    answer = http.delete(f"/v1/files/{file}")
    assert envelope(answer, 409)["code"] == "in_use"
    assert answer.headers["x-should-retry"] == "false"
    http.post(f"/v1/jobs/{job['id']}/cancel")
    assert http.delete(f"/v1/files/{file}").json()["deleted"]


def test_a_part_of_a_file_can_be_had(http):
    file = driving.upload(http, CHAT, "chat.jsonl")["id"]
    answer = http.get(f"/v1/files/{file}/content", headers={"range": "bytes=1-10"})
    assert (answer.status_code, answer.content) == (206, CHAT[1:11])


def parquet(**columns: object) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table(columns), made)
    return made.getvalue()


def megatron(**files: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for ending, content in files.items():
            member = tarfile.TarInfo(f"corpus.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


INDEX = struct.pack("<9sQBQQ2i2q3q", b"MMIDIDX\0\0", 1, 8, 2, 3, 2, 3, 0, 4, 0, 1, 2)
"""Two documents, of two and three ids of two bytes."""


@pytest.mark.parametrize(
    ("content", "container"),
    [
        pytest.param(parquet(input_ids=[[1, 2], [3, 4, 259]]), "parquet", id="Parquet"),
        pytest.param(
            megatron(idx=INDEX, bin=struct.pack("<5H", 1, 2, 3, 4, 259)), "megatron", id="Megatron's two files"
        ),
    ],
)
def test_files_of_ids_are_judged_and_trained_on(http, content, container):
    file = driving.upload(http, content, "corpus")["id"]
    report = http.get(f"/v1/files/{file}/report").json()
    assert (report["format"], report["container"], report["examples"], report["tokens"]) == ("tokens", container, 2, 5)
    assert (report["max_id"], report["masked"], report["errors"]) == (259, False, [])
    assert report["longest"] == {"line": 2, "tokens": 3}
    assert http.get(f"/v1/files/{file}/content").content == content
    answer = http.post("/v1/jobs", json=driving.spec(file) | {"tokenizer": {"type": "bytes"}})
    assert answer.status_code == 201, answer.text
    assert answer.json()["run_config"]["data"]["format"] == "tokens"


@pytest.mark.parametrize(
    ("content", "said", "param"),
    [
        pytest.param(parquet(input_ids=[[1], [-2]]), "the id is -2", "file:2", id="an id below zero"),
        pytest.param(parquet(text=["a"]), "no column input_ids", "file", id="no ids"),
        pytest.param(megatron(idx=INDEX), "end in .bin", "file", id="half of Megatron's files"),
        pytest.param(INDEX, "one tar", "file", id="Megatron's index alone"),
        pytest.param(
            parquet(input_ids=[[0] * (MAX_FILE_BYTES + 1)]), "262,145 ids, and at most 262,144", "file",
            id="very many, in few bytes",
        ),
        pytest.param(b"PAR1 and no more", "can't be read", "file", id="no Parquet at all"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_ids_is_said_at_the_door(http, content, said, param):
    answer = http.post("/v1/files", data={"purpose": "pretrain"}, files={"file": ("corpus", content)})
    error = envelope(answer, 400)
    assert said in error["message"]
    assert error["param"] == param
