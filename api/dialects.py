"""What a sampler says, in OpenAI's two dialects: completions of a text, and answers in a chat."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from pydantic import BaseModel

from api.errors import ErrorDetail
from api.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionOut,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    CompletionChoice,
    CompletionLogprobs,
    CompletionOut,
    TokenLogprob,
    TopLogprob,
    UsageOut,
)
from core.errors import DomainError
from core.sampling import Line

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Heading:
    """What all parts of one answer share."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Self:
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}


class Dialect(Protocol):
    """One of the two."""

    prefix: str
    """Of an answer's id."""

    def whole(self, heading: Heading, line: Line) -> BaseModel:
        """An answer that came in one line."""

    def chunks(self, heading: Heading, choice: Mapping[str, Any], *, begins: bool) -> Iterator[BaseModel]:
        """Frames of a stream for one choice of a line, which is the choice's first where it `begins`.

        One choice in each, as there are clients that look at no other.
        """

    def counted(self, heading: Heading, line: Line) -> BaseModel:
        """The frame that tells what the whole answer took."""


class TextDialect:
    """`/v1/completions`."""

    prefix = "cmpl"

    def whole(self, heading: Heading, line: Line) -> CompletionOut:
        choices = [_text_choice(choice) for choice in line["choices"]]
        return CompletionOut(**heading.fields(), choices=choices, usage=usage(line))

    def chunks(self, heading: Heading, choice: Mapping[str, Any], *, begins: bool) -> Iterator[CompletionOut]:
        yield CompletionOut(**heading.fields(), choices=[_text_choice(choice)])

    def counted(self, heading: Heading, line: Line) -> CompletionOut:
        return CompletionOut(**heading.fields(), choices=[], usage=usage(line))


class ChatDialect:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def whole(self, heading: Heading, line: Line) -> ChatCompletionOut:
        choices = [
            ChatChoice(
                index=choice["index"],
                message=ChatMessageOut(content=choice["text"]),
                finish_reason=choice["finish_reason"],
                logprobs=_chat_logprobs(choice),
            )
            for choice in line["choices"]
        ]
        return ChatCompletionOut(**heading.fields(), choices=choices, usage=usage(line))

    def chunks(self, heading: Heading, choice: Mapping[str, Any], *, begins: bool) -> Iterator[ChatCompletionChunk]:
        index = choice["index"]
        parts = []
        if begins:
            parts.append(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if choice["text"] or choice.get("tokens"):
            delta, logprobs = ChatDelta(content=choice["text"]), _chat_logprobs(choice)
            parts.append(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs))
        if choice["finish_reason"]:
            parts.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=choice["finish_reason"]))
        for part in parts:
            yield ChatCompletionChunk(**heading.fields(), choices=[part])

    def counted(self, heading: Heading, line: Line) -> ChatCompletionChunk:
        return ChatCompletionChunk(**heading.fields(), choices=[], usage=usage(line))


TEXT, CHAT = TextDialect(), ChatDialect()


def usage(line: Line) -> UsageOut:
    prompt, completion = line["usage"]["prompt_tokens"], line["usage"]["completion_tokens"]
    return UsageOut(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def frame(chunk: BaseModel) -> bytes:
    """A server-sent event. ASCII, because some clients split lines at U+2028 as well."""
    return f"data: {json.dumps(chunk.model_dump(mode='json'), separators=(',', ':'))}\n\n".encode("ascii")


def broken(error: DomainError) -> bytes:
    """The last event of a stream that can't go on; the openai client raises it."""
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return f"data: {json.dumps({'error': detail.model_dump()})}\n\n".encode("ascii")


def _text_choice(choice: Mapping[str, Any]) -> CompletionChoice:
    return CompletionChoice(
        index=choice["index"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        logprobs=_text_logprobs(choice.get("tokens")),
    )


def _text_logprobs(tokens: Sequence[Mapping[str, Any]] | None) -> CompletionLogprobs | None:
    if not tokens:
        return None
    return CompletionLogprobs(
        tokens=[_name(token) for token in tokens],
        token_logprobs=[token["logprob"] for token in tokens],
        # Itself last: where it is among the likeliest too, it keeps its place.
        top_logprobs=[
            None if token["logprob"] is None else {_name(one): one["logprob"] for one in (*token["top"], token)}
            for token in tokens
        ],
        text_offset=[token["offset"] for token in tokens],
    )


def _name(token: Mapping[str, Any]) -> str:
    """A token's text, and its bytes where they are no whole characters: several would have the same text."""
    if "\ufffd" not in token["token"]:
        return str(token["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])


def _chat_logprobs(choice: Mapping[str, Any]) -> ChatLogprobs | None:
    if not choice.get("tokens"):
        return None
    return ChatLogprobs(
        content=[
            TokenLogprob(**_chance(token), top_logprobs=[TopLogprob(**_chance(one)) for one in token["top"]])
            for token in choice["tokens"]
        ]
    )


def _chance(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("token", "bytes", "logprob")}
