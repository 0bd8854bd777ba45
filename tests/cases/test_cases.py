"""Each case behaves as its `expect.json` says: those of our own, and more from a folder that TRAINSHED_CASES names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.api.conftest import Live
from tests.cases import bases
from tests.cases.checks import check
from tests.cases.playing import Case, Play

TWINS = Path(__file__).parent / "twins"
MORE = os.environ.get("TRAINSHED_CASES")


def folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/expect.json"))


def named(root: Path) -> list[object]:
    return [pytest.param(folder, id=folder.name) for folder in folders(root)]


@pytest.fixture(scope="module", autouse=True)
def base(live: Live) -> None:
    """The model that most cases start from."""
    bases.write(live.services.settings.models / bases.NAME)


def play(folder: Path, live: Live, tmp_path: Path) -> Play:
    """The case of a folder, sent; a model that it brings is found under a name of its own."""
    case, models = Case.read(folder), live.services.settings.models
    model = bases.NAME
    if (folder / "model").is_dir():
        model = f"cases-{folder.name}"
        shutil.copytree(folder / "model", models / model, dirs_exist_ok=True)
    elif "make_model" in case.said:
        model = f"cases-{folder.name}"
        bases.write(models / model, **case.said["make_model"])
    with live.http(live.key()) as http:
        played = Play(case, live, http, tmp_path, model).send()
        check(played)
    return played


@pytest.mark.parametrize("folder", named(TWINS))
def test_a_case_of_ours_behaves_as_it_says(folder: Path, live: Live, tmp_path: Path) -> None:
    play(folder, live, tmp_path)


@pytest.mark.skipif(MORE is None, reason="TRAINSHED_CASES names no folder of cases")
@pytest.mark.parametrize("folder", named(Path(MORE)) if MORE else [])
def test_a_case_behaves_as_it_says(folder: Path, live: Live, tmp_path: Path) -> None:
    play(folder, live, tmp_path)
