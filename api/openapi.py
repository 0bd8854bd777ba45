"""The OpenAPI document: what stands at the top of the page, and what FastAPI's own generator leaves to say.

`python -m api.openapi` writes it to the standard output; `docs/openapi.json` is that, and a test shows when it is not.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.examples import BODIES

VERSION = version("trainshed")
SUMMARY = "Training as a service, on your own machines."
DESCRIPTION = """\
Submit a pretrain or fine-tune job, watch it live, download a model that `transformers`, `peft` and `vllm` load.

Every route under `/v1` takes `Authorization: Bearer <key>`; a browser may sign in with one and then read by a cookie
(`POST /v1/visits`). Every error is
`{"error": {"message", "type", "param", "code"}}` and every answer carries an `x-request-id`. Times are unix seconds,
sizes are bytes. Every GET answers
HEAD. Lists are `{"object": "list", "data": […], "has_more": bool}`: ask for the next page with `after`, the
id of the last item. Files, fine-tunes, models and completions have OpenAI's shapes, so that the `openai` client works
with its `base_url` set to this server's `/v1`.
"""
TAGS = [
    {"name": "jobs", "description": "Submit a job, follow it, take what it made."},
    {"name": "fine-tuning", "description": "The same jobs in OpenAI's shapes, as far as they start from a model."},
    {"name": "files", "description": "Training data. Each file is validated when it is uploaded."},
    {"name": "uploads", "description": "Large files in parts, so that an interrupted upload goes on where it was."},
    {"name": "models", "description": "Bases to start from, and results of jobs."},
    {"name": "completions", "description": "Sample from a model."},
    {"name": "nodes", "description": "Hosts that run jobs."},
    {"name": "projects", "description": "Who owns things, apart from everyone else."},
    {"name": "keys", "description": "Who may do what."},
    {"name": "visits", "description": "Browsers that signed in, so that their pages can listen to streams."},
    {"name": "audit", "description": "Who did what."},
    {"name": "webhooks", "description": "Be told when a job has ended. Messages are signed as Standard Webhooks says."},
    {"name": "service", "description": "Health and measures of this server; they need no key."},
]


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`. A request that does not fit its types is answered with 400, so nothing speaks of 422."""
    page = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        tags=app.openapi_tags,
        routes=app.routes,
    )
    for name, path in page["paths"].items():
        for method, operation in path.items():
            if (body := BODIES.get(f"{method.upper()} {name}")) is not None:
                operation["requestBody"]["content"]["application/json"]["example"] = body
            operation["responses"].pop("422", None)
            _errors_are_json(operation["responses"])
            operation.update(_told(operation["description"]))
    schemas = page["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return page


def _errors_are_json(responses: dict[str, Any]) -> None:
    """Also where the answer itself is bytes or text, which is the type that the generator gives to all."""
    for status, answer in responses.items():
        if status >= "400" and "content" in answer:
            answer["content"] = {"application/json": next(iter(answer["content"].values()))}


def _told(docstring: str) -> dict[str, str]:
    """Summary and description: the first sentence of an endpoint's docstring, and all of it."""
    text = " ".join(docstring.split())
    return {"summary": re.split(r"[.:;](?: |$)", text)[0], "description": text}


def main() -> None:
    # Here and not above: the application takes its page from this module.
    from api.app import create_app
    from core.services import Services
    from core.settings import Settings

    # The page is the same whatever the settings, and must leave nothing behind.
    with TemporaryDirectory() as folder, Services(Settings(data_dir=Path(folder))) as services:
        page = create_app(services).openapi()
    sys.stdout.write(json.dumps(page, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
