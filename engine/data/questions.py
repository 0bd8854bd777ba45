"""Multiple-choice questions as rows: each choice is a document of its own behind its question, packed like others.

Q questions, C choices of all of them, N documents of all rows; as many as choices, in another order.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.data.format import Choice
from engine.data.rows import Array, Rows

FILE = "questions.npz"


@dataclass(frozen=True)
class Questions:
    """What a model is asked, and what is right."""

    rows: Rows
    choices_N: Array
    """Which choice each document of the rows is."""
    bounds: Array
    """Choices of question q are those from `bounds[q]` to `bounds[q + 1]`."""
    answers_Q: Array
    """Which of its choices is right, from 0."""
    characters_C: Array
    """Of each choice, without what stands between it and the question."""
    lines_Q: Array
    left_out: int
    """Questions that are longer than a row, and not asked."""

    def __len__(self) -> int:
        return len(self.answers_Q)

    def in_order(self, values_N: Array) -> Array:
        """Numbers of documents as those of choices, question after question."""
        values_C = np.empty_like(values_N)
        values_C[self.choices_N] = values_N
        return values_C


@dataclass
class Notebook:
    """Takes down what `Questions` knows besides its rows, question after question."""

    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    answers: array[int] = field(default_factory=lambda: array("q"))
    characters: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))

    def add(self, example: Choice) -> None:
        self.bounds.append(self.bounds[-1] + len(example.choices))
        self.answers.append(example.answer)
        self.characters.extend(map(len, example.choices))
        self.lines.append(example.line)

    def write(self, folder: Path, *, left_out: int) -> None:
        np.savez(
            folder / FILE,
            bounds=np.array(self.bounds),
            answers_Q=np.array(self.answers),
            characters_C=np.array(self.characters),
            lines_Q=np.array(self.lines),
            left_out=np.array(left_out),
        )


def opened(folder: Path, rows: Rows, choices_N: Array) -> Questions:
    """What a `Notebook` wrote there, with its rows."""
    with np.load(folder / FILE) as kept:
        told = {name: kept[name] for name in kept.files}
    return Questions(rows, choices_N, **told | {"left_out": int(told["left_out"])})
