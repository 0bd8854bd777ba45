"""What the API says while its storage refuses: nobody's fault, to be tried again, and nothing half done is left."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from core.models import File
from tests.api import driving
from tests.api.conftest import served
from tests.api.test_requests import envelope
from tests.faults.flaky import FlakyWay


@pytest.fixture
def far(tmp_path, monkeypatch):
    """An API whose objects lie on a server, and the way to that."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: `pip install moto[server,s3]`")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    assert httpx.put(f"http://{host}:{port}/far").status_code == 200
    way = FlakyWay(host, port)
    for name, value in {
        "ENDPOINT_URL": way.url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "c",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    (tmp_path / "far").mkdir()
    with served(tmp_path / "far", storage_url="s3://far/shed") as live:
        yield live, way
    way.close()
    server.stop()


def test_while_the_storage_refuses_each_route_that_needs_it_says_to_come_again_and_works_once_it_is_back(far, tmp_path):
    live, way = far
    with live.http(live.key()) as http:
        file = driving.upload(http)["id"]
        job = driving.finished(live.services, http, tmp_path / "export")
        upload = http.post(
            "/v1/uploads", json={"filename": "a.txt", "purpose": "pretrain", "bytes": 4, "mime_type": "text/plain"}
        ).json()["id"]

        def part() -> httpx.Response:
            return http.post(f"/v1/uploads/{upload}/parts", files={"data": b"abcd"})

        def asked() -> list[httpx.Response]:
            new = {"file": ("new.txt", driving.TEXT)}
            return [
                http.post("/v1/files", data={"purpose": "pretrain"}, files=new),
                part(),
                http.get(f"/v1/files/{file}/content"),
                http.get(f"/v1/jobs/{job}/artifacts/adapter/adapter_config.json"),
            ]

        way.set("refuse")
        for refused in asked():
            error = envelope(refused, 503)
            assert (error["code"], "storage" in error["message"]) == ("unavailable", True), refused.url
        with live.services.db.reading() as session:
            assert session.query(File).count() == len(http.get("/v1/files").json()["data"])
        assert http.get(f"/v1/uploads/{upload}/parts").json()["data"] == []
        # What needs no objects is answered as ever.
        assert http.get(f"/v1/jobs/{job}").status_code == 200

        way.set("pass")
        for answer in asked():
            assert answer.status_code == 200, answer.text
        done = http.post(
            f"/v1/uploads/{upload}/complete",
            json={
                "part_ids": [http.get(f"/v1/uploads/{upload}/parts").json()["data"][0]["id"]],
                "md5": hashlib.md5(b"abcd", usedforsecurity=False).hexdigest(),
            },
        )
        assert done.status_code == 200, done.text
