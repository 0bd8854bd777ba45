"""What a user of the openai package does to fine-tune, sync and async: `python openai_walk.py STAGE URL KEY ARGUMENTS`.

It imports nothing but that package, so that it runs under any version of it; what it saw it prints as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai


def asked(model: str, file: str, suffix: str) -> dict[str, Any]:
    hyperparameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    return {
        "model": model,
        "training_file": file,
        "suffix": suffix,
        "seed": 7,
        "metadata": {"team": "a b", "walk": suffix},
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "extra_body": {"priority": 3, "training": {"precision": "fp32"}},
    }


def refused(error: openai.APIStatusError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__, "param": error.param, "code": error.code,
        "retries": error.response.request.headers["x-stainless-retry-count"],
    }  # fmt: skip


def submit(client: openai.OpenAI, model: str, file: str) -> dict[str, Any]:
    jobs = client.fine_tuning.jobs
    job = jobs.create(**asked(model, file, "sync"))
    paused, resumed = jobs.pause(job.id), jobs.resume(job.id)
    other = jobs.create(model=model, training_file=file)
    cancelled = jobs.cancel(other.id)
    bad = None
    try:
        jobs.create(model=model, training_file="file-0", hyperparameters={"n_epochs": 1})
    except openai.NotFoundError as error:
        bad = refused(error)
    return {
        "job": job.id, "same": jobs.retrieve(job.id).id, "method": job.method.type, "seed": job.seed,
        "states": [paused.state, resumed.state], "statuses": [job.status, paused.status, cancelled.status],
        "epochs": job.hyperparameters.n_epochs, "found": [one.id for one in jobs.list(metadata={"walk": "sync"})],
        "without": [one.id for one in jobs.list(extra_query={"metadata": "null"})],
        "listed": [one.id for one in jobs.list(limit=1)], "other": other.id, "bad": bad,
    }  # fmt: skip


async def submit_later(client: openai.AsyncOpenAI, model: str, file: str) -> dict[str, Any]:
    jobs = client.fine_tuning.jobs
    job = await jobs.create(**asked(model, file, "async"))
    found = [one.id async for one in jobs.list(metadata={"walk": "async"})]
    cancelled = await jobs.cancel(job.id)
    return {"job": job.id, "same": (await jobs.retrieve(job.id)).id, "found": found, "statuses": [cancelled.status]}


def read(client: openai.OpenAI, job_id: str) -> dict[str, Any]:
    jobs = client.fine_tuning.jobs
    job = jobs.retrieve(job_id)
    events = list(jobs.list_events(job_id, limit=2))
    checkpoints = list(jobs.checkpoints.list(job_id, limit=1))
    conflict = None
    try:
        jobs.cancel(job_id)
    except openai.ConflictError as error:
        conflict = refused(error)
    return {
        "job": job.to_dict(), "events": [event.to_dict() for event in events],
        "checkpoints": [checkpoint.to_dict() for checkpoint in checkpoints], "conflict": conflict,
        "results": client.files.content(job.result_files[0]).text,
        "model": client.models.retrieve(job.fine_tuned_model).id,
    }  # fmt: skip


async def read_later(client: openai.AsyncOpenAI, job_id: str) -> dict[str, Any]:
    jobs = client.fine_tuning.jobs
    job = await jobs.retrieve(job_id)
    return {
        "job": job.to_dict(),
        "events": [event.id async for event in jobs.list_events(job_id, limit=3)],
        "checkpoints": [checkpoint.id async for checkpoint in jobs.checkpoints.list(job_id)],
        "results": (await client.files.content(job.result_files[0])).text,
    }


STAGES = {"submit": (submit, submit_later), "read": (read, read_later)}


async def later(stage: Any, url: str, key: str, *arguments: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        seen: dict[str, Any] = await stage(client, *arguments)
        return seen


def walk(stage: str, url: str, key: str, *arguments: str) -> dict[str, Any]:
    now, afterwards = STAGES[stage]
    with openai.OpenAI(base_url=url, api_key=key) as client:
        seen = now(client, *arguments)
    return {"version": openai.__version__, "sync": seen, "async": asyncio.run(later(afterwards, url, key, *arguments))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(walk(*sys.argv[1:])))
