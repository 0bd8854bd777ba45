"""What README.md and docs/operations.md show works: routes, fields, client calls, settings, error codes, links."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from unittest.mock import create_autospec, patch

import pytest
import yaml
from pydantic import AliasChoices
from pydantic_core import PydanticUndefined

from api import client as client_module
from api.cli.specs import SpecLoader
from api.client import Client, Event
from core import settings as settings_module
from core.failures import HINTS
from core.history import CHOICE_METRICS, EVALUATION_METRICS, STEP_METRICS
from core.settings import Settings
from core.spec import JobSpec
from tests.ops.routes import exists
from tests.test_architecture import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
MADE = {"book.txt"}
"""What a command of the page makes."""
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[a-z]*/README.md")])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def curls(text: str) -> list[str]:
    return re.findall(r"^curl [^']*?(?:'[^']*'[^']*?)?$", "\n".join(blocks(text, "bash")), re.MULTILINE)


def test_every_curl_example_calls_a_route_that_exists():
    commands = curls(README) + curls(OPERATIONS)
    assert len(commands) >= 5
    assert not exists("GET", "/v1/nonsense")
    for command in commands:
        path = re.search(r"\$URL(/\S+)", command)
        assert path is not None, command
        method = re.search(r"-X (\w+)", command)
        sends = " -d " in command or " -F " in command
        assert exists(method[1] if method else "POST" if sends else "GET", path[1]), command


def test_every_body_in_the_examples_is_a_valid_job():
    bodies = [body for text in (README, OPERATIONS) for body in re.findall(r"-d '(\{.*?\})'", text, re.DOTALL)]
    jobs = [json.loads(body) for body in bodies if '"kind"' in body]
    assert jobs
    for job in jobs:
        JobSpec.model_validate(job)


def test_every_spec_in_yaml_is_a_valid_job_and_what_it_names_of_ours_is_there():
    specs = [yaml.load(block, SpecLoader) for block in blocks(README, "yaml")]
    assert {spec["kind"] for spec in specs} == {"finetune", "pretrain"}
    for spec in specs:
        asked = {"evaluation"} & spec["data"].keys()
        named = [*spec["data"]["train"], *(spec["data"][name] for name in asked)]
        assert all((ROOT / name).is_file() for name in named if name not in MADE)
        JobSpec.model_validate(spec | {"data": spec["data"] | {"train": ["file-0"]} | dict.fromkeys(asked, "file-0")})


def test_the_python_example_uses_the_client_as_it_is(monkeypatch: pytest.MonkeyPatch):
    client = create_autospec(Client, instance=True)
    client.__enter__.return_value = client
    client.upload.return_value = {"id": "file-0123456789abcdef01234567"}
    client.submit.return_value = client.job.return_value = {"id": "job-1", "model": "a"}
    client.follow.return_value = [Event("done", "1", {})]
    client.chat.return_value = {"choices": [{"message": {"content": "An immutable sequence."}}]}
    monkeypatch.setenv("TRAINSHED_URL", "http://127.0.0.1:8642")
    monkeypatch.setenv("TRAINSHED_API_KEY", "ts_key")
    monkeypatch.chdir(ROOT)
    example = blocks(README, "python")[0]
    with patch.object(client_module, "Client", return_value=client):
        exec(compile(example, "README.md", "exec"), {})
    JobSpec.model_validate(client.submit.call_args.args[0])
    assert client.upload.call_args.args[0].exists()
    client.download.assert_called_once_with("job-1", Path("job-1"))


def test_the_page_on_the_client_uses_it_as_it_is(monkeypatch: pytest.MonkeyPatch):
    client = create_autospec(Client, instance=True)
    client.__enter__.return_value = client
    client.upload.return_value = {"id": "file-0123456789abcdef01234567"}
    client.submit.return_value = {"id": "job-1"}
    client.follow.return_value = [Event("done", "1", {})]
    page = (ROOT / "docs" / "client.md").read_text()
    with patch.object(client_module, "Client", return_value=client):
        exec(compile(blocks(page, "python")[0], "docs/client.md", "exec"), {})
    JobSpec.model_validate(client.submit.call_args.args[0])
    client.download.assert_called_once_with("job-1", Path("job-1"))


def settings_table() -> list[str]:
    """The table that README should have, from the code."""
    tree = ast.parse(Path(settings_module.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings").body
    rows = []
    for field, meaning in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(meaning, ast.Expr):
            name = field.target.id
            text = " ".join(ast.literal_eval(meaning.value).split())
            rows.append(f"| `{variable(name)}` | {default(name)} | {text} |")
    assert len(rows) == len(Settings.model_fields)
    return rows


def variable(name: str) -> str:
    alias = Settings.model_fields[name].validation_alias
    return str(alias.choices[-1]) if isinstance(alias, AliasChoices) else f"TRAINSHED_{name.upper()}"


def default(name: str) -> str:
    value = Settings.model_fields[name].default
    return "" if value is None or value is PydanticUndefined else f"`{value}`"


def test_the_settings_table_is_the_code():
    table = re.findall(r"^\| `[A-Z_]+` \|.*$", README.split("## Settings")[1].split("\n## ")[0], re.MULTILINE)
    assert table == settings_table()


def test_the_page_on_operations_explains_each_error_code_as_the_code_does():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", OPERATIONS.split("## When a job fails")[1], re.MULTILINE))
    assert table == HINTS


def test_the_page_on_operations_explains_each_metric():
    section = OPERATIONS.split("## What a job measures")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted([*STEP_METRICS, *EVALUATION_METRICS, *CHOICE_METRICS])


def test_the_tree_names_every_package():
    folders = set(re.findall(r"^\| \[(\w+)/\]", README, re.MULTILINE))
    assert {*PACKAGES, "docker", "tests"} <= folders


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_folder_of_the_tree_has_a_tour():
    missing = [folder for folder in re.findall(r"^\| \[(\w+)/\]", README, re.MULTILINE)
               if folder != "docs" and not (ROOT / folder / "README.md").exists()]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("package", ["api", "core", "engine", "workers"])
def test_a_packages_tour_names_each_of_its_modules(package: str):
    tour = (ROOT / package / "README.md").read_text()
    modules = {path.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*.py")}
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", tour, re.MULTILINE))
    assert named == {module for module in modules if not module.endswith("__init__.py")}
