"""Nobody sees that another project's id exists: whatever is asked with it is answered as for an id that isn't there.

The routes, their parameters and their bodies come from the OpenAPI document, and the ids from every table that hangs on
projects, so that what is added later is covered without being named here. How long an answer takes is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import JSON, Boolean, Enum, Float, Integer, Table, insert, select
from sqlalchemy.orm import Session

from core import keys
from core.models import Base
from tests import make
from tests.api import driving
from tests.api.conftest import Live, new_project
from tests.api.test_models import MODEL

ITS_OWN = {"x-request-id", "date", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"}
"""Headers that differ between any two answers."""
JSON_BODY, FORM_BODY = "application/json", "multipart/form-data"


PARENTS = {"artifact": {"jobs"}} | {
    table.name: {key.column.table.name for key in table.foreign_keys} for table in Base.metadata.sorted_tables
}
"""What each kind of thing hangs on."""


@dataclass(frozen=True)
class Side:
    """A project, a client that may do everything in it, and the ids of what it has, by table."""

    http: httpx.Client
    ids: dict[str, str]

    def pool(self) -> list[str]:
        return list(self.ids.values())


@dataclass(frozen=True)
class Operation:
    """A route of the document."""

    method: str
    path: str
    spoken: dict[str, Any]
    page: dict[str, Any]

    @property
    def path_names(self) -> list[str]:
        return re.findall(r"{(\w+)(?::path)?}", self.path)

    def url(self, values: tuple[str, ...]) -> str:
        filled = iter(values)
        return re.sub(r"{[^}]+}", lambda _: quote(next(filled), safe=""), self.path)

    def has(self, name: str) -> bool:
        """Whether the query may have such a parameter."""
        return any(parameter["name"] == name for parameter in self.spoken.get("parameters", ()))

    def query_names(self) -> list[str]:
        """Parameters of the query that take any text."""
        return [
            parameter["name"]
            for parameter in self.spoken.get("parameters", ())
            if parameter["in"] == "query" and _takes_text(parameter["schema"], self.page)
        ]

    def body(self) -> Any:
        """A body that the route may like, or None."""
        content = self.spoken.get("requestBody", {}).get("content", {})
        return example(content[JSON_BODY]["schema"], self.page) if JSON_BODY in content else None

    def sent(self) -> dict[str, Any]:
        """Arguments of a request with such a body."""
        content = self.spoken.get("requestBody", {}).get("content", {})
        if FORM_BODY in content:
            fields = content[FORM_BODY]["schema"]["properties"]
            files = {name: ("a.txt", b"text\n") for name, field in fields.items() if field.get("format") == "binary"}
            return {"files": files, "data": {name: "pretrain" for name in fields if name not in files}}
        return {"json": self.body()} if JSON_BODY in content else {}


# What there is


@pytest.fixture(scope="module")
def page(live: Live) -> dict[str, Any]:
    with live.http(None) as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def operations(page: dict[str, Any]) -> list[Operation]:
    return [
        Operation(method, path, spoken, page)
        for path, methods in page["paths"].items()
        for method, spoken in methods.items()
        if path.startswith("/v1/")
    ]


def side(live: Live, folder: Any) -> Iterator[Side]:
    with live.services.db.session() as session:
        project = new_project(session)
        secret = keys.create(session, project, name="all", scopes=["admin"])[1]
    with live.http(secret) as http:
        base = live.services.settings.models / "isolation-base"
        base.mkdir(parents=True, exist_ok=True)
        for path, content in MODEL.items():
            (base / path.partition("/")[2]).write_bytes(content)
        body = {"kind": "finetune", "model": {"base": base.name}, "data": {"train": [driving.upload(http)["id"]]}}
        announced = {"bytes": 5, "filename": "a.txt", "purpose": "pretrain"}
        upload = http.post("/v1/uploads", json=announced).json()["id"]
        http.post(f"/v1/uploads/{upload}/parts", files={"data": ("a.txt", b"text\n")})
        job = http.post("/v1/jobs", json=body).json()["id"]
        fence = driving.run(live.services, job)
        driving.publish(live.services, job, folder, MODEL)
        driving.succeed(live.services, job, fence)
        with live.services.db.session() as session:
            make.checkpoint(session, session.get_one(driving.jobs.Job, job), 4)
            make.webhook(session, project_id=project)
            http_made = belongings(session, project)
            for table in Base.metadata.sorted_tables:
                if table.name not in http_made and hangs_on_projects(table):
                    fill(session, table, http_made)
            ids = belongings(session, project)
        yield Side(http, {"artifact": "model/config.json", **ids})


@pytest.fixture(scope="module")
def ours(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    yield from side(live, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    yield from side(live, tmp_path_factory.mktemp("stranger"))


def hangs_on_projects(table: Table) -> bool:
    parents = {key.column.table.name for key in table.foreign_keys}
    return "id" in table.c and bool(parents) and "nodes" not in parents


def belongings(session: Session, project: str) -> dict[str, str]:
    """An id of each table with a row that hangs on the project, however far down."""
    found = {"projects": project}
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            parent = found.get(key.column.table.name)
            if table.name not in found and parent is not None and hangs_on_projects(table):
                id_ = session.scalars(select(table.c.id).where(key.parent == parent)).first()
                if id_ is not None:
                    found[table.name] = id_
    return found


def fill(session: Session, table: Table, parents: dict[str, str]) -> None:
    """A row of a table that nothing above made, of values that mean nothing."""
    values = {}
    for column in table.columns:
        if key := next(iter(column.foreign_keys), None):
            values[column.name] = parents.get(key.column.table.name)
        elif column.name == "id":
            values["id"] = f"{table.name.rstrip('s')}-{make.new_id('x')[2:]}"
        elif not column.nullable and column.default is None:
            values[column.name] = _any_value(column.type)
    session.execute(insert(table).values(values))
    parents[table.name] = values["id"] or ""


def _any_value(kind: Any) -> Any:
    if isinstance(kind, Enum):
        return kind.enums[0]
    by_kind = ((Boolean, False), (Integer, 1), (Float, 1.0), (JSON, {}))
    return next((value for type_, value in by_kind if isinstance(kind, type_)), "x")


def phantom(id_: str) -> str:
    """An id of the same form that nothing has."""
    prefix, dash, number = id_.rpartition("-")
    return prefix + dash + "".join(_NEXT.get(letter, letter) for letter in number)


_NEXT = dict(zip("0123456789abcdef", "123456789abcdef0", strict=True))


# What is asked


def example(schema: dict[str, Any], page: dict[str, Any]) -> Any:
    """A value that fits the schema: its own example, or the least that it asks for."""
    if "$ref" in schema:
        return example(page["components"]["schemas"][schema["$ref"].rpartition("/")[2]], page)
    for told in ("const", "default"):
        if told in schema:
            return schema[told]
    for several in ("examples", "enum"):
        if schema.get(several):
            return schema[several][0]
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return example(schema[union][0], page)
    if schema.get("type") == "object":
        required = schema.get("required", ())
        return {name: example(part, page) for name, part in schema.get("properties", {}).items() if name in required}
    if schema.get("type") == "array":
        return [example(schema["items"], page)] * schema.get("minItems", 0)
    return {"string": "x", "integer": 1, "number": 1.0, "boolean": False}.get(schema.get("type", ""))


Where = tuple[str | int, ...]
"""A place in a body."""


def texts(body: Any, schema: dict[str, Any], page: dict[str, Any], here: Where = ()) -> Iterator[Where]:
    """Where in a body there is a text, or may be one at its top."""
    if isinstance(body, dict):
        for name, value in body.items():
            yield from texts(value, {}, page, (*here, name))
        if "$ref" in schema:
            whole = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            for name, part in whole.get("properties", {}).items():
                if not body.get(name) and _takes_text(part, page):
                    yield (*here, name, 0) if _is_list(part) else (*here, name)
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from texts(value, {}, page, (*here, index))
    elif isinstance(body, str):
        yield here


def _takes_text(schema: dict[str, Any], page: dict[str, Any]) -> bool:
    if "$ref" in schema:
        schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return any(_takes_text(branch, page) for branch in schema["anyOf"])
    if schema.get("type") == "array":
        return _takes_text(schema.get("items", {}), page)
    return schema.get("type") == "string" and "enum" not in schema and "const" not in schema


def _is_list(schema: dict[str, Any]) -> bool:
    return any(branch.get("type") == "array" for branch in schema.get("anyOf", [schema]))


def put(body: Any, where: Where, value: str) -> Any:
    changed = json.loads(json.dumps(body))
    inside = changed
    for part in where[:-1]:
        if isinstance(inside, dict) and not inside.get(part):
            inside[part] = [None]
        inside = inside[part]
    inside[where[-1]] = value
    return changed


# What is answered


def told(answer: httpx.Response, id_: str) -> tuple[int, dict[str, str], bytes]:
    """All of an answer, apart from what is its own, and from the id."""
    headers = {name: value for name, value in answer.headers.items() if name not in ITS_OWN}
    return answer.status_code, headers, answer.content.replace(id_.encode(), b"<id>")


TAKEN = "taken"
"""Both made something, which has an id and a time of its own."""


def same(http: httpx.Client, id_: str, method: str, url: str, **sent: Any) -> str | None:
    """None where the answer for the id and for its phantom are the same, else what tells them apart."""

    def with_phantom(value: Any) -> Any:
        return json.loads(json.dumps(value).replace(json.dumps(id_)[1:-1], phantom(id_)))

    other = {name: value if name == "files" else with_phantom(value) for name, value in sent.items()}
    real = http.request(method, url, **sent)
    unreal = http.request(method, url.replace(quote(id_, safe=""), quote(phantom(id_), safe="")), **other)
    if real.is_success and unreal.is_success and method not in {"get", "delete"}:
        return TAKEN
    here, there = told(real, id_), told(unreal, phantom(id_))
    return None if here == there else f"{method.upper()} {url} {sent}: {here} but {there}"


def test_no_route_tells_an_id_in_its_path_from_one_that_is_not_there(
    operations: list[Operation], ours: Side, stranger: Side, known: dict[tuple[str, ...], set[Kinds]]
) -> None:
    differences, asked = [], 0
    for operation in operations:
        names = tuple(operation.path_names)
        fillings = (known.get(names) or any_kinds(len(names), ours)) if names else ()
        for kinds, changed in ((filling, kind) for filling in fillings for kind in filling if kind != "artifact"):
            asked += 1
            values, id_ = tuple(ours.ids[kind] for kind in kinds), ours.ids[changed]
            found = same(stranger.http, id_, operation.method, operation.url(values), **operation.sent())
            # Nothing of ours can be changed, and what isn't there neither.
            differences += [f"{operation.method} {operation.url(values)}: {found}"] if found else []
    assert not differences, "\n".join(differences[:20])
    assert asked > 50


Kinds = tuple[str, ...]
"""Tables, or `artifact`, whose ids fill a path."""


@pytest.fixture(scope="module")
def known(operations: list[Operation], ours: Side) -> dict[tuple[str, ...], set[Kinds]]:
    """By the names of a path's parameters, the kinds of ids with which it leads its own project to something."""
    found: dict[tuple[str, ...], set[Kinds]] = {}
    for operation in operations:
        names = tuple(operation.path_names)
        # Of logs there are none where nothing ran, and a stream would not end.
        if operation.method == "get" and names and not operation.path.endswith(("/stream", "/logs")):
            reached = {
                kinds
                for kinds in any_kinds(len(names), ours)
                if ours.http.get(operation.url(tuple(ours.ids[kind] for kind in kinds))).status_code != 404
            }
            assert reached, f"nothing of ours is found at {operation.path}, so that nothing there would be compared"
            found.setdefault(names, set()).update(reached)
    return found


