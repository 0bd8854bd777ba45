"""docs/security.md names a test for each thing that it says is stopped, and each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def named() -> list[tuple[str, str]]:
    """File and test of each that the page names; `…` stands for the file before."""
    found, file = [], ""
    for path, test in re.findall(r"`(\S+?)::(\w+)`", PAGE):
        file = file if path == "…" else path
        found.append((file, test))
    return found


def test_each_test_that_the_threat_model_names_is_there() -> None:
    assert len(named()) > 30
    missing = [
        f"{file}::{test}" for file, test in named() if not re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M)
    ]
    assert not missing


def test_each_row_of_what_is_stopped_names_one() -> None:
    rows = re.findall(r"^\| .* \|$", PAGE.split("## What stops them")[1].split("## What is not defended")[0], re.M)
    attacks = [row for row in rows if not row.startswith(("| attack |", "|---"))]
    assert len(attacks) > 15
    assert not [row for row in attacks if "::" not in row]


def test_each_file_of_attacks_is_named() -> None:
    files = {f"tests/security/{path.name}" for path in Path(__file__).parent.glob("test_*.py")} - {
        "tests/security/test_threat_model.py"
    }
    assert files <= {file for file, _ in named()}
