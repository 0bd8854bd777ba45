"""Answers to many requests at once: each step is one pass of the model over all texts that are under way.

A request joins between two steps and leaves when it has ended, whatever the others do (Yu et al. 2022, "iteration-level
scheduling"); a long prompt is read a piece at a time, so that the others' tokens go on coming meanwhile.

N tokens, V vocabulary.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from torch import Tensor

from engine.answer import Answer, Piece, Said
from engine.attention import Cache
from engine.model import Decoder, Extension
from engine.sampling import Sampling, chance, choose
from engine.tokenizer import Tokenizer

TEXTS = 32
"""In one pass."""
PASS_TOKENS = {"cpu": 256, "cuda": 2048}
"""Of prompts in one pass, by kind of device: the others' next tokens wait for them."""

Ids = Annotated[tuple[int, ...], Field(min_length=1)]
Several = Annotated[tuple[str, ...], Field(min_length=1)] | Annotated[tuple[Ids, ...], Field(min_length=1)]


class Refused(ValueError):
    """The request can't be answered as it is; `field` is the one to change."""

    def __init__(self, message: str, *, field: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.field, self.code = field, code


class Request(Sampling):
    """What is asked: to go on with each of some prompts, or to answer in a conversation."""

    id: str
    prompt: str | Ids | Several | None = None
    """One or several, as text or as token ids."""
    messages: tuple[dict[str, Any], ...] | None = None
    """A conversation to answer, rendered with the model's chat template."""
    n: int = Field(1, ge=1)
    """Answers to each prompt. Each has a seed of its own, from `seed` on."""
    echo: bool = False
    """Begin each answer with its prompt."""
    stream: bool = False
    """Say pieces of answers as they come, instead of all at the end."""

    @model_validator(mode="after")
    def asks_one_thing(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set exactly one of prompt and messages")
        if self.echo and self.messages is not None:
            raise ValueError("only a prompt can be echoed")
        return self

    @property
    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        """One at a time."""
        if self.prompt is None:
            return ()
        if isinstance(self.prompt, str):
            return (self.prompt,)
        first = self.prompt[0]
        return (self.prompt,) if isinstance(first, int) else self.prompt  # type: ignore[return-value]


@dataclass(frozen=True)
class Progress:
    """What is new of one request: pieces of its answers, by their number, and in the end how much it took."""

    id: str
    pieces: dict[int, Piece]
    usage: tuple[int, int] | None = None
    """Tokens of its prompts, and generated ones, once it is done."""


@dataclass(frozen=True)
class Failure:
    """The end of a request that could not be answered."""

    id: str
    error: Exception


Report = Progress | Failure


@dataclass(eq=False)
class Work:
    """A request under way."""

    request: Request
    prompts: list[list[int]]
    room: list[int]
    """Tokens that may follow each prompt."""
    answers: dict[int, Answer] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    """Those of its answers that have not ended, and prompts that are being read."""
    offsets: dict[int, list[int]] = field(default_factory=dict)
    """Of echoed prompts whose chances are told: where each token begins in the prompt's text."""
    news: dict[int, list[Piece]] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int:
        """All that it may ever hold at once."""
        return sum(self.request.n * (len(ids) + room) for ids, room in zip(self.prompts, self.room, strict=True))

    @property
    def generated(self) -> int:
        return sum(answer.count for answer in self.answers.values())


@dataclass(eq=False)
class Text:
    """One row of the cache, and the tokens that go into it next."""

    work: Work
    prompt: int
    """Which of the request's."""
    numbers: list[int]
    """The answers that go on from it: all of a prompt's until their first tokens part them, then one."""
    cache: Cache
    pending: list[int]
    randoms: list[Random]
    """One for each answer."""


class Batcher:
    """Answers requests with one model. `admit` them at any time, and `step` for as long as it `is_busy`.

    `report` hears what is new of each request, in the order in which it happens.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        report: Callable[[Report], None],
        *,
        end_ids: Sequence[int] = (),
        cache_bytes: int = 2**31,
    ) -> None:
        """`end_ids` end a text, as the model's configuration says; none: those that the tokenizer has for it.

        Caches take `cache_bytes` at most.
        """
        self.decoder, self.tokenizer, self.report = decoder, tokenizer, report
        self.end_ids = frozenset(end_ids or tokenizer.stop_ids)
        """What ends a continued prompt; an answer in a conversation ends where its turn does, too."""
        self.cache_tokens = max(1, cache_bytes // bytes_of_a_token(decoder))
        """Of all texts, at most."""
        self.pass_tokens = PASS_TOKENS[decoder.device.type]
        self.waiting: deque[Work] = deque()
        self.under_way: dict[str, Work] = {}
        """By request, in the order in which they came."""

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.under_way)

    def admit(self, request: Request) -> None:
        """Take a request, whose answers begin with the next step that has room. Raises Refused where it never can."""
        if any(request.id == work.request.id for work in (*self.waiting, *self.under_way.values())):
            raise Refused("another request has this id", field="id")
        named = "messages" if request.messages is not None else "prompt"
        prompts = list(self._prompts(request))
        room = [self._room(request, ids, named) for ids in prompts]
        work = Work(request, prompts, room)
        if len(prompts) * request.n > TEXTS:
            raise Refused(f"{len(prompts)} prompts with n={request.n} are more than {TEXTS} answers", field="n")
        if work.cache_tokens > self.cache_tokens:
            raise Refused(
                f"the request may take {work.cache_tokens} tokens in all its answers, and there is room for "
                f"{self.cache_tokens}; ask for fewer answers, or set a smaller max_tokens",
                field="max_tokens",
            )
        self.waiting.append(work)

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is still there; nothing more is reported of it."""
        self.under_way.pop(request_id, None)
        self.waiting = deque(work for work in self.waiting if work.request.id != request_id)

    def step(self) -> None:
        """Let every text under way have its next token, and report what came of it."""
        self._begin()
        chosen = list(self._chosen())
        if chosen:
            try:
                logits = self.decoder.extend(
                    [Extension(text.pending[:count], text.cache, every) for text, count, every in chosen]
                )
            except Exception as error:  # such as memory that has run out: the texts of this pass are lost, not others'
                traceback.print_exc(file=sys.stderr)
                for text, _, _ in chosen:
                    self._fail(text.work, error)
                return
            for (text, count, every), logits_NV in zip(chosen, logits, strict=True):
                if self.under_way.get(text.work.request.id) is text.work:
                    self._advance(text, count, logits_NV.cpu(), every=every)
        for work in list(self.under_way.values()):
            self._tell(work)

    # Before

    def _prompts(self, request: Request) -> Iterator[list[int]]:
        if request.messages is not None:
            try:
                yield self.tokenizer.chat(request.messages)
            except ValueError as error:
                raise Refused(
                    f"the model's chat template refuses the conversation: {error}", field="messages"
                ) from error
            return
        for prompt in request.prompts:
            if isinstance(prompt, str):
                try:
                    yield self.tokenizer.prompt(prompt)
                except ValueError as error:
                    raise Refused(str(error), field="prompt") from error
                continue
            vocab = self.decoder.shape.vocab_size
            if strange := [identity for identity in prompt if not 0 <= identity < vocab]:
                raise Refused(f"the model has no token {strange[0]}; ids are from 0 to {vocab - 1}", field="prompt")
            yield list(prompt)

    def _room(self, request: Request, ids: list[int], named: str) -> int:
        longest = self.decoder.shape.max_seq_len
        if not ids:
            raise Refused("the prompt has no tokens; say something", field=named)
        # A text of full length can be looked at, but not gone on with.
        if len(ids) > longest or (len(ids) == longest and request.max_tokens > 0):
            raise Refused(
                f"the prompt has {len(ids)} tokens and the model takes {longest}; shorten the prompt",
                field=named,
                code="context_length_exceeded",
            )
        return min(request.max_tokens, longest - len(ids))

    def _begin(self) -> None:
        """Give the requests that wait a place, in their order, as far as there is room for all that they may become."""
        while self.waiting:
            work = self.waiting[0]
            texts = sum(len(other.prompts) * other.request.n for other in self.under_way.values())
            tokens = sum(other.cache_tokens for other in self.under_way.values())
            if texts + len(work.prompts) * work.request.n > TEXTS or tokens + work.cache_tokens > self.cache_tokens:
                return
            self.waiting.popleft()
            self.under_way[work.request.id] = work
            try:
                for prompt in range(len(work.prompts)):
                    self._open(work, prompt)
            except Exception as error:  # such as memory that has run out
                traceback.print_exc(file=sys.stderr)
                self._fail(work, error)

    def _open(self, work: Work, prompt: int) -> None:
        request, ids = work.request, work.prompts[prompt]
        stop_ids = self.end_ids if request.messages is None else self.end_ids.union(self.tokenizer.stop_ids)
        numbers = list(range(prompt * request.n, (prompt + 1) * request.n))
        given = request.prompts[prompt] if request.echo else ""
        echoed = given if isinstance(given, str) else self.tokenizer.decode(given)
        for number in numbers:
            work.answers[number] = Answer(
                self.tokenizer,
                stops=request.stop,
                stop_ids=stop_ids,
                # The text can be put after the prompt's as it is; what answers a conversation stands alone.
                after=() if request.messages is not None else ids,
                offset=len(echoed),
            )
            if echoed:
                work.news.setdefault(number, []).append(Piece(echoed))
        tells_prompt = request.echo and request.logprobs is not None
        if not work.room[prompt] and not tells_prompt:
            for number in numbers:
                self._end(work, number)
            return
        cache = self.decoder.cache(rows=1, tokens=len(ids) + work.room[prompt])
        randoms = [Random(request.seed + number) for number in range(request.n)]
        if tells_prompt:
            work.offsets[prompt] = offsets(self.tokenizer, ids)
            self._note(work, numbers, [Said(ids[0], 0, None)])
        work.texts.append(Text(work, prompt, numbers, cache, list(ids), randoms))

    def _chosen(self) -> Iterator[tuple[Text, int, bool]]:
        """Which texts get how many of their tokens in this pass, and whether the logits of all of them are wanted."""
        left = self.pass_tokens
        for work in self.under_way.values():
            echoes = work.request.echo and work.request.logprobs is not None
            for text in work.texts:
                if len(text.pending) == 1 and text.cache.length:
                    yield text, 1, False
                elif left:
                    count = min(left, len(text.pending))
                    left -= count
                    yield text, count, echoes

    # After

    def _advance(self, text: Text, count: int, logits_NV: Tensor, *, every: bool) -> None:
        """Take the next tokens from a text's logits, once its prompt has been read."""
        work, request = text.work, text.work.request
        try:
            if every:
                self._note(work, text.numbers, self._prompt_chances(text, count, logits_NV))
            del text.pending[:count]
            if text.pending:
                return
            work.texts.remove(text)
            for number, random in zip(text.numbers, text.randoms, strict=True):
                answer, room = work.answers[number], work.room[text.prompt]
                if not room:
                    self._end(work, number)
                    continue
                logits_V = logits_NV[-1]
                token = choose(logits_V, request, random)
                told = None if request.logprobs is None else chance(logits_V, token, top=request.logprobs)
                answer.push(token, told, last=answer.count + 1 >= room)
                self._take(work, number)
                if answer.finish_reason is None:
                    cache = text.cache if number == text.numbers[-1] else text.cache.copy()
                    work.texts.append(Text(work, text.prompt, [number], cache, [token], [random]))
        except Exception as error:  # what is wrong with one text's logits is nothing to the others
            if not isinstance(error, ValueError):
                traceback.print_exc(file=sys.stderr)
            self._fail(work, error)

    def _prompt_chances(self, text: Text, count: int, logits_NV: Tensor) -> list[Said]:
        """What the model held of the prompt's tokens that these logits foretold."""
        top = text.work.request.logprobs
        assert top is not None
        ids, begins = text.work.prompts[text.prompt], text.work.offsets[text.prompt]
        start = len(ids) - len(text.pending)
        return [
            Said(ids[place + 1], begins[place + 1], chance(logits_V, ids[place + 1], top=top))
            for place, logits_V in zip(range(start, start + count), logits_NV, strict=True)
            if place + 1 < len(ids)
        ]

    def _note(self, work: Work, numbers: Sequence[int], said: Sequence[Said]) -> None:
        for number in numbers:
            work.news.setdefault(number, []).append(Piece(said=tuple(said)))

    def _end(self, work: Work, number: int) -> None:
        work.answers[number].end()
        self._take(work, number)

    def _take(self, work: Work, number: int) -> None:
        if piece := work.answers[number].take():
            work.news.setdefault(number, []).append(piece)

    def _tell(self, work: Work) -> None:
        """Report what is new, and whether that is the end of it."""
        done = not work.texts
        if not done and not (work.request.stream and work.news):
            return
        pieces = {number: joined(news) for number, news in sorted(work.news.items())}
        work.news = {}
        usage = (sum(map(len, work.prompts)), work.generated) if done else None
        if done:
            del self.under_way[work.request.id]
        self.report(Progress(work.request.id, pieces, usage))

    def _fail(self, work: Work, error: Exception) -> None:
        if self.under_way.pop(work.request.id, None) is not None:
            self.report(Failure(work.request.id, error))


def offsets(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Where each of `ids` begins in their text."""
    stream, text, begins = tokenizer.stream(), "", []
    for identity in ids:
        begins.append(len(text))
        text += stream.push(identity)
    return begins


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(said for piece in pieces for said in piece.said),
        next((piece.finish_reason for piece in pieces if piece.finish_reason), None),
    )


def bytes_of_a_token(decoder: Decoder) -> int:
    """What a token of one text takes in its cache."""
    shape = decoder.shape
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * decoder.dtype.itemsize
