"""Which choice a model holds likeliest behind each question, and how often that is the right one.

Q questions, C choices of all of them, N documents of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from engine.data.loader import Loader
from engine.data.questions import Questions
from engine.data.rows import Array
from engine.events import Choices
from engine.loss import vocab_loss
from engine.passes import Passes
from engine.tally import Tally


def log_likelihoods(
    questions: Questions, passes: Passes, loader: Loader, over_ranks: Callable[[Tensor], list[float]]
) -> Array:
    """C fp64: of each choice the summed log-probability of its tokens. Every rank calls this together.

    `loader` deals the questions' rows out, and `over_ranks` sums over all ranks what those of the last stage have.
    """
    decoder = passes.decoder
    tally = Tally.of(loader.rows, decoder.context, decoder.device)
    # Under dpo a batch is of pairs, and these are none.
    criterion, was_training = decoder.criterion, decoder.training
    decoder.criterion = vocab_loss
    decoder.eval()
    for batch, parts in passes.losses(loader.sweep()):
        tally.add(batch, parts)
    decoder.train(was_training)
    decoder.criterion = criterion
    losses_N = np.array(over_ranks(tally.sums)).reshape(2, -1)[0, :-1]
    return questions.in_order(-losses_N)


def answered(questions: Questions, log_likelihoods_C: Array, *, step: int) -> Choices:
    """How often the right choice is the likeliest: by itself, and for each of its characters."""
    correct = right(questions, log_likelihoods_C)
    normalized = right(questions, log_likelihoods_C / questions.characters_C)
    return Choices(
        step=step,
        questions=len(questions),
        correct=correct,
        correct_normalized=normalized,
        accuracy=correct / len(questions),
        accuracy_normalized=normalized / len(questions),
        left_out=questions.left_out,
    )


def right(questions: Questions, scores_C: Array) -> int:
    """Questions whose right choice has the highest score; of equals the first has, and of what is no number none."""
    each = _by_question(questions, scores_C)
    return sum(bool(np.isfinite(own).all()) and int(np.argmax(own)) == answer for own, answer in each)


def unanswered(questions: Questions, log_likelihoods_C: Array) -> list[int]:
    """Lines of the questions of which a choice has no finite log-likelihood; they count as answered wrong."""
    finite = (np.isfinite(own).all() for own, _ in _by_question(questions, log_likelihoods_C))
    return [int(line) for line, is_finite in zip(questions.lines_Q, finite, strict=True) if not is_finite]


def _by_question(questions: Questions, values_C: Array) -> Iterator[tuple[Array, int]]:
    for start, stop, answer in zip(questions.bounds[:-1], questions.bounds[1:], questions.answers_Q, strict=True):
        yield values_C[start:stop], int(answer)
