"""A model that answers whoever writes to it: `python -m engine serve DIR`, a JSON object a line in and out.

In go requests (`engine.batching.Request`) and `{"cancel": id}`. Out come `{"ready": true}` once the model is loaded,
and of each request lines with its `id`: `choices` that go on where they were, the last line with `usage`, or an
`error`. Requests are answered together, and their lines come as they come. One that is given up is told `cancelled`:
who hears nothing of that for long knows that this process hangs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TextIO

import torch
from pydantic import ValidationError

from engine.answer import Piece, Said
from engine.batching import Batcher, Failure, Refused, Report, Request
from engine.generate import Sampler
from engine.tokenizer import Tokenizer

CACHE_SHARE = {"cpu": 0.125, "cuda": 0.5}
"""Of the host's memory, or of what the model leaves free of the device's: what the caches of all texts may take."""


def serve(folder: Path, reader: TextIO, writer: TextIO, *, device: torch.device) -> None:
    """Load the model and answer until EOF; what was asked before that is answered to the end.

    Raises ValueError, which is said in a line too, where the model can't be loaded.
    """

    def say(line: dict[str, Any]) -> None:
        # ASCII, so that no text can have a line end in it.
        writer.write(json.dumps(line) + "\n")
        writer.flush()

    try:
        sampler = Sampler.load(folder, device)
    except ValueError as error:
        say({"error": {"code": "invalid_model", "message": str(error)}})
        raise
    lines = Lines(sampler.tokenizer)
    batcher = Batcher(
        sampler.decoder,
        sampler.tokenizer,
        lambda report: say(lines.of(report)),
        end_ids=sampler.end_ids,
        cache_bytes=room_for_caches(device),
    )
    inbox: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=listen, args=(reader, inbox), name="listener", daemon=True).start()
    say({"ready": True})
    is_open = True
    # Where nobody reads the answers any more, nobody wants the rest.
    with suppress(BrokenPipeError):
        while is_open or batcher.is_busy:
            for line in heard(inbox, wait=is_open and not batcher.is_busy):
                if line is None:
                    is_open = False
                elif line.strip() and (said := obey(batcher, line)) is not None:
                    say(said)
            batcher.step()


def listen(reader: TextIO, inbox: SimpleQueue[str | None]) -> None:
    """Put each line into `inbox`, and None after the last."""
    for line in reader:
        inbox.put(line)
    inbox.put(None)


def heard(inbox: SimpleQueue[str | None], *, wait: bool) -> Iterator[str | None]:
    """What has come in; where nobody is being answered, wait for it."""
    try:
        yield inbox.get(block=wait)
        while True:
            yield inbox.get(block=False)
    except Empty:
        return


def obey(batcher: Batcher, line: str) -> dict[str, Any] | None:
    """Take a request, or give one up; a line that says so of the latter, or why not."""
    identity = None
    try:
        order = json.loads(line)
        if isinstance(order, dict):
            if "cancel" in order:
                batcher.cancel(str(order["cancel"]))
                return {"id": order["cancel"], "cancelled": True}
            identity = order.get("id")
        batcher.admit(Request.model_validate(order))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = str(first["msg"]).removeprefix("Value error, ")
        return refusal(identity, "invalid_request", f"{where}: {said}" if where else said, where or None)
    except Refused as error:
        return refusal(identity, error.code, str(error), error.field)
    except ValueError as error:
        return refusal(identity, "invalid_request", str(error), None)
    except Exception as error:  # one bad request must not end the service
        traceback.print_exc(file=sys.stderr)
        return refusal(identity, "internal", f"{type(error).__name__}: {error}", None)
    return None


def refusal(identity: object, code: str, message: str, param: str | None) -> dict[str, Any]:
    """The one line of a request that gets no answer."""
    return {"id": identity, "error": {"code": code, "message": message, "param": param}}


class Lines:
    """What is said of a report."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.piece_of = lru_cache(maxsize=2**16)(tokenizer.piece)

    def of(self, report: Report) -> dict[str, Any]:
        if isinstance(report, Failure):
            code = "invalid_model" if isinstance(report.error, ValueError) else "internal"
            said = str(report.error) if isinstance(report.error, ValueError) else type(report.error).__name__
            return refusal(report.id, code, said, "model")
        line: dict[str, Any] = {"id": report.id}
        line["choices"] = [{"index": index, **self.choice(piece)} for index, piece in report.pieces.items()]
        if report.usage is not None:
            prompt, generated = report.usage
            line["usage"] = {"prompt_tokens": prompt, "completion_tokens": generated}
        return line

    def choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": piece.text, "finish_reason": piece.finish_reason}
        if piece.said:
            choice["tokens"] = [self.token(said) for said in piece.said]
        return choice

    def token(self, said: Said) -> dict[str, Any]:
        chance = said.chance
        return {
            **self.named(said.token),
            "offset": said.offset,
            "logprob": None if chance is None else chance.logprob,
            "top": [] if chance is None else [{**self.named(token), "logprob": value} for token, value in chance.top],
        }

    def named(self, token: int) -> dict[str, Any]:
        text, raw = self.piece_of(token)
        return {"token": text, "bytes": list(raw)}


def room_for_caches(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(free * CACHE_SHARE[device.type])
