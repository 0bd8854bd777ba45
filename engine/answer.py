"""One answer as it grows: a token in, the text that it settles out.

Where texts are cut is decided in characters, and characters are decoded whole: neither half of one nor the beginning of
a stop text is ever given out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.sampling import Chance
from engine.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Said:
    """A token of a text whose chances were asked for."""

    token: int
    offset: int
    """Where it begins in the text, in characters."""
    chance: Chance | None
    """None where nothing stands before it."""


@dataclass(frozen=True)
class Piece:
    """What goes on a text that was given out before."""

    text: str = ""
    said: tuple[Said, ...] = ()
    """The tokens that it begins or goes on with, where their chances were asked for."""
    finish_reason: FinishReason | None = None
    """stop: the model ended, or a stop text came up; length: `max_tokens` or the model's length was reached."""

    def __bool__(self) -> bool:
        return bool(self.text or self.said or self.finish_reason)


class Answer:
    """A continuation. Give it tokens by `push` until it has a `finish_reason`, and `take` what has settled."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        stop_ids: Iterable[int] = (),
        after: Sequence[int] = (),
        offset: int = 0,
    ) -> None:
        """`after` are the ids that the text goes on from, none where it stands alone; `offset` counts what is given out
        before it."""
        self.stops, self.stop_ids, self.offset = tuple(stops), frozenset(stop_ids), offset
        self.count = 0
        """Tokens so far, an ending one included."""
        self.finish_reason: FinishReason | None = None
        self._stream = tokenizer.stream(after=after)
        self._text = ""
        self._given = 0
        """Characters given out."""
        self._said: list[Said] = []
        """Not given out yet."""

    def push(self, token: int, chance: Chance | None = None, *, last: bool = False) -> None:
        """Add a token; it is the `last` that there is room for, or the model's own end may end the answer."""
        assert self.finish_reason is None, "it has ended"
        self.count += 1
        ends = token in self.stop_ids
        if not ends:
            if chance is not None:
                self._said.append(Said(token, len(self._text), chance))
            self._text += self._stream.push(token)
        if ends or last or first_stop(self._text, self.stops, self._given) is not None:
            self._finish("stop" if ends else "length")

    def end(self) -> None:
        """There is no room for a token."""
        self._finish("length")

    def take(self) -> Piece:
        """What has settled since the last time."""
        whole = self.finish_reason is not None
        settled = len(self._text) if whole else len(self._text) - held(self._text[self._given :], self.stops)
        text, self._given = self._text[self._given : settled], settled
        out = [said for said in self._said if whole or said.offset < settled]
        self._said = self._said[len(out) :]
        moved = tuple(Said(said.token, said.offset + self.offset, said.chance) for said in out)
        return Piece(text, moved, self.finish_reason)

    def _finish(self, reason: FinishReason) -> None:
        # A stop text may stand before half a character, which is given out only here.
        self._text += self._stream.finish()
        if (end := first_stop(self._text, self.stops, self._given)) is not None:
            self._text, reason = self._text[:end], "stop"
            self._said = [said for said in self._said if said.offset < end]
        self.finish_reason = reason


def first_stop(text: str, stops: Iterable[str], start: int = 0) -> int | None:
    """Where the first of `stops` begins in `text`, from `start` on; None where none is there."""
    return min((at for stop in stops if (at := text.find(stop, start)) >= 0), default=None)


def held(text: str, stops: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        ),
        default=0,
    )
