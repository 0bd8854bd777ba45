"""Models by name: folders, results, and what is wrong with a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy.orm import Session

from core import catalog
from core.errors import Forbidden, InUse, InvalidModel, InvalidSpec, NotFound, Unavailable
from core.hanging import HangsError, Patient
from core.keys import DEFAULT_PROJECT, Account
from core.resolve import BaseFacts
from core.states import JobState
from engine.naming import shapes_of
from tests import make
from tests.make import tokenizer, weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


WHOLE = {name: ("F32", sizes) for name, sizes in shapes_of(make.shape()).items()}
"""What the model of `CONFIG` is made of."""
NORM = "model.norm.weight"


def header(content: bytes) -> bytes:
    """The beginning of a safetensors file that says so."""
    return len(content).to_bytes(8, "little") + content


def folder(models: Path, name: str = "tiny", **files: bytes | None) -> Path:
    """A base in Hugging Face layout; a file named None is left out."""
    path = models / name
    path.mkdir(parents=True)
    contents = {
        "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": tokenizer(260),
        "model.safetensors": weights(WHOLE),
    }  # fmt: skip
    for file, content in (contents | {key.replace("__", "."): value for key, value in files.items()}).items():
        if content is not None:
            (path / file).write_bytes(content)
    return path


def test_a_folder_is_a_model_under_its_name(session: Session, owner: Account, tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "not-a-model").mkdir()
    (tmp_path / "file").write_text("x")
    assert [model.id for model in catalog.list_(session, owner, models=tmp_path)] == ["tiny"]
    model = catalog.get(session, owner, "tiny", models=tmp_path)
    assert (model.source, model.project_id) == ("dir:tiny", None)
    assert model.shape == make.shape().model_dump(mode="json")


def test_a_base_gets_its_row_when_a_job_wants_it(session: Session, owner: Account, tmp_path: Path) -> None:
    folder(tmp_path)
    facts = catalog.facts(session, owner, "tiny", models=tmp_path)
    assert (facts.name, facts.shape) == ("tiny", make.shape())
    assert [model.id for model in catalog.list_(session, owner, models=tmp_path)] == ["tiny"]
    # The folder is read anew, should it have been replaced.
    config = CONFIG | {"max_position_embeddings": 128}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    assert catalog.facts(session, owner, "tiny", models=tmp_path).shape.max_seq_len == 128


def test_a_base_that_was_looked_at_is_kept_without_another_look(
    session: Session, owner: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at = (folder(tmp_path) / "config.json").stat().st_mtime
    facts = catalog.facts(session, owner, "tiny", models=tmp_path)
    monkeypatch.setattr(catalog, "_is_model", lambda _: pytest.fail("it may hang, and locks are held"))
    catalog.keep(session, owner, facts, models=tmp_path)
    row = catalog.get(session, owner, "tiny", models=tmp_path)
    assert row in session
    assert (row.source, row.project_id, row.created_at) == ("dir:tiny", None, made_at)
    catalog.keep(session, owner, facts, models=tmp_path)
    with pytest.raises(NotFound, match="just deleted"):
        catalog.keep(session, owner, BaseFacts("other", make.shape()), models=tmp_path)


def test_of_folders_that_hang_the_list_leaves_out_those_and_a_sound_one_is_not_taken_for_one_of_them(
    session: Session, owner: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    is_there, back = catalog._is_model, Event()
    request.addfinalizer(back.set)
    for name in ("away-1", "away-2", "sound", "tiny"):
        folder(tmp_path, name)
    monkeypatch.setattr(
        catalog, "_is_model", lambda path: (not path.name.startswith("away") or back.wait()) and is_there(path)
    )
    monkeypatch.setattr(catalog, "_folders", Patient(seconds=1.0, most=3, waiting=1))
    for _ in range(2):
        assert [model.id for model in catalog.list_(session, owner, models=tmp_path)] == ["sound", "tiny"]
    assert catalog.get(session, owner, "sound", models=tmp_path).id == "sound"
    monkeypatch.setattr(catalog, "_folders", crowded := Patient(seconds=0.05, most=1, waiting=1))
    with pytest.raises(HangsError):
        crowded.ask("away", back.wait)
    with pytest.raises(Unavailable, match="so many others do not answer"):
        catalog.get(session, owner, "sound", models=tmp_path)


def test_a_folder_that_hangs_is_left_behind_once_whatever_is_asked_of_it(
    session: Session, owner: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    reach, back = catalog.statvfs, Event()
    request.addfinalizer(back.set)
    folder(tmp_path)
    monkeypatch.setattr(catalog, "statvfs", lambda path: (path.name != "tiny" or back.wait()) and reach(path))
    monkeypatch.setattr(catalog, "_folders", patient := Patient(seconds=1.0, most=8, waiting=1))
    asks: list[Callable[[], object]] = [
        lambda: catalog.get(session, owner, "tiny", models=tmp_path),
        lambda: catalog.facts(session, owner, "tiny", models=tmp_path),
        lambda: catalog.register(session, owner, "tiny", {"job": "job-0"}, models=tmp_path),
        lambda: catalog.register(session, owner, "other", "dir:tiny", models=tmp_path),
    ]
    for ask in asks:
        with pytest.raises(Unavailable, match="'tiny' in the models directory does not answer"):
            ask()
    assert catalog.list_(session, owner, models=tmp_path) == []
    assert list(patient._under_way) == [tmp_path / "tiny"]


def test_without_a_models_directory_there_are_no_bases(session: Session, owner: Account, tmp_path: Path) -> None:
    assert catalog.list_(session, owner, models=tmp_path / "none") == []
    with pytest.raises(NotFound) as refusal:
        catalog.facts(session, owner, "tiny", models=tmp_path / "none")
    assert refusal.value.param == "model.base"


@pytest.mark.parametrize("name", ["../tiny", "..", ".", "/etc", "tiny/", "tiny/../tiny", "a\x01b", "x" * 300])
def test_a_name_never_leads_out_of_the_models_directory(
    session: Session, owner: Account, tmp_path: Path, name: str
) -> None:
    folder(tmp_path / "models")
    folder(tmp_path, "outside")
    with pytest.raises(NotFound):
        catalog.get(session, owner, name, models=tmp_path / "models")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"model__safetensors": weights(WHOLE)[:-1]}, "tiny/model.safetensors is damaged or cut short"),
        ({"model__safetensors": weights(WHOLE) + b"x"}, "tiny/model.safetensors is damaged or cut short"),
        ({"model__safetensors": weights(WHOLE)[:20]}, "tiny/model.safetensors is cut short"),
        ({"model__safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "git lfs pull"),
        (
            {"model__safetensors": weights({**WHOLE, "w": ("F32", (1,))})},
            "tensor w is not part of the model; config.json",
        ),
        ({"model__safetensors": weights({k: v for k, v in WHOLE.items() if k != NORM})}, f"tensor {NORM} is missing"),
        (
            {"model__safetensors": weights({k.removeprefix("model."): v for k, v in WHOLE.items()})},
            "tensor embed_tokens.weight is not part of the model; model.embed_tokens.weight is missing",
        ),
        (
            {"model__safetensors": weights({**WHOLE, "model.layers.0.mlp.up_proj.lora_A.weight": ("F32", (1,))})},
            "merge_and_unload",
        ),
        (
            {"model__safetensors": weights({**WHOLE, NORM: ("F32", (4, 4))})},
            f"{NORM} has shape [4, 4]; config.json says [16]",
        ),
        (
            {"model__safetensors": weights({**WHOLE, NORM: ("F64", (16,))})},
            f"{NORM} is F64, and only F32, BF16, F16 can",
        ),
        ({"model__safetensors": weights({**WHOLE, NORM: ("U8", (16,))})}, "before quantisation"),
        ({"model__safetensors": weights({**WHOLE, NORM: ("F8_E4M3", (16,))})}, "before quantisation"),
        (
            {"config__json": json.dumps(CONFIG | {"num_hidden_layers": 3}).encode()},
            "model.layers.2.input_layernorm.weight",
        ),
        (
            {"config__json": json.dumps(CONFIG | {"tie_word_embeddings": False}).encode()},
            "set tie_word_embeddings to true",
        ),
        ({"config__json": b"\xef\xbb\xbf" + json.dumps(CONFIG).encode()}, "tiny/config.json is damaged"),
        ({"tokenizer__json": b"{"}, "tiny/tokenizer.json is damaged"),
        ({"tokenizer__json": b"{}"}, "tiny/tokenizer.json is no tokenizer in the fast format"),
        ({"tokenizer__json": tokenizer(260, "[PAD]")}, "has 261 entries, and config.json says vocab_size=260"),
        ({"tokenizer_config__json": b"[]"}, "tiny/tokenizer_config.json: it must hold one JSON object"),
        ({"special_tokens_map__json": b"{"}, "tiny/special_tokens_map.json is damaged"),
        ({"generation_config__json": b""}, "tiny/generation_config.json is damaged"),
        ({"model__safetensors": b""}, "tiny/model.safetensors is cut short"),
        ({"model__safetensors": (5).to_bytes(8, "little") + b"nojso"}, "damaged header"),
        ({"model__safetensors": b"\x80\x02}q\x00." * 10}, "tiny/model.safetensors is cut short, or no safetensors"),
        ({"model__safetensors": None, "pytorch_model__bin": b"x"}, "pickled .bin files are not read"),
        ({"tokenizer__json": None}, "no tokenizer.json"),
        ({"config__json": b"{"}, "tiny/config.json"),
        ({"config__json": json.dumps(CONFIG | {"model_type": "gpt_neox"}).encode()}, "gpt_neox"),
        ({"config__json": b"[]"}, "tiny/config.json: it must hold one JSON object"),
        ({"config__json": b"null"}, "tiny/config.json: it must hold one JSON object"),
        ({"config__json": b"\xff\xfe{"}, "tiny/config.json is damaged"),
        ({"config__json": b"[" * 100_000}, "tiny/config.json is damaged"),
        ({"config__json": json.dumps(CONFIG | {"num_hidden_layers": 10**30}).encode()}, "tiny/config.json: num_layers"),
        ({"config__json": json.dumps(CONFIG | {"architectures": 5}).encode()}, "architectures=5"),
        ({"config__json": json.dumps(CONFIG | {"rope_scaling": "yarn"}).encode()}, "rope_scaling='yarn'"),
        ({"model__safetensors__index__json": b"[" * 100_000}, "tiny/model.safetensors.index.json is damaged"),
        ({"model__safetensors": header(b'{"w": {"data_offsets": [0, "x"]}}')}, "damaged header"),
        ({"model__safetensors": header(b"[" * 100_000)}, "damaged header"),
    ],
)
def test_what_is_wrong_with_a_base_is_said_by_the_files_name(
    session: Session, owner: Account, tmp_path: Path, files: dict[str, bytes | None], says: str
) -> None:
    folder(tmp_path, **files)
    with pytest.raises(InvalidModel) as refusal:
        catalog.facts(session, owner, "tiny", models=tmp_path)
    assert says in refusal.value.message
    assert refusal.value.param == "model.base"
    catalog.list_(session, owner, models=tmp_path)


def test_each_file_of_a_sharded_base_is_looked_at(tmp_path: Path) -> None:
    first, second = {name: WHOLE[name] for name in list(WHOLE)[::2]}, {name: WHOLE[name] for name in list(WHOLE)[1::2]}
    where = {name: "model-1.safetensors" for name in first} | {name: "model-2.safetensors" for name in second}
    path = folder(tmp_path, model__safetensors=None)

    def say(weight_map: object) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    say(where)
    (path / "model-1.safetensors").write_bytes(weights(first))
    with pytest.raises(InvalidModel, match=r"tiny/model-2\.safetensors is not there"):
        catalog.inspect(path)
    (path / "model-2.safetensors").write_bytes(weights(second)[:-4])
    with pytest.raises(InvalidModel, match=r"tiny/model-2\.safetensors is damaged"):
        catalog.inspect(path)
    (path / "model-2.safetensors").write_bytes(weights(second))
    assert catalog.inspect(path) == make.shape()
    say({**where, NORM: "model-1.safetensors", "model.embed_tokens.weight": "model-2.safetensors"})
    with pytest.raises(InvalidModel, match=r"index\.json has model\.\S+ in model-\d\.safetensors, and it is not there"):
        catalog.inspect(path)
    say({name: file for name, file in where.items() if name != NORM})
    with pytest.raises(InvalidModel, match=f"tensor {NORM} is missing"):
        catalog.inspect(path)
    say({})
    with pytest.raises(InvalidModel, match="is missing"):
        catalog.inspect(path)
    for outside in ("../secret", "/etc/passwd", "sub/w", 5):
        say({"a": outside})
        with pytest.raises(InvalidModel, match="outside"):
            catalog.inspect(path)


@pytest.mark.parametrize(
    "described",
    [
        pytest.param({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, id="fewer bytes than its shape needs"),
        pytest.param({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, id="a size below zero"),
        pytest.param({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, id="an end before its beginning"),
        pytest.param({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, id="a hole"),
        pytest.param({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, id="a size that is no integer"),
        pytest.param({"shape": [1], "data_offsets": [0, 4]}, id="no type"),
    ],
)
def test_a_header_that_contradicts_itself_is_damaged(tmp_path: Path, described: dict[str, Any]) -> None:
    path = folder(tmp_path, model__safetensors=header(json.dumps({"w": described}).encode()) + bytes(4))
    with pytest.raises(InvalidModel, match=r"tiny/model\.safetensors has a damaged header"):
        catalog.inspect(path)


def test_an_output_layer_of_its_own_in_a_tied_model_is_told_from_a_copy(tmp_path: Path) -> None:
    embedding = WHOLE["model.embed_tokens.weight"]
    path = folder(tmp_path, model__safetensors=weights({**WHOLE, "lm_head.weight": embedding}))
    assert catalog.inspect(path) == make.shape()
    content = bytearray((path / "model.safetensors").read_bytes())
    # The last tensor's first byte.
    content[-4 * prod(embedding[1])] = 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidModel, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        catalog.inspect(path)


@pytest.mark.parametrize(
    ("name", "inside", "says"),
    [
        ("two words", "config.json", "letters, digits"),
        ("models--org--name", "snapshots/0/config.json", "hf download"),
        ("mine", "adapter_config.json", "merge_and_unload"),
        ("mine", "notes.txt", "no config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_told_why(
    session: Session, owner: Account, tmp_path: Path, name: str, inside: str, says: str
) -> None:
    (tmp_path / name / inside).parent.mkdir(parents=True)
    (tmp_path / name / inside).write_text("{}")
    with pytest.raises(InvalidModel, match=says) as refusal:
        catalog.facts(session, owner, name, models=tmp_path)
    assert refusal.value.param == "model.base"


def test_a_result_is_named_after_its_job_and_seen_by_its_project_only(
    session: Session, owner: Account, tmp_path: Path
) -> None:
    make.project(session, "proj-other")
    job = make.job(session, state=JobState.RUNNING, id="job-0123456789ab", name="demo")
    model = catalog.publish_result(session, job, prefix="jobs/j/1/artifacts/model", shape=make.shape())
    assert (model.id, model.source) == ("demo-01234567", "storage:jobs/j/1/artifacts/model")
    assert catalog.facts(session, owner, "demo-01234567", models=tmp_path).shape == make.shape()
    other = Account(project_id="proj-other", key_id="k", scopes=frozenset({"admin"}))
    with pytest.raises(NotFound):
        catalog.get(session, other, "demo-01234567", models=tmp_path)
    assert catalog.list_(session, other, models=tmp_path) == []


def test_a_later_attempts_result_takes_the_same_name(session: Session) -> None:
    job = make.job(session, state=JobState.RUNNING, base_model="tiny")
    first = catalog.publish_result(session, job, prefix="jobs/j/1/model", shape=make.shape())
    job.result_model = first.id
    second = catalog.publish_result(session, job, prefix="jobs/j/2/model", shape=make.shape())
    assert (second.id, second.source) == (first.id, "storage:jobs/j/2/model")
    assert second.id.startswith("tiny-")


def test_a_result_never_takes_the_place_of_another_jobs(session: Session, owner: Account) -> None:
    first_job = make.job(session, id="job-0123456789abcdef01234567", name="demo")
    second_job = make.job(session, id="job-01234567ffffffffffffffff", name="demo")
    first = catalog.publish_result(session, first_job, prefix="jobs/first/1/model", shape=make.shape())
    second = catalog.publish_result(session, second_job, prefix="jobs/second/1/model", shape=make.shape())
    assert (first.id, first.source) == ("demo-01234567", "storage:jobs/first/1/model")
    assert second.id == "demo-01234567ffffffffffffffff"
    assert {model.id for model in catalog.list_(session, owner, models=Path("none"))} == {first.id, second.id}


def test_a_name_is_free_in_each_project_and_means_its_own_model_there(session: Session, tmp_path: Path) -> None:
    accounts = [Account(make.project(session, id).id, "k", frozenset({"admin"})) for id in ("proj-a", "proj-b")]
    for account in accounts:
        job = make.job(session, project_id=account.project_id, state=JobState.SUCCEEDED)
        prefix = f"jobs/{account.project_id}/1/model"
        job.result_model = catalog.publish_result(session, job, prefix=prefix, shape=make.shape()).id
        catalog.register(session, account, "best", {"job": job.id}, models=tmp_path)
        follower = make.job(session, project_id=account.project_id, base_model="best")
        assert catalog.base_source(session, follower) == f"storage:{prefix}"
        with pytest.raises(InvalidSpec, match="taken"):
            catalog.register(session, account, "best", {"job": job.id}, models=tmp_path)
    found = [catalog.get(session, account, "best", models=tmp_path) for account in accounts]
    assert [catalog.source_of(session, model.key) for model in found] == [
        "storage:jobs/proj-a/1/model", "storage:jobs/proj-b/1/model",
    ]  # fmt: skip
    assert catalog.source_of(session, "best") is None, "between the service's parts a name is not enough"


def test_a_projects_own_model_is_meant_where_everyone_has_one_of_the_name(
    session: Session, owner: Account, tmp_path: Path
) -> None:
    theirs = Account(make.project(session, "proj-a").id, "k", frozenset({"admin"}))
    folder(tmp_path, "first")
    folder(tmp_path, "second")
    catalog.register(session, theirs, "chosen", "dir:first", models=tmp_path)
    catalog.register(session, owner, "chosen", "dir:second", models=tmp_path)
    other = Account(make.project(session, "proj-b").id, "k", frozenset({"read"}))
    assert catalog.get(session, theirs, "chosen", models=tmp_path).source == "dir:first"
    assert catalog.get(session, other, "chosen", models=tmp_path).source == "dir:second"
    for account in (theirs, other):
        listed = [model.id for model in catalog.list_(session, account, models=tmp_path)]
        assert sorted(listed) == ["chosen", "first", "second"]


def test_the_name_of_a_folder_or_of_a_model_of_everyone_is_taken(
    session: Session, owner: Account, tmp_path: Path
) -> None:
    theirs = Account(make.project(session, "proj-a").id, "k", frozenset({"admin"}))
    folder(tmp_path)
    folder(tmp_path, "other")
    catalog.register(session, owner, "shared", "dir:tiny", models=tmp_path)
    for name in ("other", "shared"):
        with pytest.raises(InvalidSpec, match="taken"):
            catalog.register(session, theirs, name, "dir:tiny", models=tmp_path)


def test_a_folder_can_be_given_another_name_by_an_admin(session: Session, owner: Account, tmp_path: Path) -> None:
    folder(tmp_path)
    model = catalog.register(session, owner, "org/tiny:v1", "dir:tiny", models=tmp_path)
    assert catalog.get(session, owner, "org/tiny:v1", models=tmp_path) is model
    submitter = Account(project_id=DEFAULT_PROJECT, key_id="k", scopes=frozenset({"submit"}))
    with pytest.raises(Forbidden):
        catalog.register(session, submitter, "other", "dir:tiny", models=tmp_path)
    with pytest.raises(InvalidSpec, match="taken"):
        catalog.register(session, owner, "org/tiny:v1", "dir:tiny", models=tmp_path)
    for source in ("dir:none", "dir:../tiny", "dir:"):
        with pytest.raises(NotFound):
            catalog.register(session, owner, "other", source, models=tmp_path)
    with pytest.raises(InvalidSpec):
        catalog.register(session, owner, "other", "hf://org/name", models=tmp_path)


def test_a_jobs_result_can_be_given_another_name(session: Session, owner: Account, tmp_path: Path) -> None:
    job = make.job(session, state=JobState.SUCCEEDED)
    job.result_model = catalog.publish_result(session, job, prefix="jobs/j/1/model", shape=make.shape()).id
    model = catalog.register(session, owner, "best", {"job": job.id}, models=tmp_path)
    assert (model.source, model.project_id) == ("storage:jobs/j/1/model", DEFAULT_PROJECT)
    with pytest.raises(NotFound):
        catalog.register(session, owner, "none", {"job": "job-nobody"}, models=tmp_path)


def test_a_model_that_checkpoints_are_adapters_on_stays_unless_it_is_forced(
    session: Session, owner: Account, tmp_path: Path
) -> None:
    make.model(session, "mine", project_id=owner.project_id, source="storage:jobs/job-0/1/artifacts/model")
    whole = make.job(session, state=JobState.SUCCEEDED, base_model="mine")
    make.checkpoint(session, whole, 4)
    tuned = make.job(session, state=JobState.FAILED, base_model="mine")
    tuned.run_config = {**tuned.run_config, "lora": {"rank": 8, "alpha": 16.0, "targets": ["q", "v"]}}
    for step in (2, 4):
        make.checkpoint(session, tuned, step)
    session.flush()
    with pytest.raises(InUse, match=f"2 checkpoints of 1 job .{tuned.id}.*force=true"):
        catalog.delete(session, owner, "mine", models=tmp_path)
    catalog.delete(session, owner, "mine", models=tmp_path, force=True)
    with pytest.raises(NotFound):
        catalog.get(session, owner, "mine", models=tmp_path)
