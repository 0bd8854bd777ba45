"""Keys and passwords: compared without telling by time, in no URL, no log and no answer, and not where models train."""

from __future__ import annotations

import ast
import hashlib
import hmac
import inspect
import json
import logging
import os
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import structlog
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

from core import keys
from core.errors import InvalidKey
from core.settings import Settings, trainer_environment
from tests.api import driving
from tests.api.conftest import Live
from tests.stack import ADMIN_KEY, Stack

# Time


def test_a_key_is_compared_as_a_digest_in_constant_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secret = keys.create(session, keys.DEFAULT_PROJECT, name="a", scopes=["read"])
    compared, real = [], hmac.compare_digest

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    wrong = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    keys.authenticate(session, secret)
    with pytest.raises(InvalidKey):
        keys.authenticate(session, wrong)
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in (secret, wrong)]
    # The key of the settings and the one that the secret names, whichever comes first and fits.
    assert [right for _, right in compared] == [digests[0]] * (len(compared) // 2) + [digests[1]] * (len(compared) // 2)
    assert len(compared) >= 2
    assert all(len(left) == len(right) == 64 for left, right in compared)


def test_nothing_else_compares_a_secret() -> None:
    """In SQL, or with ==, whose time tells how much of it was right."""
    tree = ast.parse(inspect.getsource(keys.authenticate))
    operands = [
        ast.unparse(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    ]
    assert not [operand for operand in operands if "digest" in operand or operand == "bearer"]
    assert "digest" not in str(keys._OPENING.whereclause.compile(dialect=sqlite.dialect()))


def test_a_wrong_key_and_one_that_is_nowhere_are_told_the_same(live: Live, key: str) -> None:
    number = key.split("_")[1]
    answers = []
    for wrong in (
        f"ts_{number}_{'a' * 43}",
        f"ts_{'0' * 24}_{'a' * 43}",
        "x",
        "ts_",
        f"ts_{number}_",
        key[:-1],
        key + "x",
    ):
        with live.http(wrong) as http:
            answer = http.get("/v1/jobs")
        answers.append((answer.status_code, answer.content))
    assert set(answers) == {answers[0]}
    assert answers[0][0] == 401


# Where they might be read


def test_no_url_of_the_document_takes_a_key(live: Live) -> None:
    with live.http(None) as http:
        page = http.get("/openapi.json").json()
    named = {
        parameter["name"].lower()
        for methods in page["paths"].values()
        for spoken in methods.values()
        for parameter in spoken.get("parameters", ())
    }
    assert not [
        name for name in named if name in {"key", "api_key", "token", "access_token", "authorization", "secret"}
    ]
    assert "query" not in {each.get("in") for each in page["components"]["securitySchemes"].values()}


def test_settings_do_not_show_their_secrets_when_they_are_printed() -> None:
    said = str(Settings(admin_key="k" * 20, wandb_api_key="w" * 20, database_url="postgresql://u:hush@h/d"))
    said += repr(Settings(admin_key="k" * 20, wandb_api_key="w" * 20, redis_url="redis://:hush@h/0"))
    for secret in ("k" * 20, "w" * 20, "hush"):
        assert secret not in said


PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED", "AWS_SECRET_ACCESS_KEY": "planted-aws", "AWS_SESSION_TOKEN": "planted-session",
    "HF_TOKEN": "planted-hf", "WANDB_API_KEY": "planted-wandb", "OPENAI_API_KEY": "planted-openai",
    "GITHUB_TOKEN": "planted-github", "PGPASSWORD": "planted-pg", "SSH_AUTH_SOCK": "/planted/agent",
    "PROXY_URL": "http://user:planted-proxy@proxy:1", "KUBECONFIG": "/planted/kube", "MY_APP_PASSWORD": "planted-own",
    "GOOGLE_APPLICATION_CREDENTIALS": "/planted/google.json", "PYTHONSTARTUP": "/planted/start.py",
}  # fmt: skip
"""What a host that runs other things too may have in its environment."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The service in an environment full of secrets."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="drill-") as folder:
        for name, value in PLANTED.items():
            patch.setenv(name, value)
        with Stack(Path(folder) / "shed", wandb_api_key="planted-setting", log_level="DEBUG") as stack:
            yield stack


def environments(processes: list[psutil.Process]) -> dict[int, str]:
    return {process.pid: Path(f"/proc/{process.pid}/environ").read_text() for process in processes}


def test_the_processes_that_train_see_no_secret_of_the_service_or_of_its_host(stack: Stack) -> None:
    job_id = stack.submit(steps=1_000_000, checkpoint_every=1000, ranks=2)
    stack.until_step(job_id, 1)
    training = stack.processes(job_id)
    assert len(training) >= 3, "two ranks and what launched them"
    seen = environments(training)
    allowed = set(trainer_environment(()))
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    for pid, environment in seen.items():
        for secret in (*PLANTED.values(), ADMIN_KEY, "planted"):
            assert secret not in environment, f"process {pid} sees {secret}"
        names = {line.partition("=")[0] for line in environment.split("\0") if line}
        assert not [name for name in names if name.startswith(("TRAINSHED", "DATABASE", "REDIS", "STORAGE", "AWS"))]
        # A list of what is let through: whatever else there is has been put there by the launcher itself.
        own = ("ENGINE_", "TORCH_", "NCCL_", "CUDA_", "KMP_", "GLOO_", "PYTORCH_", "MKL_", "OMP_", "MALLOC_")
        assert not {name for name in names - allowed - ours if not name.startswith(own)}
    # The supervisor, which works for the service, has the settings: so the test would have found them.
    assert "planted-setting" in "".join(environments(stack.supervisors(job_id)).values())
    stack.cancel(job_id)
    stack.until(lambda: not stack.processes(job_id), "the end")
    said = stack.logs() + "".join(path.read_text(errors="replace") for path in stack.settings.runs.rglob("*.log"))
    said += "".join(b"".join(stack.services.storage.stream(each.key)).decode(errors="replace")
                    for each in stack.services.storage.list("jobs") if "/logs/" in each.key)  # fmt: skip
    assert "attempt" in said
    assert "rank" in said
    for secret in (*PLANTED.values(), ADMIN_KEY, "planted", "lazy dogs"):
        assert secret not in said, f"{secret} is in a log"


def test_the_api_writes_no_key_into_its_log(
    live: Live, http, key: str, capfd, lines_of_the_api: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was sent with it: to no route, in a URL, in a body that is no JSON, or where the server fails."""
    secret = http.post("/v1/keys", json={"name": "a", "scopes": ["read"]}).json()["secret"]
    hook = {"name": "ci", "url": "https://example.com/planted-in-url", "event_types": ["job.failed"]}
    signing = http.post("/v1/webhook_endpoints", json=hook).json()["signing_secret"]
    http.get("/v1/nothing")
    http.get("/v1/jobs", params={"api_key": key})
    http.post("/v1/jobs", content=b"{")
    driving.upload(http, b"training-data-of-a-stranger\n" * 20)
    with live.http(secret) as reader:
        reader.get("/v1/jobs")
        reader.post("/v1/files")
    with live.http(key[:-1]) as stranger:
        stranger.get("/v1/jobs")
    monkeypatch.setattr("core.nodes.listing", lambda session: 1 // 0)
    assert http.get("/v1/nodes", params={"api_key": key, "token": secret}).status_code == 500
    assert "ZeroDivisionError" in "".join(lines_of_the_api)
    said = "".join(lines_of_the_api) + "".join(capfd.readouterr())
    for one in (key, secret, signing, key[:-1], "planted-in-url", "training-data-of-a-stranger"):
        assert one not in said


@pytest.fixture
def lines_of_the_api() -> Iterator[list[str]]:
    """What is logged in this process, where the API of the tests runs, with everything that a record carries.

    What the test's own thread logs is left out: that is its HTTP client, which tells the URLs that it asks.
    """
    said: list[str] = []
    client = threading.get_ident()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread != client:
                said.append(repr(record.__dict__))

    root, handler = logging.getLogger(), Keep(level=logging.DEBUG)
    level, processors = root.level, structlog.get_config()["processors"]

    def keep(logger: object, name: str, event: dict[str, object]) -> dict[str, object]:
        said.append(repr(event) + (traceback.format_exc() if event.get("exc_info") else ""))
        return event

    root.addHandler(handler)
    # Not the attribute: a logger remembers what it was asked before, and only this lets it forget.
    root.setLevel(logging.DEBUG)
    processors.insert(0, keep)
    yield said
    processors.remove(keep)
    root.setLevel(level)
    root.removeHandler(handler)


def test_an_audit_log_has_no_secret(live: Live, http) -> None:
    made = http.post("/v1/keys", json={"name": "a", "scopes": ["read"]}).json()
    hook = {"name": "ci", "url": "https://example.com/planted-in-url", "event_types": ["job.failed"]}
    endpoint = http.post("/v1/webhook_endpoints", json=hook).json()
    http.post(f"/v1/webhook_endpoints/{endpoint['id']}", json={"url": "https://example.com/planted-again"})
    rotated = http.post(f"/v1/webhook_endpoints/{endpoint['id']}/rotate_secret", json={}).json()
    told = json.dumps(http.get("/v1/audit_logs").json())
    for secret in (made["secret"], endpoint["signing_secret"], rotated["signing_secret"], "planted"):
        assert secret not in told
    assert "webhook_endpoint.secret_rotated" in told


def test_a_secret_that_was_shown_once_is_shown_nowhere_else(live: Live, http) -> None:
    made = http.post("/v1/keys", json={"name": "a", "scopes": ["read"]}).json()
    hook = {"name": "ci", "url": "https://example.com/", "event_types": ["job.failed"]}
    endpoint = http.post("/v1/webhook_endpoints", json=hook).json()
    for path in ("/v1/keys", "/v1/webhook_endpoints", f"/v1/webhook_endpoints/{endpoint['id']}"):
        told = http.get(path).text
        assert made["secret"] not in told
        assert endpoint["signing_secret"] not in told
        assert hashlib.sha256(made["secret"].encode()).hexdigest() not in told


def test_the_data_directory_is_its_owners_alone(stack: Stack) -> None:
    assert os.stat(stack.settings.broker_socket.parent).st_mode & 0o077 == 0
