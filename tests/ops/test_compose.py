"""docker-compose.yml and docker/Dockerfile name only what exists: commands, ports, paths, settings, routes, stages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml
from moto.server import ThreadedMotoServer
from pydantic import AliasChoices

from api.cli import app as cli
from core.settings import Settings
from core.storage import open_storage
from tests.ops.routes import exists

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
EXAMPLE = dict(
    line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")
)
INTERPOLATION = re.compile(r"(?<!\$)\$\{(\w+)(?:(:?[-?+])([^}]*))?\}")
STORAGE_VARIABLES = {
    "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
}  # fmt: skip
"""Read by the storage library itself, as every S3 client does."""
SECRET = re.compile(r"PASSWORD|SECRET|_KEY")

# The keys of the Compose Specification that we use, so that a misspelt one is found where no client can check.
TOP_KEYS = {"services", "networks", "volumes"}
SERVICE_KEYS = {
    "build", "command", "depends_on", "deploy", "entrypoint", "environment", "healthcheck", "image", "init", "networks",
    "ports", "profiles", "restart", "security_opt", "shm_size", "stop_grace_period", "volumes",
}  # fmt: skip
BUILD_KEYS = {"context", "dockerfile", "target", "args"}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}


def setting_names() -> set[str]:
    names = set()
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        names |= set(map(str, alias.choices)) if isinstance(alias, AliasChoices) else {f"TRAINSHED_{name.upper()}"}
    return names


def texts(value: Any) -> Iterator[str]:
    """Every string in a piece of YAML."""
    if isinstance(value, dict):
        yield from texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def interpolations() -> Iterator[tuple[str, str, str]]:
    """Name, operator and operand of each `${…}`."""
    for text in texts(COMPOSE):
        yield from INTERPOLATION.findall(text)


def stages() -> dict[str, str]:
    """The Dockerfile's instructions by stage."""
    parts = re.split(r"^FROM \S+ AS (\w+)\n", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_file_is_well_formed():
    assert {key for key in COMPOSE if not key.startswith("x-")} <= TOP_KEYS
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("build", {})) <= BUILD_KEYS, name
        assert set(service.get("healthcheck", {})) <= HEALTH_KEYS, name
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if re.match(r"\w+:", volume)}
        assert named <= set(COMPOSE["volumes"]), name


def test_dependencies_can_come_true():
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            target = SERVICES[other]
            assert "profiles" not in target, f"{name} would pull in {other}, which is optional"
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in target, f"{name} waits for {other} to be healthy, which nothing checks"
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert target["restart"] == "no", f"{name} waits for {other} to end, which restarts"


def test_no_secret_has_a_default():
    for name, operator, operand in interpolations():
        if SECRET.search(name):
            assert operator == ":?", f"{name} must be required"
            assert "set" in operand
            assert EXAMPLE[name] == "", f"{name} has a value in .env.example"
        else:
            assert operator == ":-", f"{name} should say its default"


def test_the_example_lists_every_variable_that_must_be_set():
    required = {name for name, operator, _ in interpolations() if operator == ":?"}
    assert required <= set(EXAMPLE)
    assert set(EXAMPLE) <= {name for name, _, _ in interpolations()} | {"COMPOSE_PROFILES"}
    assert EXAMPLE["COMPOSE_PROFILES"] in {
        profile for each in SERVICES.values() for profile in each.get("profiles", [])
    }


def test_our_services_run_commands_that_exist():
    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    for name, service in OURS.items():
        match service["command"]:
            case ["trainshed", command, *_]:
                assert command in commands, name
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, name
            case other:
                pytest.fail(f"{name} runs {other}")


def test_our_services_are_given_settings_that_exist():
    for name, service in OURS.items():
        for variable in service["environment"]:
            assert variable in setting_names() | STORAGE_VARIABLES, f"{name}: {variable}"


def test_the_settings_in_compose_are_valid(monkeypatch: pytest.MonkeyPatch):
    for variable in setting_names():
        monkeypatch.delenv(variable, raising=False)
    for service in OURS.values():
        filled = {
            name: INTERPOLATION.sub(lambda found: found[3] if found[2] == ":-" else "x" * 16, str(value))
            for name, value in service["environment"].items()
        }
        with monkeypatch.context() as patch:
            for name, value in filled.items():
                patch.setenv(name, value)
            settings = Settings()
        assert settings.database.startswith("postgresql+psycopg://trainshed:")
        assert settings.redis.startswith("redis://:")
        assert settings.storage == "s3://trainshed"


def test_urls_name_services_and_their_ports():
    listening = {"postgres": "5432", "valkey": "6379", "storage": "7070"}
    settings = OURS["api"]["environment"]
    for variable in ("DATABASE_URL", "REDIS_URL", "AWS_ENDPOINT_URL"):
        host, port = re.search(r"(?:@|//)(\w+):(\d+)(?:/|$)", settings[variable]).groups()  # type: ignore[union-attr]
        assert listening[host] == port


def test_the_api_is_published_and_checked_on_the_port_it_listens_on():
    api = OURS["api"]
    port = api["environment"]["TRAINSHED_PORT"]
    assert [published.rsplit(":", 1)[1] for published in api["ports"]] == [port]
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(api["healthcheck"]["test"]))
    assert url is not None
    assert url[1] == port
    assert exists("GET", url[2])
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["api"]


def test_the_worker_may_take_longer_to_stop_than_its_jobs():
    grace = int(OURS["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().stop_grace_seconds


def test_images_are_built_from_stages_that_exist_and_do_not_run_as_root():
    for service in OURS.values():
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        instructions = stages()[service["build"]["target"]]
        assert re.findall(r"^USER (.+)$", instructions, re.MULTILINE) == ["trainshed"]
        assert set(service["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_images_hold_all_our_packages_and_nothing_that_is_missing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    sources = {source for line in copied for source in line}
    assert all((ROOT / source).exists() for source in sources)
    assert packages <= sources
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in
    extras = {extra for found in re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE) for extra in found.split(",")}
    assert extras <= set(project["project"]["optional-dependencies"])


def test_storage_finds_its_server_and_credentials_under_the_names_in_compose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given = {name: value for name, value in OURS["api"]["environment"].items() if name in STORAGE_VARIABLES}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        for name, value in {**given, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, "x" if "$" in value else value)
        assert httpx.put(f"{endpoint}/trainshed").is_success
        (tmp_path / "file").write_bytes(b"kept")
        storage = open_storage(OURS["api"]["environment"]["STORAGE_URL"])
        storage.put_file("a/file", tmp_path / "file")
        assert b"".join(storage.stream("a/file")) == b"kept"
    finally:
        server.stop()


def client() -> list[str] | None:
    """A Compose client, where this machine has one. It needs no engine to check a file."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            ran = subprocess.run([*command, "version"], capture_output=True, check=False, timeout=30)
            if ran.returncode == 0:
                return command
    return None


@pytest.mark.skipif(client() is None, reason="no Compose client here; the checks above stand in")
def test_the_compose_client_accepts_the_file():
    environment = {**os.environ, **{name: value or "x" * 16 for name, value in EXAMPLE.items()}}
    ran = subprocess.run(
        [*(client() or []), "--profile", "cpu", "--profile", "gpu", "config", "--quiet"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
