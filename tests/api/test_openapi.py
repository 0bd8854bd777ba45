"""The OpenAPI page: every route says what it does, answers and fails with; the checked-in document is the code's."""

import json
import re
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from core.services import Services
from core.settings import Settings
from core.spec import JobSpec

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with Services(Settings(data_dir=tmp_path_factory.mktemp("page"))) as services:
        return create_app(services).openapi()


def operations(page):
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_document_in_docs_is_what_the_code_says(page):
    assert json.loads(DOCUMENT.read_text()) == json.loads(json.dumps(page)), (
        "run `make openapi` and look at the difference"
    )


def test_every_route_says_in_a_sentence_what_it_does(page):
    for name, operation in operations(page):
        assert 5 <= len(operation["summary"]) <= 100, name
        assert operation["summary"][0].isupper(), name
        assert operation["tags"], name
    summaries = [operation["summary"] for _, operation in operations(page)]
    assert len(set(summaries)) == len(summaries)


def test_every_route_has_a_typed_answer(page):
    for name, operation in operations(page):
        answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        assert any("content" in answer for answer in answers), name
        for answer in answers:
            for kind, content in answer.get("content", {}).items():
                assert kind != "application/json" or content["schema"], name


def test_every_route_under_v1_documents_its_errors_in_the_envelope_and_needs_a_key(page):
    for name, operation in operations(page):
        if "/v1/" not in name:
            continue
        assert operation["security"], name
        assert {"400", "401"} <= set(operation["responses"]), name
        assert "422" not in operation["responses"], name
        for status, answer in operation["responses"].items():
            if status >= "400":
                reference = answer["content"]["application/json"]["schema"]["$ref"]
                assert reference == "#/components/schemas/ErrorOut", name
                assert answer["description"], name
        if "{" in name:
            assert "404" in operation["responses"], name


@pytest.mark.parametrize("path", ["", "/{job_id}/resume", "/{job_id}/retry"])
def test_what_makes_a_run_of_a_base_says_that_it_may_not_be_there_yet(page, path):
    assert "`model_not_ready`" in page["paths"][f"/v1/jobs{path}"]["post"]["responses"]["409"]["description"]


def test_every_field_of_a_job_says_what_it_means(page):
    schemas = page["components"]["schemas"]
    for name in [name for name in schemas if name.endswith(("Ask", "Method"))] + ["JobSpec", "TokenizerTraining"]:
        for field, schema in schemas[name]["properties"].items():
            spoken_for = "description" in schema or "$ref" in schema or "const" in schema
            assert spoken_for or name in {"CompletionAsk", "ChatAsk"}, f"{name}.{field}"


def test_the_examples_of_a_job_are_jobs(page):
    for example in page["components"]["schemas"]["JobSpec"]["examples"]:
        assert JobSpec.model_validate(example)


def test_the_page_never_speaks_of_what_we_do_not_answer(page):
    assert "HTTPValidationError" not in json.dumps(page)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_pages_name_nothing_that_lies_on_another_host(live, path):
    with live.http(None) as http:
        page = http.get(path)
        urls = r"""(?:src|href|spec-url)=["']([^"']+)|url: '([^']+)'"""
        loaded = ["".join(found) for found in re.findall(urls, page.text)]
        assert {url: http.get(url).status_code for url in loaded} == dict.fromkeys(loaded, 200)
    assert len(loaded) >= 3
    assert not any(httpx.URL(url).host for url in loaded)
    assert "default-src 'self'" in page.headers["content-security-policy"]


PROMISED = {
    "JobOut": "id object kind name labels priority state created_at started_at finished_at spec run_config attempt "
    "plan progress queue error model artifacts",
    "ProgressOut": "step total_steps tokens percent eta_seconds tokens_per_second mfu loss",
    "QueueOut": "position reason estimated_start",
    "JobErrorOut": "code message param rank hint",
    "ArtifactOut": "path bytes sha256 kind",
    "NodeOut": "id slots heartbeat_at",
    "SlotOut": "index held job_id",
    "ErrorDetail": "message type param code",
}
"""What clients rely on: fields may be added, and none of these goes or is called otherwise."""
ASKED = {
    "/v1/jobs": "state kind after limit",
    "/v1/jobs/{job_id}/events": "after limit order type",
    "/v1/jobs/{job_id}/stream": "after",
    "/v1/jobs/{job_id}/metrics": "names from_step to_step max_points",
    "/v1/jobs/{job_id}/logs": "rank tail",
    "/v1/files": "purpose after limit",
}
"""And what may be asked."""


def test_the_fields_and_filters_that_clients_rely_on_are_there(page):
    schemas = page["components"]["schemas"]
    missing = {name: set(told.split()) - set(schemas[name]["properties"]) for name, told in PROMISED.items()}
    assert not any(missing.values()), missing
    for path, told in ASKED.items():
        there = {one["name"] for one in page["paths"][path]["get"]["parameters"] if one["in"] == "query"}
        assert set(told.split()) <= there, path
