"""Settings from the environment: what can't be used is refused by the name of its variable, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from core.settings import Settings, complaints, misspelt


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param("DATABASE_URL", "mysql://host/database", id="a database that is not supported"),
        pytest.param("REDIS_URL", "host:6379", id="a broker without its scheme"),
        pytest.param("STORAGE_URL", "/folder", id="a path where a URL belongs"),
        pytest.param("TRAINSHED_ADMIN_KEY", "short", id="a key that can be guessed"),
        pytest.param("TRAINSHED_ADMIN_KEY", "sixteen and white", id="a key that no header can carry"),
        pytest.param("HF_ENDPOINT", "ftp://hub.example", id="a hub of another kind"),
        pytest.param("HF_ENDPOINT", "https://user:secret@hub.example", id="a hub with a password in its URL"),
        pytest.param("HF_TOKEN", "hf_a\nb: c", id="a token that no header can carry"),
        pytest.param("TRAINSHED_HUB_NETWORKS", "10.0.0.1/8", id="an address where a hub's network belongs"),
        pytest.param("TRAINSHED_LOG_LEVEL", "loud", id="a level that is none"),
        pytest.param("TRAINSHED_SLOTS", "0", id="no slot"),
        pytest.param("TRAINSHED_WEBHOOK_NETWORKS", "127.0.0.0/8,10.0.0.1/8", id="an address where a network belongs"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_without_its_value(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError) as refused:
        Settings()
    said = complaints(refused.value)
    assert said.startswith(f"{variable}: ")
    assert value not in said or variable in {"TRAINSHED_LOG_LEVEL", "TRAINSHED_SLOTS"}


@pytest.mark.parametrize(
    ("variable", "field"),
    [("DATABASE_URL", "database_url"), ("TRAINSHED_SLOTS", "slots"), ("TRAINSHED_ADMIN_KEY", "admin_key")],
)
def test_an_empty_variable_is_one_that_is_not_set(monkeypatch, variable, field):
    monkeypatch.setenv(variable, "")
    assert getattr(Settings(), field) is None


def test_a_variable_that_nothing_reads_is_named_with_what_it_may_have_meant(monkeypatch):
    monkeypatch.setenv("TRAINSHED_SLOT", "4")
    monkeypatch.setenv("TRAINSHED_COLOUR_OF_THE_SHED", "red")
    monkeypatch.setenv("TRAINSHED_SLOTS", "4")
    monkeypatch.setenv("TRAINSHED_API_KEY", "ts_of_a_client")
    assert misspelt() == [
        "TRAINSHED_COLOUR_OF_THE_SHED is no setting and is ignored",
        "TRAINSHED_SLOT is no setting and is ignored; TRAINSHED_SLOTS is meant, perhaps",
    ]


@pytest.mark.parametrize("module", ["api.server", "workers.node"])
def test_every_process_that_is_started_names_a_variable_that_nothing_reads(module, tmp_path):
    # It ends at once, for there is no database in a folder that can't be; what it says before is meant.
    variables = {"TRAINSHED_SLOT": "4", "TRAINSHED_DATA_DIR": str(tmp_path), "STORAGE_URL": "file:///dev/null/no"}
    started = subprocess.run(
        [sys.executable, "-m", module], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert started.returncode != 0
    said = [json.loads(line) for line in started.stderr.splitlines() if line.startswith("{")]
    (named,) = (line for line in said if line["event"] == "a variable is ignored")
    assert "TRAINSHED_SLOTS is meant" in named["why"]


def test_a_log_level_may_be_written_small(monkeypatch):
    monkeypatch.setenv("TRAINSHED_LOG_LEVEL", "debug")
    assert Settings().log_level == "DEBUG"
