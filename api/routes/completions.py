"""Sample from a model, in OpenAI's shapes, whole or as a stream. A sampler that holds the model does the work."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from api.deps import OwnerDep, ServicesDep
from api.dialects import CHAT, DONE, TEXT, Dialect, Heading, broken, frame
from api.errors import errors
from api.leaving import ClientLeft, Coming
from api.schemas import ChatCompletionOut, CompletionOut
from api.turns import Turns
from core import catalog
from core.described import Described
from core.errors import ContextTooLong, DomainError, Failed, InvalidModel, NotFound, NotReady, TimedOut
from core.keys import Account
from core.sampling import Line
from core.services import Services

router = APIRouter(prefix="/v1", tags=["completions"])

MAX_TOKENS = 4096
CLIENT_LEFT = 499
"""What nginx calls a request whose client has left; nobody reads it."""


def _left_out(value: object) -> object:
    if value:
        raise ValueError("this is not available here; leave it out")
    return value


NotYet = Annotated[Any, AfterValidator(_left_out)]
"""An option of OpenAI's that would change the answer, so that it is refused rather than ignored."""


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("this text has half of a surrogate pair; write the whole character") from error
    return text


def _said(text: str) -> str:
    if not text:
        raise ValueError("an empty stop text would end every answer at once; leave it out")
    return text


