"""What stands beside the fine-tunes, under the openai client as it is and one major version back, sync and async."""

from __future__ import annotations

import json
from pathlib import Path

from core import webhooks
from core.models import WebhookEndpoint
from tests.api.test_completions import asked, sampler
from tests.api.test_files import CHAT
from tests.api.test_fine_tuning import Walk, older, walk
from tests.api.test_models import base

__all__ = ["asked", "base", "older", "sampler", "walk"]

BOTH = ["sync", "async"]


def test_files_uploads_and_models_are_those_that_the_client_knows(walk: Walk, base: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(CHAT * 2)
    seen = walk("keep", str(tmp_path / "a.jsonl"), base)
    for way in BOTH:
        found = seen[way]
        assert (found["name"], found["waited"], found["same"]) == ("a.jsonl", "processed", True)
        assert (found["status"], found["cancelled"]) == ("completed", "cancelled")
        # Newest first, a page each.
        assert found["listed"] == found["ids"]
        assert found["contents"] == [(CHAT * 2).decode()] * 2
        assert found["bad"] == {
            "kind": "BadRequestError", "param": "file:3", "code": "invalid_file", "retries": "0",
        }  # fmt: skip
        assert found["gone"] == [True, True]
        assert found["model"] == base
        assert base in found["models"]


def test_answers_come_whole_and_as_streams(walk: Walk, base: str) -> None:
    # The sampler that is played turns a text round.
    seen = walk("say", base, "abc")
    for way in BOTH:
        assert seen[way] == {
            "text": "cba", "chat": "cba", "chunks": ["c", "b", "a"], "pieces": ["c", "b", "a"], "ends": ["stop"],
            "total": 5,
        }  # fmt: skip


def test_a_message_of_a_webhook_is_verified(walk: Walk) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    event = {"id": "evt-1", "object": "event", "created_at": 1, "data": {"id": "ftjob-1"}}
    body = json.dumps(event | {"type": "fine_tuning.job.succeeded"})
    headers = webhooks.signed(WebhookEndpoint(secret=secret), "evt-1", body.encode())
    seen = walk("hear", body, json.dumps(headers), secret)
    for way in BOTH:
        assert seen[way] == {"type": "fine_tuning.job.succeeded", "job": "ftjob-1", "forged": True}
