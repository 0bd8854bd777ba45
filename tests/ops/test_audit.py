"""What was installed is compared with the hashes of what is pinned."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "audit.py"
WHEEL = "anyio-4.16.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(file: str, digest: str) -> dict[str, Any]:
    """One entry of pip's report, in the form of its documentation."""
    name, version = file.split("-")[:2]
    return {
        "download_info": {
            "url": f"https://files.pythonhosted.org/packages/{file.replace('+', '%2B')}",
            "archive_info": {"hash": f"sha256={digest}", "hashes": {"sha256": digest}},
        },
        "metadata": {"name": name, "version": version},
    }


PROJECT = {
    "download_info": {"url": "file:///a/clone", "dir_info": {"editable": True}},
    "metadata": {"name": "trainshed", "version": "0"},
}


def test_each_pinned_package_has_files_with_hashes(audit: ModuleType) -> None:
    pins = re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = audit.known_hashes()
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in known.values())
    files = {(audit.canonical(file.split("-")[0]), file.split("-")[1]) for file in known if file.endswith(".whl")}
    # A wheel's version is one part of its name; a package without a wheel has an archive of its sources.
    without = [pin for pin in pins if (audit.canonical(pin[0]), pin[1]) not in files]
    archives = {file.removesuffix(".tar.gz") for file in known}
    assert [pin for pin in without if f"{pin[0].replace('-', '_')}-{pin[1]}" not in archives] == []


def test_a_file_of_another_content_or_of_another_name_is_told(audit: ModuleType) -> None:
    good, other = hashlib.sha256(b"good").hexdigest(), hashlib.sha256(b"other").hexdigest()
    items = [
        PROJECT, installed(WHEEL, good), installed("idna-3.20-py3-none-any.whl", other),
        installed("evil-1-py3-none-any.whl", good), installed("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", other),
        installed("nvidia_nccl_cu13-2.28-py3-none-linux_x86_64.whl", other),
    ]  # fmt: skip
    wrong, untold, as_pinned = audit.judged(items, {WHEEL: good, "idna-3.20-py3-none-any.whl": good})
    assert wrong == [
        f"idna-3.20-py3-none-any.whl: sha256 {other}, pinned {good}",
        f"evil-1-py3-none-any.whl: sha256 {good}, pinned no such file",
    ]
    assert untold == ["torch 2.13.0+cpu", "nvidia-nccl-cu13 2.28"]
    assert as_pinned == 1


def test_an_index_that_was_tampered_with_ends_the_check(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps({"version": "1", "install": [installed(WHEEL, "0" * 64)]}))
    ended = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"{WHEEL}: sha256 {'0' * 64}, pinned " in ended.stderr


def test_without_a_report_it_says_how_to_come_by_one(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps({"version": "1", "install": [PROJECT]}))
    asked = [sys.executable, SCRIPT, tmp_path]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (
        2, "No report tells of what was installed; remove .venv and run `make dev`.\n",
    )  # fmt: skip
