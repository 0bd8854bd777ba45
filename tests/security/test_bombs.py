"""Few bytes that stand for many: JSON, archives, Parquet, forms and YAML. Each is refused in words, and soon."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import catalog
from core.errors import InvalidModel
from tests.api import driving
from tests.api.conftest import MAX_FILE_BYTES
from tests.api.test_files import INDEX, megatron, parquet
from tests.api.test_requests import envelope
from tests.core.test_catalog import folder, header

DEEP = 20_000
OBJECT = '{"a":'
FIELD = b'--b\r\ncontent-disposition: form-data; name="'


def send(http: httpx.Client, content: bytes, filename: str = "bomb", purpose: str = "fine-tune") -> httpx.Response:
    return http.post("/v1/files", data={"purpose": purpose}, files={"file": (filename, content)})


def nested(opening: str, closing: str, inside: str = "1") -> str:
    return opening * DEEP + inside + closing * DEEP


LINES = {
    "lists in lists": f'{{"text": {nested("[", "]")}}}',
    "objects in objects": f'{{"messages": {nested(OBJECT, "}")}}}',
    "tools that are deep": f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": {nested("[", "]")}}}',
    "a number of many digits": '{"text": ' + "9" * 100_000 + "}",
    "a weight of many digits": '{"messages": [{"role": "user", "content": "a", "weight": ' + "9" * 100_000 + "}]}",
    "an exponent": '{"text": 1e999999999}',
    "a name twice, very often": "{" + ",".join(['"text": "a"'] * 20_000) + ', "prompt": 1}',
    "brackets that never close": "[" * 200_000,
    "a text that never ends": '{"text": "' + "a" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_of_json_that_is_a_bomb_is_named_by_its_number(http, line: str) -> None:
    answer = send(http, b'{"text": "fine"}\n' + line.encode() + b"\n", "bomb.jsonl")
    error = envelope(answer, 400)
    assert error["code"] == "invalid_file"
    assert len(answer.content) < 10_000, "the bomb is not sent back"


@pytest.mark.parametrize("vocab", [nested("[", "]"), nested(OBJECT, "}"), '{"a": ' + "9" * 5000 + "}"], ids=[
    "lists in lists", "objects in objects", "a number of many digits"])  # fmt: skip
def test_a_tokenizer_that_is_a_bomb_is_none(http, vocab: str) -> None:
    content = f'{{"model": {{"vocab": {vocab}}}}}'.encode()
    assert "not a tokenizer.json" in envelope(send(http, content, "tokenizer.json", "tokenizer"), 400)["message"]


BODIES: dict[str, bytes] = {
    "lists in lists": nested("[", "]").encode(),
    "labels in labels": f'{{"kind": "pretrain", "labels": {nested(OBJECT, "}")}}}'.encode(),
    "a number of many digits": b'{"kind": "pretrain", "priority": ' + b"9" * 100_000 + b"}",
    "an exponent": b'{"kind": "pretrain", "training": {"lr": 1e99999999}}',
    "many names": b'{"kind": "pretrain", ' + b",".join(b'"a%d": 1' % n for n in range(5_000)) + b"}",
    "many labels": b'{"kind": "pretrain", "labels": {' + b",".join(b'"a%d": "1"' % n for n in range(5_000)) + b"}}",
    "many files": b'{"kind": "pretrain", "data": {"train": [' + b",".join([b'"file-0"'] * 20_000) + b"]}}",
    "infinity": b'{"kind": "pretrain", "training": {"lr": Infinity}}',
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans", "/v1/fine_tuning/jobs", "/v1/webhook_endpoints"])
def test_a_body_that_is_a_bomb_is_a_bad_request(http, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 404}, answer.text[:300]
    envelope(answer, answer.status_code)
    assert len(answer.content) < 10_000, "the bomb is not sent back"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_a_body_that_says_to_be_packed_is_not_unpacked(http, encoding: str) -> None:
    packed = gzip.compress(bytes(50_000_000))
    headers = {"content-type": "application/json", "content-encoding": encoding}
    envelope(http.post("/v1/jobs", content=packed, headers=headers), 400)
    # As the content of a file it is bytes like any others.
    assert driving.upload(http, packed, "a.gz", purpose="user_data")["bytes"] == len(packed)


def test_a_zip_is_not_unpacked(http) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.jsonl", bytes(50_000_000))
    envelope(send(http, made.getvalue(), "train.zip"), 400)


def test_a_parquet_file_that_unpacks_to_very_much_is_refused_by_what_it_says_of_itself(http) -> None:
    ids = pa.array([[7] * 1_000_000] * 20, pa.list_(pa.int32()))
    made = io.BytesIO()
    pq.write_table(pa.table({"input_ids": ids}), made, compression="zstd")
    assert len(made.getvalue()) < MAX_FILE_BYTES / 4, "few bytes"
    assert "20,000,000 ids" in envelope(send(http, made.getvalue(), "a.parquet"), 400)["message"]


def test_a_parquet_file_that_lies_about_its_size_is_refused(http) -> None:
    content = parquet(input_ids=[[1, 2, 3]])
    footer = struct.unpack("<I", content[-8:-4])[0]
    for length in (0, 2**31 - 1, 2**32 - 1, footer * 2, 1):
        envelope(send(http, content[:-8] + struct.pack("<I", length) + b"PAR1", "a.parquet"), 400)


def test_an_index_of_megatrons_that_promises_very_much_is_refused(http) -> None:
    for sequences, documents in ((2**62, 2**62), (2**31, 3), (2, 2**40)):
        index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, documents)
        envelope(send(http, megatron(idx=index + bytes(64), bin=bytes(64))), 400)
    # Two documents of all that there is, a million times over.
    long = struct.pack("<2i2q3q", 2**31 - 1, 2**31 - 1, 0, 4, 0, 1, 2)
    envelope(send(http, megatron(idx=INDEX[:34] + long, bin=bytes(64))), 400)


def tar(*members: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"root:x") if member.isreg() else None)
    return made.getvalue()


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, to
    return made


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(tar(member("a.idx", 6), member("a.bin", kind=tarfile.SYMTYPE, to="/etc/passwd")), id="a link"),
        pytest.param(tar(member("a.idx", 6), member("a.bin", kind=tarfile.LNKTYPE, to="/etc/passwd")), id="hard link"),
        pytest.param(tar(member("../../a.idx", 6), member("/etc/a.bin", 6)), id="paths that lead out"),
        pytest.param(tar(member("a.idx", kind=tarfile.CHRTYPE), member("a.bin", kind=tarfile.FIFOTYPE)), id="devices"),
        pytest.param(tar(*(member(f"{n}.idx", 6) for n in range(200))), id="very many files"),
    ],
)
def test_a_tar_is_never_unpacked_onto_the_disk(http, archive: bytes) -> None:
    answer = send(http, archive, "corpus.tar")
    envelope(answer, 400)
    assert b"root" not in answer.content


def test_a_tar_whose_file_is_larger_than_the_tar_is_refused(http) -> None:
    whole = megatron(idx=INDEX, bin=bytes(10))
    at = whole.index(b"corpus.bin")
    forged = tarfile.TarInfo("corpus.bin")
    forged.size = 2**33
    block = forged.tobuf(tarfile.GNU_FORMAT)
    envelope(send(http, whole[:at] + block + whole[at + 512 :], "corpus.tar"), 400)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(b"".join(FIELD + b'%d"\r\n\r\n\r\n' % n for n in range(5000)), id="fields"),
        pytest.param(b"".join(FIELD + b'file"; filename="%d"\r\n\r\n\r\n' % n for n in range(5000)), id="files"),
        pytest.param(FIELD + b"a" * 200_000 + b'"\r\n\r\n\r\n', id="a name"),
        pytest.param(b"--b\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n\r\n", id="headers"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_form_of_very_many_parts_is_refused(http, form: bytes) -> None:
    answer = http.post(
        "/v1/files", content=form + b"--b--\r\n", headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert answer.status_code in {400, 413}
    envelope(answer, answer.status_code)


MODEL_FILES: dict[str, dict[str, bytes]] = {
    "a configuration that is deep": {"config__json": nested("[", "]").encode()},
    "a tokenizer that is deep": {"tokenizer__json": f'{{"model": {nested("[", "]")}}}'.encode()},
    "an index that is deep": {"model__safetensors__index__json": f'{{"weight_map": {nested("[", "]")}}}'.encode()},
    "a header that is deep": {"model__safetensors": header(nested("[", "]").encode())},
    "a header as long as it can say": {"model__safetensors": b"\xff" * 8 + b"{}"},
    "a header of a hundred million bytes": {"model__safetensors": (10**8).to_bytes(8, "little") + b"{}"},
    "very many layers": {"config__json": b'{"model_type": "llama", "num_hidden_layers": 99999999999}'},
    "a tensor of very many dimensions": {
        "model__safetensors": header(
            json.dumps({"a": {"dtype": "F32", "shape": [2] * 10_000, "data_offsets": [0, 4]}}).encode()
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("files", MODEL_FILES.values(), ids=MODEL_FILES)
def test_a_file_of_a_base_that_is_a_bomb_is_named(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(InvalidModel):
        catalog.inspect(folder(tmp_path, **files))


def test_a_spec_of_aliases_of_aliases_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from api.cli import app

    lines = ["a0: &a0 [lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    lines += ["kind: pretrain", "labels: {team: *a59}", "data: {train: *a59}", "model: *a59"]
    spec = tmp_path / "job.yaml"
    spec.write_text("\n".join(lines))
    answer: Any = CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", "--key", "ts_x", "submit", str(spec)])
    assert answer.exit_code == 2, answer.output
    assert len(answer.output) < 100_000
