"""Text from a model folder: a prompt in, a sampled continuation out. Who asks is not known here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from engine import mesh, weights
from engine.answer import FinishReason
from engine.batching import Batcher, Failure, Progress, Report, Request
from engine.model import Decoder
from engine.sampling import Sampling
from engine.tokenizer import Tokenizer


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

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, end_ids: Sequence[int] = ()) -> None:
        """`end_ids` end a text, as the model's configuration says; none: those that the tokenizer has for it."""
        self.decoder, self.tokenizer, self.end_ids = decoder, tokenizer, tuple(end_ids)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """From a folder in Hugging Face's layout, in the type its weights are stored in.

        Raises ValueError saying what is missing, damaged or not supported.
        """
        decoder = Decoder(weights.read_shape(folder), mesh.alone(device), dtype=weights.read_dtype(folder))
        weights.load(decoder, folder)
        return cls(decoder, Tokenizer.load(folder), end_ids(folder))

    def complete(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt`, token ids. Raises ValueError where it is empty or leaves no room in the model's length."""
        return self.answer(Request(id="", prompt=tuple(prompt), **sampling.model_dump()))

    def answer(self, request: Request) -> Completion:
        """The first answer to a request. Raises ValueError where there is none."""
        reports: list[Report] = []
        batcher = Batcher(self.decoder, self.tokenizer, reports.append, end_ids=self.end_ids)
        batcher.admit(request.model_copy(update={"stream": False}))
        while batcher.is_busy:
            batcher.step()
        (report,) = reports
        if isinstance(report, Failure):
            raise report.error
        assert isinstance(report, Progress)
        assert report.usage is not None
        piece = report.pieces[0]
        assert piece.finish_reason is not None
        return Completion(piece.text, piece.finish_reason, *report.usage)


def end_ids(folder: Path) -> list[int]:
    """What a text ends with, as `transformers` reads it: of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return list(found) if isinstance(found, list) else [found]
    return []
