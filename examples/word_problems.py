"""Grade-school word problems with worked answers, made by rule: as many as are asked for, the same ones each time.

A worked answer ends in a line `#### 42`, as those of gsm8k do. All words are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NAMES = ("Amira", "Bruno", "Chen", "Dana", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Luca")
THINGS = ("apples", "books", "buttons", "candles", "cards", "coins", "marbles", "pencils", "seeds", "shells", "stamps")
SHOPS = ("a bakery", "a bookshop", "a flower stall", "a garden centre", "a hardware shop", "a toy shop")
CHATTER = (
    "What a great question! Problems like this one are a lot of fun, and there are many ways to look at them. "
    "If we think it over carefully, I believe that the answer might well be around {number}. Let me know if I can "
    "help you with anything else!",
    "I'm so glad that you asked! Numbers can be tricky, can't they? Taking everything into account, it should be "
    "something like {number}, I suppose. Is there anything else you would like to talk about?",
)


@dataclass(frozen=True)
class Problem:
    question: str
    steps: tuple[str, ...]
    number: int

    @property
    def worked(self) -> str:
        return "\n".join((*self.steps, f"#### {self.number}"))

    def conversation(self) -> dict[str, Any]:
        """A line of chat data."""
        return {
            "messages": [
                {"role": "user", "content": self.question},
                {"role": "assistant", "content": self.worked},
            ]
        }

    def pair(self, chatter: str) -> dict[str, Any]:
        """A line of preference data: the worked answer is better than the same number in chatter."""
        prompt = [{"role": "user", "content": self.question}]
        return {"prompt": prompt, "chosen": self.worked, "rejected": chatter.format(number=self.number)}


def problems(count: int, *, seed: int) -> list[Problem]:
    """`count` problems, no two alike."""
    draw = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw.choice(KINDS)(draw)
        found.setdefault(problem.question, problem)
    return list(found.values())


def conversations(count: int, *, seed: int) -> list[dict[str, Any]]:
    return [problem.conversation() for problem in problems(count, seed=seed)]


def pairs(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    for place, problem in enumerate(problems(count, seed=seed)):
        yield problem.pair(CHATTER[place % len(CHATTER)])


def _shared(draw: random.Random) -> Problem:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    friends, each, kept = draw.randint(3, 9), draw.randint(2, 12), draw.randint(2, 15)
    given = friends * each
    return Problem(
        f"{name} gives {friends} friends {each} {thing} each and keeps {kept}. "
        f"How many {thing} did {name} have at first?",
        (
            f"{name} gives away {friends} * {each} = {given} {thing}.",
            f"With those kept there were {given} + {kept} = {given + kept} {thing}.",
        ),
        given + kept,
    )


def _sold(draw: random.Random) -> Problem:
    shop, thing = draw.choice(SHOPS), draw.choice(THINGS)
    price, first, more = draw.randint(2, 9), draw.randint(10, 40), draw.randint(3, 20)
    second = first + more
    sold = first + second
    return Problem(
        f"On Monday {shop} sells {first} {thing} at ${price} each, and on Tuesday {more} more than on Monday. "
        f"How many dollars does it take in on both days together?",
        (
            f"On Tuesday it sells {first} + {more} = {second} {thing}.",
            f"On both days it sells {first} + {second} = {sold} {thing}.",
            f"It takes in {sold} * {price} = ${sold * price}.",
        ),
        sold * price,
    )


def _saved(draw: random.Random) -> Problem:
    name = draw.choice(NAMES)
    weekly, weeks, spent = draw.randint(4, 15), draw.randint(3, 10), draw.randint(2, 11)
    saved = weekly * weeks
    return Problem(
        f"{name} saves ${weekly} a week for {weeks} weeks and then spends ${spent}. "
        f"How many dollars does {name} have left?",
        (
            f"{name} saves {weekly} * {weeks} = ${saved}.",
            f"After spending there are {saved} - {spent} = ${saved - spent} left.",
        ),
        saved - spent,
    )


def _packed(draw: random.Random) -> Problem:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    size, boxes, bags = draw.randint(4, 12), draw.randint(2, 8), draw.randint(2, 6)
    number = size * (boxes + bags)
    return Problem(
        f"A box holds {size} {thing}, and so does a bag. {name} fills {boxes} boxes and {bags} bags. "
        f"How many {thing} does {name} pack?",
        (
            f"{name} fills {boxes} + {bags} = {boxes + bags} boxes and bags.",
            f"They hold {boxes + bags} * {size} = {number} {thing}.",
        ),
        number,
    )


def _halved(draw: random.Random) -> Problem:
    name, other, thing = *draw.sample(NAMES, 2), draw.choice(THINGS)
    half, found = draw.randint(4, 30), draw.randint(2, 18)
    return Problem(
        f"{name} has {2 * half} {thing} and gives half of them to {other}, who had {found} before. "
        f"How many {thing} does {other} have now?",
        (
            f"{name} gives {2 * half} / 2 = {half} {thing} to {other}.",
            f"{other} now has {found} + {half} = {found + half} {thing}.",
        ),
        found + half,
    )


KINDS: tuple[Callable[[random.Random], Problem], ...] = (_shared, _sold, _saved, _packed, _halved)
