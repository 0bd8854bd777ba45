"""Names and links that would lead to another file of the host: in models, artifacts, checkpoints and ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from core import artifacts, catalog, checkpoints, files, joblogs
from core.artifacts import Damaged
from core.errors import InvalidModel, NotFound
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import JobState
from core.storage import Storage
from tests import make
from tests.api import driving
from tests.core.test_catalog import folder

SECRET = b"of another file of this host"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def services(tmp_path: Path, new_sqlite, no_broker: None) -> Iterator[Services]:
    settings = Settings(data_dir=tmp_path / "shed")
    settings.data_dir.mkdir()
    new_sqlite(settings.data_dir)
    with Services(settings) as services:
        yield services


@pytest.fixture
def job(services: Services) -> Job:
    with services.db.session() as session:
        return make.job(session, state=JobState.RUNNING)


def export(folder: Path, path: str, content: bytes = SECRET) -> Path:
    """An export whose manifest names a file there."""
    folder.mkdir(exist_ok=True)
    entry = {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": [entry]}))
    return folder


def stored(services: Services) -> list[bytes]:
    return [
        b"".join(services.storage.stream(each.key)) for each in services.storage.list("jobs")
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["../secret.txt", "model/../../secret.txt", "secret.txt", "model//x", "./model/x", ""])
def test_an_export_cannot_name_a_file_outside_of_it(
    services: Services, job: Job, secret: Path, tmp_path: Path, path: str
) -> None:
    with pytest.raises(Damaged, match="not the path of a file of an export"):
        artifacts.publish(services, job, export(tmp_path / "export", path))
    assert stored(services) == []


def test_an_absolute_path_in_an_export_is_none(services: Services, job: Job, secret: Path, tmp_path: Path) -> None:
    with pytest.raises(Damaged):
        artifacts.publish(services, job, export(tmp_path / "export", str(secret)))
    assert stored(services) == []


@pytest.mark.parametrize("listed", [True, False], ids=["in the manifest", "beside it"])
@pytest.mark.parametrize("of_a_folder", [True, False], ids=["a folder", "a file"])
def test_a_link_in_an_export_is_not_followed(
    services: Services, job: Job, secret: Path, tmp_path: Path, listed: bool, of_a_folder: bool
) -> None:
    made = export(tmp_path / "export", "model/secret.txt" if listed else "model/real.txt")
    if of_a_folder:
        (made / "model").symlink_to(secret.parent)
    else:
        (made / "model").mkdir()
        (made / "model" / "real.txt").write_bytes(SECRET)
        (made / "model" / "secret.txt").symlink_to(secret)
    with pytest.raises(Damaged, match="is a link"):
        artifacts.publish(services, job, made)
    assert stored(services) == []


def test_a_link_in_a_checkpoint_is_not_followed(services: Services, job: Job, secret: Path, tmp_path: Path) -> None:
    saved = tmp_path / "step-1"
    saved.mkdir()
    (saved / "manifest.json").write_text("{}")
    (saved / "rank-00000.safetensors").symlink_to(secret)
    with pytest.raises(ValueError, match="is a link"):
        checkpoints.publish(services, job.id, fence=job.attempt, step=1, folder=saved, metrics={})
    assert stored(services) == []


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json", "notes"])
def test_a_link_in_a_model_that_leads_out_of_it_keeps_the_model_from_being_used(
    secret: Path, tmp_path: Path, name: str
) -> None:
    base = folder(tmp_path / "models")
    (base / name).unlink(missing_ok=True)
    (base / name).symlink_to(secret)
    with pytest.raises(InvalidModel, match=f"tiny/{name} is a link to a file outside"):
        catalog.inspect(base)
    assert catalog.discover(tmp_path / "models") == []


def test_a_link_deep_in_a_model_is_found_too(secret: Path, tmp_path: Path) -> None:
    base = folder(tmp_path / "models")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").symlink_to(secret)
    with pytest.raises(InvalidModel, match="is a link"):
        catalog.inspect(base)


def test_links_that_people_have_stay_good(tmp_path: Path) -> None:
    """A folder that is one, weights that lie elsewhere, links within, and a snapshot in Hugging Face's cache."""
    real = folder(tmp_path / "elsewhere", "real")
    models = tmp_path / "models"
    models.mkdir()
    (models / "linked").symlink_to(real)
    base = folder(models)
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").symlink_to(real / "model.safetensors")
    (base / "copy.json").symlink_to("config.json")
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    snapshot = folder(blobs.parent / "snapshots", "0123abc")
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (models / "cached").symlink_to(snapshot)
    for name in ("linked", "tiny", "cached"):
        assert catalog.inspect(models / name) == make.shape()


PATHS = [
    "../../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "....//x",
    "a/../../b",
    "..\\..\\x",
    "%2e%2e/x",
    "model/../../x",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_id_or_path_in_a_url_is_a_path_on_the_host(live, http, path: str) -> None:
    job = driving.submit(http)["id"]
    for url in (
        "/v1/files/{}/content", "/v1/files/{}", "/v1/jobs/{}", "/v1/jobs/{}/logs", "/v1/models/{}",
        f"/v1/jobs/{job}/artifacts/{{}}", "/v1/uploads/{}", "/v1/fine_tuning/jobs/{}",
    ):  # fmt: skip
        for spelt in (quote(path, safe=""), quote(quote(path, safe=""), safe="")):
            answer = http.get(url.format(spelt))
            # A name that is a dot may be taken out of a URL, which is another route then.
            assert answer.status_code in {404, 405} or not answer.content.count(b"root:"), (url, answer.text)
            assert b"root:" not in answer.content


@pytest.mark.parametrize("key", ["../x", "a/../b", "/etc/passwd", "a//b", "a/./b", "", "a\0b", "a/..", "~/x", "a b"])
def test_no_key_of_storage_leads_out_of_it(storage: Storage, secret: Path, tmp_path: Path, key: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for act in (
        lambda: storage.put_bytes(key, b"x"), lambda: storage.put_stream(key, [b"x"]), lambda: storage.size(key),
        lambda: b"".join(storage.stream(key)), lambda: storage.get_to(key, tmp_path / "into" / "x"),
        lambda: storage.delete(key), lambda: list(storage.list(key)), lambda: storage.delete_tree(key),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not a storage key"):
            act()
    assert sorted(tmp_path.rglob("*")) == before


def test_the_names_in_a_log_request_are_no_paths(services: Services) -> None:
    with pytest.raises((NotFound, ValueError)):
        joblogs.tail(services.settings, services.storage, "../../etc", 0, 10)


def test_what_a_client_calls_a_file_is_never_where_it_lies(services: Services, owner) -> None:
    for name in PATHS:
        file = files.create(
            services.db, services.storage, owner, filename=name, purpose="user_data", chunks=[SECRET], max_bytes=100
        )
        assert file.storage_key == f"files/{file.id}"
        assert "/" not in file.filename
        assert "\\" not in file.filename
