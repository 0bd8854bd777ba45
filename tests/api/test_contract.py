"""Schemathesis reads the OpenAPI page and asks for everything in it, in right and in wrong ways."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core.projects import DEFAULT_PROJECT
from tests.api.conftest import served

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method",
)  # fmt: skip
PATIENCE_SECONDS = 280
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "extent",
    [
        pytest.param(("--phases", "examples,fuzzing", "--max-examples", "2"), id="a few of each"),
        pytest.param(
            ("--phases", "examples,coverage,fuzzing", "--max-examples", "8"), marks=pytest.mark.slow, id="thousands"
        ),
    ],
)
def test_no_request_is_answered_by_a_failure_of_ours_or_by_what_the_page_does_not_tell(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, extent: tuple[str, ...]
) -> None:
    with served(tmp_path_factory.mktemp("contract")) as live:
        key = live.key(project=DEFAULT_PROJECT)
        command = [
            os.fspath(Path(sys.executable).with_name("schemathesis")), "run", f"{live.url}/openapi.json",
            "--header", f"Authorization: Bearer {key}", "--checks", ",".join(CHECKS), *extent,
            # The one has no end, and the other rightly answers 503 where no worker is.
            "--exclude-path-regex", "stream$", "--exclude-path", "/readyz",
            "--seed", "1", "--request-timeout", "20", "--continue-on-failure", "--warnings", "off", "--no-color",
        ]  # fmt: skip
        ran = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert re.findall(r"Tested: (\d+)", ran.stdout) == [str(operations() - 2)]


def operations() -> int:
    page = json.loads((ROOT / "docs" / "openapi.json").read_text())
    return sum(len(methods) for methods in page["paths"].values())