Text = Annotated[str, AfterValidator(_whole)]
"""A text that a tokenizer takes; JSON can spell others."""
One = TypeVar("One")
Several = Annotated[list[One], Field(min_length=1, max_length=16)]
Stop = Annotated[Text, AfterValidator(_said)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
"""A prompt in tokens."""


def _in_words(prompt: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """A union would tell of its first branch alone, and of ids that they must be texts."""
    try:
        return handler(prompt)
    except ValidationError as error:
        if any(found["type"] == "value_error" for found in error.errors()):
            raise
        raise ValueError(
            "say a text, token ids from 0 on, or up to 16 of either; a list has at least one of its kind"
        ) from error


class StreamOptions(Described):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    """Tell in a last frame, without choices, how many tokens it took."""


class Ask(Described):
    """What both kinds share. Options that do not change the answer, such as `user`, are ignored, as OpenAI's are.

    Null is the default everywhere.
    """

    model_config = ConfigDict(strict=True)

    model: str = Field(min_length=1, max_length=255)
    """Name of a model: a base, the result of a job, or one of its checkpoints."""
    temperature: float | None = Field(1.0, ge=0, le=2)
    """0 always takes the likeliest token."""
    top_p: float | None = Field(1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together have this probability."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """The same seed gives the same answer, whoever else is answered meanwhile. The k-th of `n` has the seed plus k."""
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    """Texts that end the answer, and are left out of it."""
    n: int | None = Field(1, ge=1, le=8)
    """Answers wanted."""
    stream: bool | None = False
    """Answer with server-sent events, a frame for each piece of text, and `[DONE]` at last."""
    stream_options: StreamOptions | None = None

    logit_bias: NotYet = None
    frequency_penalty: NotYet = None
    presence_penalty: NotYet = None

    @field_validator("stream_options")
    @classmethod
    def is_for_streams(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("this is for streams; set stream to true, or leave it out")
        return options

    def request(self, max_tokens: int) -> dict[str, Any]:
        """What the sampler is told, the prompt aside."""
        return {
            "max_tokens": max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            # Told apart from any other, and repeatable, also where none was asked for.
            "seed": secrets.randbelow(2**31) if self.seed is None else self.seed,
            "n": self.n or 1,
            "stream": bool(self.stream),
        }


class CompletionAsk(Ask):
    prompt: Annotated[Text | Several[Text] | Ids | Several[Ids], WrapValidator(_in_words)]
    """One or several, as text or as token ids."""
    echo: bool | None = False
    """Begin the text with the prompt."""
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS)
    """0 only looks at the prompt, where `echo` and `logprobs` are set."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """Tell each token's log-probability, and those of so many of the likeliest in its place."""
    best_of: int | None = Field(None, ge=1)
    suffix: NotYet = None

    @field_validator("max_tokens")
    @classmethod
    def gives_some_text(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        if tokens == 0 and not info.data.get("echo"):
            raise ValueError("0 gives no text; say 1 or more, or set echo")
        return tokens

    @field_validator("best_of")
    @classmethod
    def is_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in {None, info.data.get("n") or 1}:
            raise ValueError("another number than n is not available here; leave it out")
        return best_of


def _texts(content: Any) -> Any:
    """The text of content parts, of which no others are taken."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('a part must be {"type": "text", "text": …}; models here read text only')
    return "".join(part["text"] for part in content)


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_texts)]
    """A text, or parts of type `text`."""


class ChatAsk(Ask):
    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Default: 256."""
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = False
    """Tell each token's log-probability."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """And those of so many of the likeliest in its place."""
    tools: NotYet = None
    functions: NotYet = None
    response_format: Any = None
    """Only `{"type": "text"}`."""

    @field_validator("response_format")
    @classmethod
    def is_text(cls, form: Any) -> Any:
        return None if form == {"type": "text"} else _left_out(form)

    @field_validator("max_completion_tokens")
    @classmethod
    def is_the_only_limit(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        if tokens and info.data.get("max_tokens"):
            raise ValueError("say max_tokens or max_completion_tokens, not both")
        return tokens

    @field_validator("top_logprobs")
    @classmethod
    def has_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise ValueError("this needs logprobs; set that to true")
        return top


RAISED = errors(ContextTooLong, InvalidModel, NotFound, NotReady, Failed, TimedOut)
STREAM = "text/event-stream"


@router.post(
    "/completions",
    response_model=CompletionOut,
    responses=RAISED | {200: {"content": {STREAM: {"schema": {"type": "string"}}}}},
)
async def complete(ask: CompletionAsk, owner: OwnerDep, services: ServicesDep, request: Request) -> Any:
    """Continue a text."""
    asked = ask.request(16 if ask.max_tokens is None else ask.max_tokens)
    asked |= {"prompt": ask.prompt, "logprobs": ask.logprobs, "echo": bool(ask.echo)}
    return await answered(TEXT, ask, asked, owner, services, request)


@router.post(
    "/chat/completions",
    response_model=ChatCompletionOut,
    responses=RAISED | {200: {"content": {STREAM: {"schema": {"type": "string"}}}}},
)
async def chat(ask: ChatAsk, owner: OwnerDep, services: ServicesDep, request: Request) -> Any:
    """Answer in a conversation, through the model's chat template."""
    asked = ask.request(ask.max_tokens or ask.max_completion_tokens or 256)
    asked |= {"messages": [message.model_dump() for message in ask.messages]}
    asked |= {"logprobs": (ask.top_logprobs or 0) if ask.logprobs else None}
    return await answered(CHAT, ask, asked, owner, services, request)


async def answered(
    dialect: Dialect, ask: Ask, asked: dict[str, Any], owner: Account, services: Services, request: Request
) -> Any:
    """The whole answer, or a stream of it: what goes wrong before its first line has a status of its own.

    No transaction is open while the sampler thinks.
    """
    model = await to_thread.run_sync(partial(named, services, owner, ask.model))
    heading = Heading.new(dialect.prefix, ask.model)
    turns: Turns = request.app.state.sampling_turns
    lines = turns.lines(owner.project_id, services.sampler.ask({"model": model, **asked}))
    coming = Coming(lines, request, key_id=owner.key_id)
    try:
        first = await coming.next()
    except ClientLeft:
        coming.leave()
        return Response(status_code=CLIENT_LEFT)
    except BaseException:
        coming.leave()
        raise
    if not ask.stream:
        return dialect.whole(heading, first)
    usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(framed(dialect, heading, first, coming, usage=usage), media_type=STREAM, headers=headers)


async def framed(
    dialect: Dialect, heading: Heading, line: Line, coming: Coming, *, usage: bool
) -> AsyncIterator[bytes]:
    """Frames of an answer from its first line on. An error in the midst is one too, and then nothing comes."""
    begun: set[int] = set()
    try:
        while True:
            for choice in line["choices"]:
                for chunk in dialect.chunks(heading, choice, begins=choice["index"] not in begun):
                    yield frame(chunk)
                begun.add(choice["index"])
            if "usage" in line:
                break
            line = await coming.next()
        if usage:
            yield frame(dialect.counted(heading, line))
        yield DONE
    except ClientLeft:
        return
    except DomainError as error:
        yield broken(error)
    finally:
        coming.leave()


def named(services: Services, owner: Account, model: str) -> str:
    """The key by which samplers find the model."""
    with services.db.reading() as session:
        found = catalog.usable(session, catalog.get(session, owner, model, models=services.settings.models))
    if found.key is not None:
        return found.key
    with services.db.session() as session:
        return catalog.adopt(session, owner, found).key
