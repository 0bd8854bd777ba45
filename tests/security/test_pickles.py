"""A pickle is a program. Where weights, checkpoints, data or messages come in, one that would leave a mark doesn't."""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kombu import serialization
from kombu.exceptions import ContentDisallowed
from safetensors import SafetensorError

from core import catalog
from core.errors import InvalidModel
from engine import checkpoint, lora, weights
from engine.checkpoint import BadCheckpoint
from engine.inventory import InvalidWeights
from engine.mesh import alone
from tests.api import driving
from tests.core.test_catalog import CONFIG, folder
from tests.engine.net import nets
from tests.engine.train import test_checkpoint as saving
from tests.engine.train.toy import ours
from tests.test_architecture import sources


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.mkdir, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What the bombs would make. That they can is seen first; that none did, at the end."""
    path = tmp_path / "a program ran"
    pickle.loads(pickle.dumps(Bomb(path)))
    path.rmdir()
    yield path
    assert not path.exists()


@pytest.fixture
def bare(mark: Path) -> bytes:
    return pickle.dumps(Bomb(mark))


@pytest.fixture
def zipped(mark: Path, tmp_path: Path) -> bytes:
    """As `torch.save` packs it, in which it lies in most .bin files."""
    torch.save({"model.embed_tokens.weight": Bomb(mark)}, tmp_path / "saved.bin")
    return (tmp_path / "saved.bin").read_bytes()


@pytest.fixture(params=["bare", "zipped"])
def bomb(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.getfixturevalue(request.param)
    return found


FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "os.system", "os.popen", "eval", "exec", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN_OPTIONS = {"allow_pickle", "trust_remote_code"}
"""Options of other people's functions, wherever they are not False."""


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; what is no name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_of_ours_reads_a_pickle_or_runs_what_it_was_given() -> None:
    findings = []
    for path, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                findings += [f"{path}:{node.lineno} imports {name}" for name in names if name in FORBIDDEN_IMPORTS]
            elif isinstance(node, ast.Call):
                called = dotted(node.func)
                findings += [f"{path}:{node.lineno} calls {called}"] * (called in FORBIDDEN_CALLS)
                findings += [
                    f"{path}:{node.lineno} says {option.arg}"
                    for option in node.keywords
                    if (option.arg in FORBIDDEN_OPTIONS or (option.arg == "shell" and called.startswith("subprocess.")))
                    and not (isinstance(option.value, ast.Constant) and option.value.value is False)
                ]
    assert not findings, "\n".join(findings)


def test_a_base_whose_weights_are_a_pickle_is_refused_by_their_name(bomb: bytes, tmp_path: Path) -> None:
    base = folder(tmp_path, model__safetensors=None)
    (base / "pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(InvalidModel, match=r"pickled \.bin files are not read"):
        catalog.inspect(base)
    (base / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(InvalidModel, match=r"pickled \.bin files are not read"):
        catalog.inspect(base)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_pickle_under_the_name_of_something_else_is_damaged(bomb: bytes, tmp_path: Path, name: str) -> None:
    base = folder(tmp_path)
    (base / name).write_bytes(bomb)
    with pytest.raises(InvalidModel):
        catalog.inspect(base)


def test_an_index_cannot_have_a_pickle_taken_for_weights(bomb: bytes, tmp_path: Path) -> None:
    base = folder(tmp_path, model__safetensors=None)
    (base / "pytorch_model.bin").write_bytes(bomb)
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match="no safetensors file"):
        catalog.inspect(base)


def test_the_engine_loads_no_pickle_as_weights_where_nobody_looked_before(bomb: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bomb)
    with pytest.raises(InvalidWeights):
        weights.load(nets.decoder(nets.shape()), tmp_path)


def test_an_adapter_that_is_a_pickle_is_not_read(bomb: bytes, tmp_path: Path) -> None:
    (tmp_path / lora.WEIGHTS).write_bytes(bomb)
    with pytest.raises(SafetensorError):
        lora.load_adapter(nets.adapted(nets.decoder(nets.shape())), tmp_path)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json", "manifest.json"])
def test_a_checkpoint_is_no_pickle_though_its_manifest_says_that_it_is_whole(
    bomb: bytes, tmp_path: Path, name: str
) -> None:
    saving.train_and_save(saving.LAYOUTS["one"], tmp_path)
    path = tmp_path / "step-00000003"
    (path / name).write_bytes(bomb)
    if name != checkpoint.MANIFEST:
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        for file in manifest["files"]:
            if file["path"] == name:
                file.update(bytes=len(bomb), sha256=hashlib.sha256(bomb).hexdigest())
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    _, optimizer = ours(alone(saving.CPU))
    with pytest.raises((BadCheckpoint, SafetensorError, ValueError)):
        checkpoint.load(path, optimizer, base=None)


@pytest.mark.parametrize("purpose", ["fine-tune", "pretrain", "tokenizer"])
def test_a_pickle_that_is_sent_as_data_is_refused_at_the_door(http, bomb: bytes, purpose: str) -> None:
    for filename in ("weights.bin", "data.jsonl", "data.parquet"):
        answer = http.post("/v1/files", data={"purpose": purpose}, files={"file": (filename, bomb)})
        assert answer.status_code == 400, answer.text
    assert http.get("/v1/files").json()["data"] == []


def test_a_pickle_that_is_kept_unread_is_given_back_as_bytes(http, bomb: bytes) -> None:
    file = driving.upload(http, bomb, "weights.bin", purpose="user_data")
    assert http.get(f"/v1/files/{file['id']}/content").content == bomb


def test_a_message_in_the_broker_that_is_a_pickle_is_not_opened(bare: bytes) -> None:
    from workers.app import CONFIG as celery

    for kind in ("application/x-python-serialize", "pickle"):
        with pytest.raises(ContentDisallowed):
            serialization.loads(bare, kind, "binary", accept=set(celery["accept_content"]))
