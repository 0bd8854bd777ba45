"""The road through the API on PostgreSQL, with no broker there: what differs between the databases shows here."""

import pytest

from api.client import Client
from core.services import Services
from core.settings import Settings
from tests.api import driving
from tests.api.conftest import Live, running
from tests.api.test_requests import envelope


@pytest.fixture(scope="module")
def live(new_postgresql, tmp_path_factory):
    folder = tmp_path_factory.mktemp("postgresql")
    settings = Settings(data_dir=folder, database_url=new_postgresql(folder))
    with Services(settings) as services, running(services) as url:
        yield Live(url, services)


def test_a_job_is_made_once_found_by_label_followed_and_downloaded(live, http, key, tmp_path):
    job = driving.finished(live.services, http, tmp_path)
    body = driving.spec(driving.upload(http)["id"], labels={"team": "a"})
    made = {http.post("/v1/jobs", json=body, headers={"idempotency-key": "k"}).json()["id"] for _ in range(3)}
    assert len(made) == 1
    assert {one["id"] for one in http.get("/v1/jobs", params={"label[team]": "a"}).json()["data"]} == made
    with Client(live.url, key) as client:
        heard = [event.id for event in client.follow(job)]
        assert heard == [*map(str, range(1, len(heard))), f"{len(heard) - 1}-done"]
        assert len(client.download(job, tmp_path / "into")) == 3
        assert client.ready()["checks"]["broker"].startswith("can't be reached")


@pytest.mark.parametrize("text", ["a\u0000b", "\ud800"])
def test_text_that_no_database_takes_is_a_bad_request(http, text):
    file = driving.upload(http)["id"]
    escaped = text.encode("unicode_escape").decode().replace("\\x00", "\\u0000")
    body = f'{{"model": "{escaped}", "prompt": "a"}}'.encode()
    json_type = {"content-type": "application/json"}
    assert envelope(http.post("/v1/completions", content=body, headers=json_type), 400)
    spec = driving.json.dumps(driving.spec(file, labels={"a": text})).encode()
    assert envelope(http.post("/v1/jobs", content=spec, headers=json_type), 400)
