"""What a request that does not fit its types is told: the path as it stands in the body, and no name of ours."""

import json

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from api.errors import errors, validation_error
from core.errors import InvalidMove, NotFound
from core.spec import JobSpec

WHOLE = {"kind": "finetune", "model": {"base": "a"}, "data": {"train": ["file-1"]}}


def told(body):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(JobSpec).validate_python(body)
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    answer = validation_error(RequestValidationError(found).errors(), body)
    assert answer.status_code == 400
    return json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        pytest.param({"tarining": {}}, "tarining", id="an unknown field"),
        pytest.param({"training": {"learning_rate": 1}}, "training.learning_rate", id="an unknown field within"),
        pytest.param({"parallel": {"tensors": 2}}, "parallel.tensors", id="within one branch of a union"),
        pytest.param({"method": {"type": "lora", "rnk": 4}}, "method.rnk", id="within a tagged union"),
        pytest.param({"method": {"type": "magic"}}, "method.type", id="an unknown tag"),
        pytest.param({"method": {"rank": 4}}, "method.type", id="no tag"),
        pytest.param({"data": {"train": ["file-1", 7]}}, "data.train.1", id="an item of a list"),
        pytest.param({"data": {"train": ["file-1"], "seq_len": "long"}}, "data.seq_len", id="a wrong type"),
        pytest.param({"data": {}}, "data.train", id="a missing field"),
        pytest.param({"training": {"lr": float("nan")}}, "training.lr", id="not a number"),
        pytest.param({"training": {"steps": 1, "epochs": 1}}, "training", id="fields that exclude each other"),
    ],
)
def test_the_field_to_blame_is_named_by_its_path(change, param):
    error = told(WHOLE | change)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"max_runtime": "5000d"}, "than or equal to 3650 days", id="longer than ten years"),
        pytest.param({"max_runtime": 0}, "greater than 0 days", id="no time at all"),
        pytest.param({"training": None}, "an object", id="null for an object"),
        pytest.param({"data": "file-1"}, "an object", id="text for an object"),
        pytest.param({"labels": []}, "an object", id="a list for an object"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_json_and_not_of_python(change, words):
    message = told(WHOLE | change)["message"]
    assert words in message
    assert not any(name in message for name in ("timedelta", "dictionary", "attributes", "extract"))


def test_several_findings_are_all_listed():
    error = told(WHOLE | {"kind": "tune", "colour": "red"})
    assert {finding["param"] for finding in error["errors"]} == {"kind", "colour"}


def test_errors_of_one_status_share_an_entry_in_the_document():
    described = errors(NotFound, InvalidMove)
    assert set(described) == {400, 401, 404, 409, 429, 503}
    assert "`invalid_state`: The job, or upload, is not in a state that allows this." in described[409]["description"]


def test_who_opens_the_address_alone_is_led_to_the_page_that_explains_it(http):
    answer = http.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")