def any_kinds(count: int, side: Side) -> list[Kinds]:
    """What may fill so many parameters: a thing, and what hangs on it."""
    if count == 1:
        return [(kind,) for kind in side.ids]
    return [
        (parent, child)
        for child, parents in PARENTS.items()
        for parent in parents & side.ids.keys()
        if child in side.ids
    ]  # fmt: skip


def test_no_query_tells_another_projects_id_from_one_that_is_not_there(
    operations: list[Operation], ours: Side, stranger: Side, known: dict[tuple[str, ...], set[Kinds]]
) -> None:
    differences, asked = [], 0
    for operation in operations:
        # What a stream answers to its own project does not end.
        if operation.method != "get" or operation.path.endswith("/stream"):
            continue
        kinds = next(iter(sorted(known.get(tuple(operation.path_names), ()))), ())
        url = operation.url(tuple(stranger.ids[kind] for kind in kinds))
        for name, id_ in product(operation.query_names(), ours.pool()):
            asked += 1
            found = same(stranger.http, id_, "get", url, params={name: id_})
            differences += [found] if found else []
    assert not differences, "\n".join(differences[:20])
    assert asked > 100


def test_no_body_tells_another_projects_id_from_one_that_is_not_there(
    operations: list[Operation],
    ours: Side,
    stranger: Side,
    page: dict[str, Any],
    known: dict[tuple[str, ...], set[Kinds]],
) -> None:
    differences, asked = [], 0
    # What has no route of its own is never named either, but for parts.
    kinds_named = {kind for reached in known.values() for kinds in reached for kind in kinds} | {"upload_parts"}
    named = [ours.ids[kind] for kind in sorted(kinds_named)]
    for operation in operations:
        body = operation.body()
        # Of a thing of one's own, whichever kinds lead to one.
        fillings = sorted(known.get(tuple(operation.path_names), ())) if operation.path_names else [()]
        urls = [operation.url(tuple(stranger.ids[kind] for kind in kinds)) for kinds in fillings]
        if not isinstance(body, dict):
            continue
        schema = operation.spoken["requestBody"]["content"][JSON_BODY]["schema"]
        for url, where in product(urls, texts(body, schema, page)):
            for id_ in named:
                asked += 1
                found = same(stranger.http, id_, operation.method, url, json=put(body, where, id_))
                if found is TAKEN:
                    break  # It may be any text.
                differences += [found] if found else []
    assert not differences, "\n".join(differences[:20])
    assert asked > 100


@pytest.mark.parametrize("part", ["data.train", "data.validation", "tokenizer.file", "model.base"])
def test_no_job_tells_another_projects_file_or_model_from_one_that_is_not_there(
    ours: Side, stranger: Side, part: str
) -> None:
    own = stranger.http.get("/v1/files").json()["data"][0]["id"]
    mine = ours.ids["models" if part == "model.base" else "files"]
    body: dict[str, Any] = {"kind": "pretrain", "model": {"preset": "llama-15m"}, "tokenizer": {"type": "bytes"},
                            "data": {"train": [own]}, "training": {"steps": 1}}  # fmt: skip
    outer, inner = part.split(".")
    body[outer] = {inner: [mine] if inner == "train" else mine} | ({"train": [own]} if inner == "validation" else {})
    assert same(stranger.http, mine, "post", "/v1/jobs", json=body) is None
    assert stranger.http.post("/v1/jobs", json=body).status_code == 404
