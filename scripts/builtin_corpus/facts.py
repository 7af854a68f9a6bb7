"""The facts that a user can tell the built-in model, and the ways to ask for them.

A `Topic` is something that the user can tell, such as the dog's name. It has all sentences that tell the
value, all questions for it, and the one sentence in which the model repeats it. A `Fact` is a topic with a
value. The model always repeats a fact in the same sentence, so finding the value only requires attention to
the right place in the context, not eloquence.

`{v}` stands for the value in `statement` and `tells`. Sentences have no final punctuation. The user says
`tells` and `asks`. The model says `statement`, or "You have not told me" and `unknown_clause`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from zlib import crc32

from scripts.builtin_corpus import words

Draw = Callable[[Random], str]
HELD_OUT_SHARE = 8  # one value in eight of every topic is never used in training


@dataclass(frozen=True)
class Topic:
    key: str
    statement: str  # "your dog is called {v}"
    unknown_clause: str  # "what your dog is called", after "You have not told me"
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    draw: Draw
    about: str = ""  # how the user refers to the subject, such as "my dog"
    thanks: str = "Got it"
    names_somebody: bool = False  # the statement begins with a name, whose spelling must not change


@dataclass(frozen=True)
class Fact:
    topic: Topic
    value: str

    def sentence(self) -> str:
        return self.topic.statement.replace("{v}", self.value)


def is_held_out(fact: Fact) -> bool:
    """Return whether this topic and value belong to the held-out set (letter case is ignored)."""
    pair = f"{fact.topic.key}={fact.value}".lower()
    return crc32(pair.encode()) % HELD_OUT_SHARE == 0


def draw_fact(random: Random, topic: Topic, held_out: bool = False) -> Fact:
    """Draw a value for the topic, from the training values or from the held-out values."""
    for _ in range(400):
        fact = Fact(topic, topic.draw(random))
        if is_held_out(fact) == held_out:
            return fact
    raise LookupError(f"no value of {topic.key!r} with held_out={held_out}")


def one_of(pool: tuple[str, ...]) -> Draw:
    return lambda random: random.choice(pool)


def draw_person(random: Random) -> str:
    return words.name_of(random, words.PEOPLE)


def draw_pet(random: Random) -> str:
    return words.name_of(random, words.PETS)


def draw_city(random: Random) -> str:
    return words.invented_name(random) if random.random() < 0.15 else random.choice(words.CITIES)


def draw_treat(random: Random) -> str:
    return random.choice(random.choice((words.FOODS, words.FRUITS, words.DRINKS, words.SPORTS)))
