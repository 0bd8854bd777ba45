"""Check that what was installed is to the bit what is pinned, and, where PyPI tells, has no known vulnerability.

.ci/audit.py FOLDER     of pip's reports of all that was installed, as `make install` and `make dev` leave them
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / ".ci" / "hashes.txt"
# Torch says which of these it takes, and differently for each kind of device: they follow from torch's own version.
FOLLOWS_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton|setuptools")
DATABASE = "https://pypi.org/pypi/torch/2.0.0/json"
"""A version whose vulnerabilities are known: an index that mirrors files alone says nothing of them."""
PATIENCE_SECONDS = 10
PIP_AUDIT = "pip-audit==2.9.0"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def known_hashes() -> dict[str, str]:
    """SHA-256 of each file that a pinned version may be installed from, by the file's name."""
    lines = HASHES.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines if not line.startswith("#"))}


def judged(installed: Iterable[Mapping[str, Any]], known: Mapping[str, str]) -> tuple[list[str], list[str], int]:
    """What is not as pinned; what can't be told, as it comes from another index; and how many files are as pinned."""
    wrong, untold, good = [], [], 0
    for item in installed:
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
        if "archive_info" not in item["download_info"]:
            # This project itself, a folder.
            continue
        file = unquote(item["download_info"]["url"].rpartition("/")[2])
        digest = item["download_info"]["archive_info"].get("hashes", {}).get("sha256")
        if "+" in version or FOLLOWS_TORCH.fullmatch(name):
            untold.append(f"{name} {version}")
        elif known.get(file) != digest:
            wrong.append(f"{file}: sha256 {digest}, pinned {known.get(file) or 'no such file'}")
        else:
            good += 1
    return wrong, untold, good


def database_answers() -> str | None:
    """None where PyPI's database of vulnerabilities can be asked; else why it can't."""
    try:
        with urllib.request.urlopen(DATABASE, timeout=PATIENCE_SECONDS) as answer:
            known = json.load(answer).get("vulnerabilities")
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None if known else "it tells of none"


def ask_database() -> int:
    """What pip-audit, in an environment of its own, says of every package in constraints.txt; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        tools = Path(folder) / "bin"
        pip = [tools / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", PIP_AUDIT]
        if subprocess.run(pip, check=False).returncode:
            sys.stdout.write(f"Known vulnerabilities were not looked up: {PIP_AUDIT} could not be installed.\n")
            return 0
        audit = [tools / "pip-audit", "--strict", "--no-deps", "--disable-pip", "--requirement", CONSTRAINTS]
        return subprocess.run(audit, check=False).returncode


def main(folder: str) -> int:
    installed = [item for report in Path(folder).glob("*.json") for item in json.loads(report.read_text())["install"]]
    wrong, untold, good = judged(installed, known_hashes())
    if not (wrong or good):
        sys.stderr.write("No report tells of what was installed; remove .venv and run `make dev`.\n")
        return 2
    sys.stdout.write(f"{good} files are to the bit what .ci/hashes.txt pins.\n")
    if untold:
        sys.stdout.write(f"Not on PyPI, or by torch's own pins, and not compared: {', '.join(sorted(untold))}.\n")
    if wrong:
        told = "\n  ".join(["Not what is pinned; ask where it comes from before you use it:", *wrong])
        sys.stderr.write(f"{told}\n")
        return 1
    if why := database_answers():
        sys.stdout.write(f"Known vulnerabilities were not looked up: {DATABASE} can't be asked ({why}).\n")
        return 0
    return ask_database()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
