"""Sample from a model, in OpenAI's shapes. A sampler that holds the model does the work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Self

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from api.deps import OwnerDep, ServicesDep
from api.errors import errors
from api.schemas import ChatChoice, ChatCompletionOut, ChatMessageOut, CompletionChoice, CompletionOut, UsageOut
from core import catalog
from core.errors import InvalidRequest, NotFound, Unavailable
from core.keys import Account
from core.services import Services

router = APIRouter(prefix="/v1", tags=["completions"])

PATIENCE_SECONDS = 120.0
"""How long a request may take, all its answers together: the sampler may have to load the model first."""
AT_ONCE = 16
"""Requests of one API process that wait for a sampler; more queue up behind them."""
MAX_TOKENS = 4096


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


Text = Annotated[str, AfterValidator(_whole)]
"""A text that a tokenizer takes; JSON can spell others."""


class Ask(BaseModel):
    """What both kinds share. Options that do not change the answer, such as `user`, are ignored, as OpenAI's are."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    model: str = Field(min_length=1, max_length=255)
    """Name of a model."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0, le=2)
    """0 always takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    """The same seed gives the same answer."""
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    n: int = Field(1, ge=1, le=8)
    """Answers wanted."""

    stream: NotYet = None
    logprobs: NotYet = None
    top_logprobs: NotYet = None
    echo: NotYet = None
    suffix: NotYet = None
    logit_bias: NotYet = None
    tools: NotYet = None
    response_format: NotYet = None

    def request(self, default_tokens: int) -> dict[str, Any]:
        """What the sampler is told, the prompt aside."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.max_tokens or default_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": [stop for stop in stops if stop],
        }

    def seeds(self) -> list[int]:
        """One for each answer, so that they differ, and with a `seed` can be had again."""
        first = secrets.randbelow(2**31) if self.seed is None else self.seed
        return [(first + index) % 2**63 for index in range(self.n)]


class CompletionAsk(Ask):
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=16)]


class Message(BaseModel):
    role: str = Field(min_length=1, max_length=32)
    content: Text


class ChatAsk(Ask):
    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """OpenAI's newer name of `max_tokens`."""

    @model_validator(mode="after")
    def one_limit(self) -> Self:
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("say max_tokens or max_completion_tokens, not both")
        return self


@router.post("/completions", responses=errors(NotFound, Unavailable))
async def complete(ask: CompletionAsk, owner: OwnerDep, services: ServicesDep, request: Request) -> CompletionOut:
    """Continue a text."""
    prompts = [ask.prompt] if isinstance(ask.prompt, str) else ask.prompt
    requests = [
        {"prompt": prompt, "seed": seed, **ask.request(default_tokens=16)} for prompt in prompts for seed in ask.seeds()
    ]
    answers = await aside(request, partial(sampled, services, owner, ask.model, requests))
    return CompletionOut(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=ask.model,
        choices=[
            CompletionChoice(index=index, text=answer["text"], finish_reason=answer["finish_reason"])
            for index, answer in enumerate(answers)
        ],
        usage=usage(answers),
    )


@router.post("/chat/completions", responses=errors(NotFound, Unavailable))
async def chat(ask: ChatAsk, owner: OwnerDep, services: ServicesDep, request: Request) -> ChatCompletionOut:
    """Answer in a conversation, through the model's chat template."""
    messages = [message.model_dump() for message in ask.messages]
    options = ask.request(default_tokens=ask.max_completion_tokens or 256)
    requests = [{"messages": messages, "seed": seed, **options} for seed in ask.seeds()]
    answers = await aside(request, partial(sampled, services, owner, ask.model, requests))
    return ChatCompletionOut(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=ask.model,
        choices=[
            ChatChoice(
                index=index,
                message=ChatMessageOut(content=answer["text"]),
                finish_reason=answer["finish_reason"],
            )
            for index, answer in enumerate(answers)
        ],
        usage=usage(answers),
    )


async def aside(request: Request, call: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """In a thread apart from the other endpoints': however many wait for a sampler, a submit does not wait for them."""
    return await to_thread.run_sync(call, limiter=request.app.state.sampling)


def sampled(services: Services, owner: Account, model: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sampler's answers, one after the other; no transaction is open while it thinks."""
    with services.db.session() as session:
        # Samplers find models by their rows.
        name = catalog.known(session, owner, model, models=services.settings.models).id
    deadline = time.monotonic() + PATIENCE_SECONDS
    answers = []
    for request in requests:
        left = max(0.001, deadline - time.monotonic())
        answer = services.sampler.ask({"model": name, **request}, timeout=left)
        if "error" in answer:
            raise InvalidRequest(str(answer["error"]), param="model")
        answers.append(answer)
    return answers


def usage(answers: list[dict[str, Any]]) -> UsageOut:
    prompt = sum(answer["prompt_tokens"] for answer in answers)
    completion = sum(answer["completion_tokens"] for answer in answers)
    return UsageOut(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
