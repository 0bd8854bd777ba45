"""Which token comes next: what may be asked about it, and how it is chosen from the model's logits.

V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

NUCLEUS = 1024
"""Tokens that mostly have all of `top_p` between them: as many are sorted at first."""


class Sampling(BaseModel):
    """How the next token is chosen, and where to end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(128, ge=0)
    """Tokens generated at most; the model's length also ends it."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together have this probability (Holtzman et al. 2019)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The same seed, prompt and model give the same text on one kind of device, whoever else is answered meanwhile."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are left out of it."""
    logprobs: int | None = Field(None, ge=0)
    """Tell each token's log-probability, and that of so many of the likeliest tokens in its place; None: of none."""

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


class NotFinite(ValueError):
    """The model has no chances to choose by."""

    def __init__(self) -> None:
        super().__init__("the model gives no finite chances: its weights are damaged, or its training diverged")


def choose(logits_V: Tensor, sampling: Sampling, random: Random) -> int:
    """The next token's id, from fp32 logits over the vocabulary. Raises NotFinite where they are not."""
    if not logits_V.isfinite().all():
        raise NotFinite
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # In double: the last few of 100 000 cumulated fp32 probabilities are noise. Below zero, so that none overflows.
    chances_V = ((logits_V.double() - logits_V.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        chances_V = nucleus(chances_V, sampling.top_p)
    # One number decides, along the vocabulary's own order: ranks of near-equal chances would flip with the last bit.
    sums_V = chances_V.cumsum(-1)
    chosen = int(torch.searchsorted(sums_V, random.random() * float(sums_V[-1]), right=True))
    return chosen if chosen < len(sums_V) else int(chances_V.argmax())


def nucleus(chances_V: Tensor, top_p: float) -> Tensor:
    """`chances_V` of the likeliest tokens that reach `top_p`, and zero of the others."""
    count = len(chances_V)
    for most in (min(NUCLEUS, count), count):
        sorted_K, order_K = chances_V.topk(most)
        sums_K = sorted_K.cumsum(-1)
        if float(sums_K[-1]) >= top_p:
            break
    # A token stays where those before it do not reach `top_p` yet; the likeliest always does.
    kept_K = order_K[sums_K - sorted_K < top_p]
    return torch.zeros_like(chances_V).index_copy_(0, kept_K, chances_V[kept_K])


@dataclass(frozen=True)
class Chance:
    """How likely the model held a token in its place, before temperature and `top_p`, and which were likeliest."""

    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and their log-probabilities, the likeliest first."""


def chance(logits_V: Tensor, token: int, *, top: int) -> Chance:
    """Of `token`, and the `top` likeliest."""
    logprobs_V = logits_V.log_softmax(-1)
    values_K, ids_K = logprobs_V.topk(min(top, len(logprobs_V)))
    return Chance(float(logprobs_V[token]), tuple(zip(ids_K.tolist(), values_K.tolist(), strict=True)))
