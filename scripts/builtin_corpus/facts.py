"""What a person can tell the built-in model, and how one asks for it.

A `Topic` is something there can be one fact about ("your dog's name"); it knows every way of
telling it, of asking for it, and the one sentence in which the model says it back. A `Fact` is a
topic with a value. The model always repeats a fact in the same sentence, when it hears it and when
it is asked, so that finding the value is a matter of attending to the right place in the context
and not of eloquence.

`{v}` stands for the value in `statement` and `tells`. Sentences are written without their final
punctuation and from the side of whoever says them: `tells` and `asks` by the person, `statement`
and `unknown` by the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from zlib import crc32

from scripts.builtin_corpus import words

Draw = Callable[[Random], str]
HELD_OUT_SHARE = 8  # one value in eight of every topic is never seen in training


@dataclass(frozen=True)
class Topic:
    key: str
    statement: str  # "your dog is called {v}"
    unknown: str  # "what your dog is called"
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    draw: Draw
    about: str = ""  # "my dog": what the person calls it
    thanks: str = "Got it"
    names_somebody: bool = False  # the statement begins with a name, whose letters must not change


@dataclass(frozen=True)
class Fact:
    topic: Topic
    value: str

    def sentence(self) -> str:
        return self.topic.statement.replace("{v}", self.value)


def is_held_out(fact: Fact) -> bool:
    """Whether this pair of topic and value belongs to the held-out set (letter case ignored)."""
    pair = f"{fact.topic.key}={fact.value}".lower()
    return crc32(pair.encode()) % HELD_OUT_SHARE == 0


def draw_fact(random: Random, topic: Topic, held_out: bool = False) -> Fact:
    """A value for the topic, from the training values or from the held-out ones."""
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
