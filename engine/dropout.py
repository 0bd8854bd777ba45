"""Dropout whose mask is a pure function of (seed, step, stream, row, token, feature): the same in every layout.

No random state has to be replayed: where the mask is not kept for the backward pass, it is computed again.

B rows, T tokens that the matrices see, S tokens of this rank, N tokens of either, Q queries, K keys, F features and
H heads of this rank, M all dims but the last, m some.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.ledger import Ledger

_WORD = 0xFFFFFFFF
_FACTOR = 0x45D9F3B
_CACHED, _ON_A_DEVICE = 2**17, 2**26
"""Elements of a mask that are computed at once: what a core's cache keeps, and what is little on a GPU."""


@dataclass(frozen=True)
class Draw:
    """What the masks of one pass are drawn from."""

    seed: int
    step: int
    rows_B: Tensor
    """int64 place of each row within the step's global batch."""
    tokens_T: Tensor
    """int64 place in its row of each token that the matrices see."""
    tokens_S: Tensor
    """int64 place in its row of each token that this rank holds between the matrices."""


def dropout(
    x_BNF: Tensor,
    rate: float,
    draw: Draw,
    *,
    stream: str,
    tokens_N: Tensor,
    first_feature: int = 0,
    saves_mask: bool = False,
) -> Tensor:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate).

    `stream` names the place in the model; `tokens_N`, one of the two of `draw`, and `first_feature` say where the local
    piece lies. The mask is computed again in backward, or kept until then, a byte an element (Korthikanti et al. 2022,
    section 4.1).
    """
    places = (tokens_N.to(x_BNF.device), _run(first_feature, x_BNF.shape[-1], x_BNF))
    masked_BNF = _Dropout.apply(x_BNF, rate, draw, stream, places, saves_mask)  # type: ignore[no-untyped-call]
    return cast(Tensor, masked_BNF)


@dataclass(frozen=True)
class Dropout:
    """Dropout at one place of the net. It keeps the mask for backward, unless dropout is replayed."""

    rate: float
    place: str
    ledger: Ledger

    def __call__(self, x_BSD: Tensor, draw: Draw | None) -> Tensor:
        """B S D to B S D; as it is without a rate or a draw."""
        if not self.rate or draw is None:
            return x_BSD
        saves = "dropout" not in self.ledger.operations
        return dropout(x_BSD, self.rate, draw, stream=self.place, tokens_N=draw.tokens_S, saves_mask=saves)


def dropout_of_pairs(
    x_BHQK: Tensor,
    queries: range,
    keys: range,
    *,
    rate: float,
    draw: Draw,
    stream: str,
    first_head: int,
    saves_mask: bool,
) -> Tensor:
    """The same for what each head, from number `first_head` on, makes of pairs of tokens at these places in the row."""
    places = (first_head, x_BHQK.shape[1]), (queries.start, len(queries)), (keys.start, len(keys))
    masked_BHQK = _Dropout.apply(  # type: ignore[no-untyped-call]
        x_BHQK, rate, draw, stream, tuple(_run(*place, x_BHQK) for place in places), saves_mask
    )
    return cast(Tensor, masked_BHQK)


def _run(first: int, length: int, like: Tensor) -> Tensor:
    return torch.arange(first, first + length, device=like.device)


class _Dropout(torch.autograd.Function):
    """Forward: multiply by the mask. Backward: multiply by the same mask, kept or computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rate: float, draw: Draw, stream: str, places: tuple[Tensor, ...], saves_mask: bool
    ) -> Tensor:
        ctx.place = (rate, draw, stream, places)
        mask = kept(*ctx.place)
        if saves_mask:
            ctx.save_for_backward(mask)
        return (x * mask).mul_(1 / (1 - rate))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors or (kept(*ctx.place),)
        return (grad * mask).mul_(1 / (1 - ctx.place[0])), None, None, None, None, None


def kept(rate: float, draw: Draw, stream: str, places: tuple[Tensor, ...]) -> Tensor:
    """bool B and one dim for each of `places`, the global indices along it: False with probability `rate`."""
    device = places[0].device
    digest = hashlib.sha256(f"{draw.seed}/{draw.step}/{stream}".encode()).digest()
    key, *keys = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 32, 4))
    words = _mix(draw.rows_B.to(device) ^ key)
    *outer, last_F = (_mix(place ^ key) for place, key in zip(places, keys, strict=False))
    for word in outer:
        words = _mix(words[..., None] ^ word)
    # Words of 32 bits from here on, which wrap around as they should; the last dim is where the work is.
    words_M, last_F = words.flatten().int(), last_F.int()
    mask_MF = torch.empty(len(words_M), len(last_F), dtype=torch.bool, device=device)
    step = max(1, (_ON_A_DEVICE if words_M.is_cuda else _CACHED) // len(last_F))
    buffer_MF, spare_MF = (mask_MF.new_empty((min(step, len(words_M)), len(last_F)), dtype=torch.int32) for _ in "ab")
    for words_m, mask_mF in zip(torch.split(words_M, step), torch.split(mask_MF, step), strict=True):
        mixed_mF, shifted_mF = buffer_MF[: len(words_m)], spare_MF[: len(words_m)]
        torch.bitwise_xor(words_m[:, None], last_F, out=mixed_mF)
        for _ in range(2):
            torch.bitwise_right_shift(mixed_mF, 16, out=shifted_mF)
            mixed_mF.bitwise_xor_(shifted_mF.bitwise_and_(0xFFFF)).mul_(_FACTOR)
        torch.bitwise_right_shift(mixed_mF, 16, out=shifted_mF)
        mixed_mF.bitwise_xor_(shifted_mF.bitwise_and_(0xFFFF))
        torch.ge(mixed_mF, int(rate * 2**32) - 2**31, out=mask_mF)
    return mask_MF.view(*words.shape, len(last_F))


def _mix(word: Tensor) -> Tensor:
    """A 32-bit finaliser (Mueller's): each input bit flips each output bit with probability near one half."""
    # int64 holds the words, for torch has no unsigned arithmetic; products are cut back to 32 bits.
    word = word & _WORD
    for _ in range(2):
        word = ((word >> 16) ^ word) * _FACTOR & _WORD
    return (word >> 16) ^ word
