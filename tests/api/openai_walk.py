"""What a user of the openai package does here, sync and async: `python openai_walk.py STAGE URL KEY ARGUMENTS`.

It imports nothing but that package, so that it runs under any version of it; what it saw it prints as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
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


def keep(client: openai.OpenAI, path: str, model: str) -> dict[str, Any]:
    """Files, uploads and models."""
    content = Path(path).read_bytes()
    with Path(path).open("rb") as opened:
        file = client.files.create(file=opened, purpose="fine-tune")
    kinds = {"mime_type": "application/jsonl", "purpose": "fine-tune"}
    upload = client.uploads.upload_file_chunked(
        file=content,
        filename="b.jsonl",
        bytes=len(content),
        part_size=50,
        md5=hashlib.md5(content).hexdigest(),
        **kinds,
    )
    dropped = client.uploads.create(bytes=1, filename="c.jsonl", **kinds)
    listed = [one.id for one in client.files.list(limit=1)]
    bad = None
    try:
        client.files.create(file=("c.jsonl", content + b"{"), purpose="fine-tune")
    except openai.BadRequestError as error:
        bad = refused(error)
    return {
        "name": file.filename, "waited": client.files.wait_for_processing(file.id).status,
        "same": client.files.retrieve(file.id).id == file.id, "status": upload.status, "listed": listed,
        "ids": [upload.file.id, file.id], "contents": [client.files.content(id_).text for id_ in listed], "bad": bad,
        "cancelled": client.uploads.cancel(dropped.id).status,
        "gone": [client.files.delete(id_).deleted for id_ in listed],
        "model": client.models.retrieve(model).id, "models": [one.id for one in client.models.list()],
    }  # fmt: skip


async def keep_later(client: openai.AsyncOpenAI, path: str, model: str) -> dict[str, Any]:
    content = Path(path).read_bytes()
    file = await client.files.create(file=Path(path), purpose="fine-tune")
    kinds = {"mime_type": "application/jsonl", "purpose": "fine-tune"}
    upload = await client.uploads.upload_file_chunked(
        file=content, filename="b.jsonl", bytes=len(content), part_size=50, **kinds
    )
    dropped = await client.uploads.create(bytes=1, filename="c.jsonl", **kinds)
    listed = [one.id async for one in client.files.list(limit=1)]
    bad = None
    try:
        await client.files.create(file=("c.jsonl", content + b"{"), purpose="fine-tune")
    except openai.BadRequestError as error:
        bad = refused(error)
    return {
        "name": file.filename, "waited": (await client.files.wait_for_processing(file.id)).status,
        "same": (await client.files.retrieve(file.id)).id == file.id, "status": upload.status, "listed": listed,
        "ids": [upload.file.id, file.id], "contents": [(await client.files.content(id_)).text for id_ in listed],
        "bad": bad, "cancelled": (await client.uploads.cancel(dropped.id)).status,
        "gone": [(await client.files.delete(id_)).deleted for id_ in listed],
        "model": (await client.models.retrieve(model)).id, "models": [one.id async for one in client.models.list()],
    }  # fmt: skip


def say(client: openai.OpenAI, model: str, text: str) -> dict[str, Any]:
    """Completions of either kind, whole and as a stream."""
    messages: Any = [{"role": "user", "content": text}]
    told = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=model, messages=messages, stream=True, stream_options=told))
    pieces = list(client.completions.create(model=model, prompt=text, stream=True))
    return {
        "text": client.completions.create(model=model, prompt=text).choices[0].text,
        "chat": client.chat.completions.create(model=model, messages=messages).choices[0].message.content,
        **streamed(chunks, pieces),
    }


async def say_later(client: openai.AsyncOpenAI, model: str, text: str) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": text}]
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [one async for one in await client.chat.completions.create(model=model, messages=messages, **asked)]
    pieces = [one async for one in await client.completions.create(model=model, prompt=text, stream=True)]
    return {
        "text": (await client.completions.create(model=model, prompt=text)).choices[0].text,
        "chat": (await client.chat.completions.create(model=model, messages=messages)).choices[0].message.content,
        **streamed(chunks, pieces),
    }


def streamed(chunks: list[Any], pieces: list[Any]) -> dict[str, Any]:
    return {
        "chunks": [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content],
        "ends": [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason],
        "total": chunks[-1].usage.total_tokens,
        "pieces": [one.choices[0].text for one in pieces if one.choices[0].text],
    }  # fmt: skip


def hear(client: openai.OpenAI, body: str, headers: str, secret: str) -> dict[str, Any]:
    """A message of a webhook, as it came, and with a letter more."""
    event = client.webhooks.unwrap(body, json.loads(headers), secret=secret)
    forged = False
    try:
        client.webhooks.unwrap(f"{body} ", json.loads(headers), secret=secret)
    except openai.InvalidWebhookSignatureError:
        forged = True
    return {"type": event.type, "job": event.data.id, "forged": forged}


async def hear_later(client: openai.AsyncOpenAI, body: str, headers: str, secret: str) -> dict[str, Any]:
    event = client.webhooks.unwrap(body, json.loads(headers), secret=secret)
    return {"type": event.type, "job": event.data.id, "forged": True}


STAGES = {
    "submit": (submit, submit_later),
    "read": (read, read_later),
    "keep": (keep, keep_later),
    "say": (say, say_later),
    "hear": (hear, hear_later),
}


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
