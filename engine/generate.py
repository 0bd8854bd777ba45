"""Text from a model folder: prompts in, sampled continuations out, one at a time. Who asks is not known here."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from engine import mesh, weights
from engine.model import Decoder
from engine.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class Sampling(BaseModel):
    """How the next token is chosen, and where to end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(128, ge=1)
    """Tokens generated at most; the model's length also ends it."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together have this probability (Holtzman et al. 2019)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The same seed, prompt and model give the same text on one kind of device."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are left out of it."""

    @field_validator("stop", mode="before")
    @classmethod
    def one_is_several(cls, stop: Any) -> Any:
        return () if stop is None else (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def none_is_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty stop text would end every answer at once; leave it out")
        return stop


class Request(Sampling):
    """A line that `serve` reads."""

    id: str
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """A conversation to answer, rendered with the model's chat template."""

    @model_validator(mode="after")
    def asks_one_thing(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set exactly one of prompt and messages")
        return self


@dataclass(frozen=True)
class Completion:
    """A continuation."""

    text: str
    finish_reason: FinishReason
    """stop: the model ended, or a stop text came up; length: `max_tokens` or the model's length was reached."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens generated, an ending one included."""


class Sampler:
    """A model and its tokenizer, in memory."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """From a folder in Hugging Face's layout, in the type its weights are stored in.

        Raises ValueError saying what is missing, damaged or not supported.
        """
        decoder = Decoder(weights.read_shape(folder), mesh.alone(device), dtype=weights.read_dtype(folder))
        weights.load(decoder, folder)
        return cls(decoder, Tokenizer.load(folder))

    def answer(self, request: Request) -> Completion:
        """Continue the request's prompt, or answer its conversation. Raises ValueError where that can't be done."""
        if request.messages is not None:
            return self.complete(self.tokenizer.chat(request.messages), request, begins_anew=True)
        assert request.prompt is not None
        return self.complete(self.tokenizer.prompt(request.prompt), request)

    def complete(self, prompt: list[int], sampling: Sampling, *, begins_anew: bool = False) -> Completion:
        """Continue `prompt`, token ids. Raises ValueError where it is empty or leaves no room in the model's length.

        The text can be put after the prompt's as it is; with `begins_anew` it stands alone, as an answer does.
        """
        longest = self.decoder.shape.max_seq_len
        if not prompt:
            raise ValueError("the prompt has no tokens; say something")
        if len(prompt) >= longest:
            raise ValueError(f"the prompt has {len(prompt)} tokens and the model takes {longest}; shorten the prompt")
        room = min(sampling.max_tokens, longest - len(prompt))
        cache = self.decoder.cache(rows=1, tokens=len(prompt) + room)
        generator = torch.Generator().manual_seed(sampling.seed)
        stream = self.tokenizer.stream(after=() if begins_anew else prompt)
        text, count, pending = "", 0, prompt
        reason: FinishReason = "length"
        while count < room:
            count += 1
            ids_BT = torch.tensor([pending], device=self.decoder.device)
            token = choose(self.decoder.logits(ids_BT, cache, last_only=True)[0, -1].cpu(), sampling, generator)
            if token in self.tokenizer.stop_ids:
                reason = "stop"
                break
            text += stream.push(token)
            if first_stop(text, sampling.stop) is not None:
                break
            pending = [token]
        # A stop text may stand before half a character, which is given out only here.
        text += stream.finish()
        if (end := first_stop(text, sampling.stop)) is not None:
            text, reason = text[:end], "stop"
        return Completion(text, reason, len(prompt), count)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id, from fp32 logits over the vocabulary. Raises ValueError where they are not finite."""
    if not logits_V.isfinite().all():
        raise ValueError("the model gives no finite chances: its weights are damaged, or its training diverged")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # In double: the last few of 100 000 cumulated fp32 probabilities are noise. Below zero, so that none overflows.
    chances_V = ((logits_V.double() - logits_V.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        sorted_V, order_V = chances_V.sort(descending=True)
        # A token stays where those before it do not reach `top_p` yet; the likeliest always does.
        chances_V[order_V[sorted_V.cumsum(-1) - sorted_V >= sampling.top_p]] = 0
    return int(torch.multinomial(chances_V, 1, generator=generator))


def first_stop(text: str, stops: Iterable[str]) -> int | None:
    """Where the first of `stops` begins in `text`; None where none is there."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def serve(folder: Path, reader: TextIO, writer: TextIO, *, device: torch.device) -> None:
    """Load the model, say {"ready": true}, then answer one JSON request a line with one JSON line each, until EOF.

    A request that can't be answered gets {"id", "error"} and the next one is read. Raises ValueError where the model
    can't be loaded.
    """
    sampler = Sampler.load(folder, device)
    _say(writer, {"ready": True})
    for line in reader:
        if line.strip():
            _say(writer, _answer(sampler, line))


def _answer(sampler: Sampler, line: str) -> dict[str, Any]:
    identity = None
    try:
        order = json.loads(line)
        identity = order.get("id") if isinstance(order, dict) else None
        request = Request.model_validate(order)
        completion = sampler.answer(request)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return {"id": identity, "error": f"{where}: {first['msg']}" if where else first["msg"]}
    except ValueError as error:
        return {"id": identity, "error": str(error)}
    except Exception as error:  # one bad request must not end the service
        traceback.print_exc(file=sys.stderr)
        return {"id": identity, "error": f"{type(error).__name__}: {error}"}
    return {
        "id": request.id,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
    }


def _say(writer: TextIO, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer, ensure_ascii=False) + "\n")
    writer.flush()
