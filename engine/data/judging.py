"""What becomes of one example under a tokenizer and a row's length: kept, cut or left out, and the ids that it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.data.chat import Encoded, encode_chat, encode_choice, encode_completion, encode_preference
from engine.data.format import Chat, Choice, Completion, Preference
from engine.data.tokens import Ids
from engine.tokenizer import Tokenizer

Fate = Literal["kept", "truncated", "overlong", "untrainable"]
"""overlong: longer than a row, and not to be cut; untrainable: nothing in it would be learned, once cut."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An example in ids."""

    fate: Fate
    parts: tuple[Encoded, ...]
    """One document, the two of a pair, the better one first, or one for each choice. Cut where they are."""
    length: int
    """Ids before anything was cut; of choices, which need not share a row, the longest's."""


def judge(
    tokenizer: Tokenizer,
    example: Chat | Completion | Preference | Choice | Ids,
    *,
    capacity: int,
    truncate: bool,
    learns_all: bool = False,
) -> Judged:
    """Raises InvalidData where the example can't be shown by the tokenizer's template."""
    parts = _encoded(tokenizer, example, learns_all)
    is_asked = isinstance(example, Choice)
    length = (max if is_asked else sum)(len(part.ids) for part in parts)
    if length > capacity:
        # A question that is cut is another one.
        if not truncate or is_asked:
            return Judged("overlong", parts, length)
        parts = _fitted(parts, capacity)
    # Of two answers that are the same once cut, neither is preferred.
    if not all(any(part.trained[1:]) for part in parts) or parts[1:] == parts[:1]:
        return Judged("untrainable", parts, length)
    return Judged("truncated" if length > capacity else "kept", parts, length)


def _encoded(
    tokenizer: Tokenizer, example: Chat | Completion | Preference | Choice | Ids, learns_all: bool
) -> tuple[Encoded, ...]:
    if isinstance(example, Preference):
        return encode_preference(tokenizer, example)
    if isinstance(example, Choice):
        return encode_choice(tokenizer, example)
    if isinstance(example, Ids):
        trained = [True] * len(example.ids) if example.trained is None else example.trained.tolist()
        return (Encoded(example.ids.tolist(), trained),)
    if isinstance(example, Completion):
        encoded = encode_completion(tokenizer, example)
    else:
        encoded = encode_chat(tokenizer, example)
    return (Encoded(encoded.ids, [True] * len(encoded.ids)) if learns_all else encoded,)


def _fitted(parts: Sequence[Encoded], capacity: int) -> tuple[Encoded, ...]:
    """The documents of an example cut so that they fit in a row together: the longest to what the others leave."""
    fitted: dict[int, Encoded] = {}
    left = capacity
    for done, at in enumerate(sorted(range(len(parts)), key=lambda at: len(parts[at].ids))):
        share = min(len(parts[at].ids), left // (len(parts) - done))
        fitted[at] = Encoded(parts[at].ids[:share], parts[at].trained[:share])
        left -= share
    return tuple(fitted[at] for at in range(len(parts)))
