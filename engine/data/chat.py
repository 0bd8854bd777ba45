"""From an example to ids and which of them are learned. Rows are `packing`'s business, ids `engine.tokenizer`'s.

A conversation is rendered and tokenised once, as a whole. Learned is what the model would write: the text from where
the template asks for an assistant's turn to the control token that ends it, as they stand in the whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.data.format import Chat, Choice, Completion, Finding, InvalidData, Preference
from engine.tokenizer import TemplateRefused, Tokenizer, Tokens


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document in ids."""

    ids: list[int]
    trained: list[bool]
    """For each id, whether predicting it counts."""


def encode_completion(tokenizer: Tokenizer, example: Completion) -> Encoded:
    """The prompt as a sampler would send it, then the completion and EOS, which are learned."""
    try:
        prompt = tokenizer.prompt(example.prompt)
        answer = tokenizer.encode(example.completion, follows=bool(example.prompt))
    except ValueError as refused:
        raise InvalidData([Finding(example.line, str(refused))]) from refused
    answer += [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    return Encoded(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def encode_preference(tokenizer: Tokenizer, example: Preference) -> tuple[Encoded, Encoded]:
    """The better answer, then the worse one, each in full behind the prompt; just the answer is learned."""
    chosen, rejected = (
        encode_chat(tokenizer, side) if isinstance(side, Chat) else encode_completion(tokenizer, side)
        for side in (example.chosen, example.rejected)
    )
    return chosen, rejected


def encode_choice(tokenizer: Tokenizer, example: Choice) -> tuple[Encoded, ...]:
    """Each choice in full behind the question, with its own text marked and no end after it: how likely that is counts.

    Behind a text it begins with a space, unless either has white space there.
    """
    if isinstance(example.question, Chat):
        return tuple(_encode_said(tokenizer, example.question, choice) for choice in example.choices)
    # White space belongs to what follows: in most vocabularies a word has the space before it.
    question = example.question.rstrip()
    gap = example.question[len(question) :]
    try:
        prompt = tokenizer.prompt(question)
        texts = [choice if gap == "" and choice[:1].isspace() else (gap or " ") + choice for choice in example.choices]
        said = list(tokenizer.encode_all([(text, True) for text in texts]))
    except ValueError as refused:
        raise InvalidData([Finding(example.line, str(refused))]) from refused
    return tuple(Encoded(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in said)


def _encode_said(tokenizer: Tokenizer, asked: Chat, text: str) -> Encoded:
    """The conversation up to the end of `text`, which its assistant says and which is marked."""
    answer = {"role": "assistant", "content": text}
    chat = Chat(asked.line, (*asked.messages, answer), (*asked.trained, True), asked.tools)
    tokens, marked, ((start, end),) = _rendered_tokens(tokenizer, chat)
    place = marked.rfind(text.strip(), start, end)
    if place < 0:
        problem = "the base's chat template does not show a choice as it is written; choose another base"
        raise InvalidData([Finding(asked.line, problem)])
    tokens = tokenizer.with_start(tokens)
    trained = _overlaps(tokens.offsets, [(start, place + len(text.strip()))])
    count = len(trained) - trained[::-1].index(True)
    return Encoded(tokens.ids[:count], trained[:count])


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Encoded:
    """The conversation with what its assistant says learned. Raises InvalidData where the template spoils it."""
    tokens, marked, spans = _rendered_tokens(tokenizer, chat)
    if chat.trained[-1] and spans and tokenizer.last_control(marked[spans[-1][0] :]) is None:
        tokens, spans = _ended(tokenizer, tokens, marked, spans)
    tokens = tokenizer.with_start(tokens)
    return Encoded(tokens.ids, _overlaps(tokens.offsets, spans))


def _rendered_tokens(tokenizer: Tokenizer, chat: Chat) -> tuple[Tokens, str, list[tuple[int, int]]]:
    """The whole conversation in ids and marked, and where in it the learned turns lie."""
    try:
        marked, spans = _spans(tokenizer, chat)
        return tokenizer.encode_marked(marked), marked, spans
    except TemplateRefused as refused:
        problem = f"the chat template refuses this conversation: {refused}; change the example or the base"
        raise InvalidData([Finding(chat.line, problem)]) from refused
    except ValueError as refused:
        raise InvalidData([Finding(chat.line, str(refused))]) from refused


def _ended(
    tokenizer: Tokenizer, tokens: Tokens, marked: str, spans: list[tuple[int, int]]
) -> tuple[Tokens, list[tuple[int, int]]]:
    """Under a template that ends a turn with no control token, EOS closes the conversation: else nothing would stop."""
    if tokenizer.eos_id is None:
        return tokens, spans
    end = len(marked)
    closed = Tokens([*tokens.ids, tokenizer.eos_id], [*tokens.offsets, (end, end + 1)])
    return closed, [*spans[:-1], (spans[-1][0], end + 1)]


def _overlaps(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token has a character in a span; both run in order.

    So a token that the text shares with what stands before it is learned: else the text's beginning would not be.
    """
    out, current = [], 0
    for start, end in offsets:
        while current < len(spans) and start >= spans[current][1]:
            current += 1
        out.append(current < len(spans) and max(end, start + 1) > spans[current][0] and end > 0)
    return out


def _spans(tokenizer: Tokenizer, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
    """The whole conversation, marked, and where in it the learned turns lie."""
    if chat.tools and not tokenizer.reads("tools"):
        raise ValueError("the base's chat template does not show tools; remove them, or choose a base that does")
    whole = tokenizer.mark(chat.messages, tools=chat.tools)
    return whole, [_span(tokenizer, chat, whole, at) for at, learned in enumerate(chat.trained) if learned]


def _span(tokenizer: Tokenizer, chat: Chat, whole: str, at: int) -> tuple[int, int]:
    before = _rendered(tokenizer, chat, at, ask=False) if at else ""
    asked = _rendered(tokenizer, chat, at, ask=True)
    last = at + 1 == len(chat.messages)
    after = whole if last else _rendered(tokenizer, chat, at + 1, ask=False)
    end = _agreement(tokenizer, whole, after, at)
    if asked is not None and asked != before and whole.startswith(asked):
        start = len(asked)
    else:
        start = _start_of_text(tokenizer, chat.messages[at], whole, _agreement(tokenizer, whole, before, at), end)
    _check_shown(chat.messages[at], whole[start:end], at)
    closing = tokenizer.last_control(whole[start:end])
    if closing is not None and not whole[start + closing[1] : end].strip():
        end = start + closing[1]
    return start, end


def _rendered(tokenizer: Tokenizer, chat: Chat, count: int, *, ask: bool) -> str | None:
    """The first `count` messages; None where the template can't show so few."""
    try:
        return tokenizer.mark(chat.messages[:count], tools=chat.tools, add_generation_prompt=ask)
    except TemplateRefused:
        return None


def _agreement(tokenizer: Tokenizer, whole: str, part: str | None, at: int) -> int:
    """How far the whole shows what its beginning `part` showed. Only control tokens may differ, at the end."""
    if part is not None and whole.startswith(part):
        return len(part)
    length = next((place for place, (a, b) in enumerate(zip(whole, part or "", strict=False)) if a != b), 0)
    length = next((start for start, end in tokenizer.control_spans(whole) if start < length < end), length)
    if part is None or tokenizer.without_controls(part[length:]).strip():
        raise ValueError(
            f"the chat template shows message {at} or an earlier one differently once the conversation goes on, so "
            "the model would learn what it is never asked; make one conversation of each answer, which ends with it, "
            "or give the earlier answers weight 0"
        )
    return length


def _start_of_text(tokenizer: Tokenizer, message: dict[str, Any], whole: str, begin: int, end: int) -> int:
    """Where the text begins in a turn for which the template does not ask: after a header, if there is one."""
    text = message["content"].strip()
    place = whole.rfind(text, begin, end) if text else -1
    if place < 0:
        found = [stop for _, stop in tokenizer.control_spans(whole[begin:end])]
        return begin + found[0] if len(found) > 1 else begin
    return begin if not whole[begin:place].strip() else place


def _check_shown(message: dict[str, Any], shown: str, at: int) -> None:
    """Raise where the template leaves out what the assistant did: it would be missing from the training in silence."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in shown:
            raise ValueError(
                f"the base's chat template does not show the tool_calls of message {at}; write them as content, "
                "or choose a base whose template does"
            )
    lines = [line for line in message["content"].splitlines() if line.strip()]
    if lines and lines[-1].strip() not in shown:
        raise ValueError(f"the base's chat template does not show the content of message {at}; choose another base")
