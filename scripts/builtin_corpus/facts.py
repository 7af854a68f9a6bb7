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


def draw_topic(random: Random) -> Topic:
    """Any topic; half of them are from families with an open number of subjects."""
    family = random.random()
    if family < 0.12:
        return NAME
    if family < 0.55:
        return random.choice(FIXED)
    if family < 0.75:
        return random.choice(_person_topics(words.name_of(random, words.PEOPLE)))
    if family < 0.93:
        return _thing_topic(words.thing(random))
    return _colour_topic(words.thing(random))


def _choice(pool: tuple[str, ...]) -> Draw:
    return lambda random: random.choice(pool)


def _person(random: Random) -> str:
    return words.name_of(random, words.PEOPLE)


def _pet(random: Random) -> str:
    return words.name_of(random, words.PETS)


def _city(random: Random) -> str:
    return words.invented_name(random) if random.random() < 0.15 else random.choice(words.CITIES)


def _treat(random: Random) -> str:
    return random.choice(random.choice((words.FOODS, words.FRUITS, words.DRINKS, words.SPORTS)))


NAME = Topic(
    key="name",
    statement="your name is {v}",
    unknown="your name",
    tells=(
        "my name is {v}",
        "my name is {v}",
        "my name's {v}",
        "I am {v}",
        "I'm {v}",
        "call me {v}",
        "please call me {v}",
        "you can call me {v}",
        "the name is {v}",
        "hi, I am {v}",
        "hello, my name is {v}",
        "hi, I'm {v}",
        "hey, my name is {v}",
        "{v} is my name",
        "remember that my name is {v}",
    ),
    asks=(
        "what is my name",
        "what is my name",
        "what's my name",
        "what was my name",
        "who am I",
        "do you know my name",
        "do you remember my name",
        "do you know who I am",
        "can you tell me my name",
        "tell me my name",
        "say my name",
        "what am I called",
        "how am I called",
        "what did I say my name was",
        "what did I tell you about my name",
        "my name",
    ),
    draw=_person,
    thanks="Nice to meet you",
)


def _called(who: str, draw: Draw, pet: bool) -> Topic:
    tells: tuple[str, ...] = (
        f"my {who} is called {{v}}",
        f"my {who} is called {{v}}",
        f"my {who}'s name is {{v}}",
        f"the name of my {who} is {{v}}",
        f"remember that my {who} is called {{v}}",
        f"my {who} is named {{v}}",
        f"I have a {who} called {{v}}",
        f"I have a {who} named {{v}}",
        f"this is my {who}, {{v}}",
        f"I call my {who} {{v}}",
    )
    if pet:
        tells += (f"I got a {who}, it is called {{v}}", f"we have a {who}. its name is {{v}}")
    else:
        tells += (f"{{v}} is my {who}", f"{{v}} is the name of my {who}")
    return Topic(
        key=f"{who} called",
        statement=f"your {who} is called {{v}}",
        unknown=f"what your {who} is called",
        tells=tells,
        asks=(
            f"what is my {who} called",
            f"what is my {who} called",
            f"what is my {who}'s name",
            f"what's my {who}'s name",
            f"what is the name of my {who}",
            f"what's the name of my {who}",
            f"how is my {who} called",
            f"what do I call my {who}",
            f"what was the name of my {who}",
            f"do you know what my {who} is called",
            f"do you remember my {who}'s name",
            f"do you remember the name of my {who}",
            f"tell me the name of my {who}",
            f"who is my {who}",
            f"my {who}'s name",
        ),
        draw=draw,
        about=f"my {who}",
    )


def _favourite(what: str, draw: Draw) -> Topic:
    spelt = what.replace("colour", "color")
    return Topic(
        key=f"favourite {what}",
        statement=f"your favourite {what} is {{v}}",
        unknown=f"your favourite {what}",
        tells=(
            f"my favourite {what} is {{v}}",
            f"my favourite {what} is {{v}}",
            f"my favorite {spelt} is {{v}}",
            f"remember that my favourite {what} is {{v}}",
            f"the {what} I like best is {{v}}",
            f"well, {{v}} is my favourite {what}",
            f"I like {{v}}, it is my favourite {what}",
        ),
        asks=(
            f"what is my favourite {what}",
            f"what is my favourite {what}",
            f"what is my favorite {spelt}",
            f"what's my favourite {what}",
            f"what's my favorite {spelt}",
            f"which {what} do I like best",
            f"do you remember my favourite {what}",
            f"do you know my favourite {what}",
            f"tell me my favourite {what}",
            f"my favourite {what}",
        ),
        draw=draw,
        about=f"my favourite {what}",
    )


def _number(what: str, fewest: int, most: int) -> Topic:
    return Topic(
        key=what,
        statement=f"your {what} is {{v}}",
        unknown=f"your {what}",
        tells=(
            f"my {what} is {{v}}",
            f"my {what} is {{v}}",
            f"the {what} is {{v}}",
            f"remember my {what}: {{v}}",
            f"remember that my {what} is {{v}}",
            f"note my {what}, it is {{v}}",
            f"please remember my {what}, {{v}}",
            f"I have the {what} {{v}}",
        ),
        asks=(
            f"what is my {what}",
            f"what is my {what}",
            f"what's my {what}",
            f"what is the {what}",
            f"what was my {what}",
            f"do you know my {what}",
            f"do you remember my {what}",
            f"tell me my {what}",
            f"give me my {what}",
            f"my {what}",
        ),
        draw=lambda random: words.digits(random, fewest, most),
        about=f"my {what}",
        thanks="Noted",
    )


def _clock(what: str, verb: str) -> Topic:
    base = verb.removesuffix("s")
    return Topic(
        key=f"{what} {verb}",
        statement=f"your {what} {verb} at {{v}}",
        unknown=f"when your {what} {verb}",
        tells=(
            f"my {what} {verb} at {{v}}",
            f"my {what} {verb} at {{v}}",
            f"the {what} {verb} at {{v}}",
            f"remember that my {what} {verb} at {{v}}",
            f"my {what} is at {{v}}",
            f"I have a {what} at {{v}}",
        ),
        asks=(
            f"when does my {what} {base}",
            f"when does my {what} {base}",
            f"when does the {what} {base}",
            f"at what time does my {what} {base}",
            f"what time does my {what} {base}",
            f"what time is my {what}",
            f"when is my {what}",
            f"do you remember when my {what} {verb}",
        ),
        draw=words.time_of_day,
        about=f"my {what}",
        thanks="Noted",
    )


def _date(what: str, draw: Draw) -> Topic:
    return Topic(
        key=f"{what} on",
        statement=f"your {what} is on {{v}}",
        unknown=f"when your {what} is",
        tells=(
            f"my {what} is on {{v}}",
            f"my {what} is on {{v}}",
            f"I have my {what} on {{v}}",
            f"remember that my {what} is on {{v}}",
            f"the {what} is on {{v}}",
        ),
        asks=(
            f"when is my {what}",
            f"when is my {what}",
            f"when's my {what}",
            f"when do I have my {what}",
            f"on which day is my {what}",
            f"do you remember when my {what} is",
            f"do you know when my {what} is",
        ),
        draw=draw,
        about=f"my {what}",
        thanks="Noted",
    )


def _person_topics(name: str) -> tuple[Topic, ...]:
    """What can be said of somebody who is not here."""
    return (
        Topic(
            key=f"{name} lives",
            statement=f"{name} lives in {{v}}",
            unknown=f"where {name} lives",
            tells=(
                f"{name} lives in {{v}}",
                f"my friend {name} lives in {{v}}",
                f"my sister {name} lives in {{v}}",
                f"my brother {name} lives in {{v}}",
                f"remember that {name} lives in {{v}}",
                f"{name} moved to {{v}}",
            ),
            asks=(
                f"where does {name} live",
                f"where does {name} live",
                f"in which city does {name} live",
                f"do you know where {name} lives",
            ),
            draw=_city,
            names_somebody=True,
        ),
        Topic(
            key=f"{name} likes",
            statement=f"{name} likes {{v}}",
            unknown=f"what {name} likes",
            tells=(
                f"{name} likes {{v}}",
                f"my friend {name} likes {{v}}",
                f"my sister {name} likes {{v}}",
                f"my brother {name} likes {{v}}",
                f"remember that {name} likes {{v}}",
                f"{name} loves {{v}}",
            ),
            asks=(
                f"what does {name} like",
                f"what does {name} like",
                f"what does {name} love",
                f"do you know what {name} likes",
            ),
            draw=_treat,
            names_somebody=True,
        ),
        Topic(
            key=f"{name} works",
            statement=f"{name} works as {{v}}",
            unknown=f"what {name} does for a living",
            tells=(
                f"{name} works as {{v}}",
                f"{name} is {{v}}",
                f"my friend {name} is {{v}}",
                f"remember that {name} works as {{v}}",
            ),
            asks=(
                f"what does {name} do for a living",
                f"what is {name}'s job",
                f"what does {name} work as",
                f"what does {name} do",
            ),
            draw=words.job,
            names_somebody=True,
        ),
        Topic(
            key=f"{name} old",
            statement=f"{name} is {{v}} years old",
            unknown=f"how old {name} is",
            tells=(f"{name} is {{v}} years old", f"{name} is {{v}}", f"{name} turned {{v}}"),
            asks=(f"how old is {name}", f"how old is {name}", f"what age is {name}"),
            draw=lambda random: str(random.randint(2, 99)),
            names_somebody=True,
        ),
    )


def _thing_topic(what: str) -> Topic:
    return Topic(
        key=f"the {what} lies",
        statement=f"the {what} is {{v}}",
        unknown=f"where the {what} is",
        tells=(
            f"the {what} is {{v}}",
            f"remember that the {what} is {{v}}",
            f"I put the {what} {{v}}",
            f"I left the {what} {{v}}",
            f"my {what} is {{v}}",
            f"you will find the {what} {{v}}",
        ),
        asks=(
            f"where is the {what}",
            f"where is the {what}",
            f"where's the {what}",
            f"where is my {what}",
            f"where did I put the {what}",
            f"where did I leave the {what}",
            f"do you know where the {what} is",
            f"where can I find the {what}",
        ),
        draw=words.spot,
        about=f"the {what}",
        thanks="I will remember it",
    )


def _colour_topic(what: str) -> Topic:
    return Topic(
        key=f"{what} colour",
        statement=f"your {what} is {{v}}",
        unknown=f"what colour your {what} is",
        tells=(
            f"my {what} is {{v}}",
            f"I have a {{v}} {what}",
            f"I bought a {{v}} {what}",
            f"the colour of my {what} is {{v}}",
        ),
        asks=(
            f"what colour is my {what}",
            f"what color is my {what}",
            f"which colour is my {what}",
            f"which colour has my {what}",
        ),
        draw=_choice(words.COLOURS),
        thanks="I will remember it",
    )


def _secret(what: str) -> Topic:
    return Topic(
        key=what,
        statement=f"the {what} is {{v}}",
        unknown=f"the {what}",
        tells=(
            f"the {what} is {{v}}",
            f"the {what} is {{v}}",
            f"remember that the {what} is {{v}}",
            f"remember the {what}: {{v}}",
            f"my {what} is {{v}}",
        ),
        asks=(
            f"what is the {what}",
            f"what is the {what}",
            f"what's the {what}",
            f"what was the {what}",
            f"tell me the {what}",
            f"what is my {what}",
            f"do you remember the {what}",
            f"do you know the {what}",
        ),
        draw=words.secret,
        about=f"the {what}",
        thanks="I will remember it",
    )


_SINGLE = (
    Topic(
        key="lives",
        statement="you live in {v}",
        unknown="where you live",
        tells=(
            "I live in {v}",
            "I live in {v}",
            "I am living in {v}",
            "my home is in {v}",
            "I moved to {v}",
            "remember that I live in {v}",
        ),
        asks=(
            "where do I live",
            "where do I live",
            "which city do I live in",
            "in which city do I live",
            "where is my home",
            "do you know where I live",
            "do you remember where I live",
        ),
        draw=_city,
        about="my home",
    ),
    Topic(
        key="born",
        statement="you were born in {v}",
        unknown="where you were born",
        tells=("I was born in {v}", "I was born in {v}", "my place of birth is {v}"),
        asks=("where was I born", "in which city was I born", "what is my place of birth"),
        draw=_city,
    ),
    Topic(
        key="from",
        statement="you come from {v}",
        unknown="where you come from",
        tells=("I come from {v}", "I am from {v}", "I'm from {v}", "my home country is {v}"),
        asks=(
            "where do I come from",
            "where am I from",
            "which country do I come from",
            "what is my home country",
        ),
        draw=_choice(words.COUNTRIES),
    ),
    Topic(
        key="works",
        statement="you work as {v}",
        unknown="what you do for a living",
        tells=("I work as {v}", "I am {v}", "I'm {v}", "by profession I am {v}"),
        asks=(
            "what is my job",
            "what's my job",
            "what do I do for a living",
            "what do I work as",
            "what is my profession",
        ),
        draw=words.job,
        about="my job",
    ),
    Topic(
        key="old",
        statement="you are {v} years old",
        unknown="how old you are",
        tells=("I am {v} years old", "I'm {v} years old", "my age is {v}", "I am {v}"),
        asks=("how old am I", "how old am I", "what is my age", "do you know how old I am"),
        draw=lambda random: str(random.randint(4, 99)),
        about="my age",
    ),
    Topic(
        key="hobby",
        statement="your hobby is {v}",
        unknown="your hobby",
        tells=("my hobby is {v}", "my hobby is {v}", "as a hobby I do {v}"),
        asks=("what is my hobby", "what's my hobby", "which hobby do I have"),
        draw=_choice(words.HOBBIES),
        about="my hobby",
    ),
    Topic(
        key="plays",
        statement="you play the {v}",
        unknown="what you play",
        tells=("I play the {v}", "I can play the {v}", "I am learning the {v}"),
        asks=("what do I play", "which instrument do I play", "what instrument do I play"),
        draw=_choice(words.INSTRUMENTS),
    ),
    Topic(
        key="likes",
        statement="you like {v}",
        unknown="what you like",
        tells=("I like {v}", "I like {v}", "I love {v}", "remember that I like {v}"),
        asks=("what do I like", "what do I like", "what do I love", "do you know what I like"),
        draw=_treat,
    ),
    Topic(
        key="speaks",
        statement="you speak {v}",
        unknown="what you speak",
        tells=("I speak {v}", "I can speak {v}", "my language is {v}"),
        asks=("what do I speak", "which language do I speak", "what language do I speak"),
        draw=_choice(words.LANGUAGES),
    ),
)

FIXED: tuple[Topic, ...] = (
    *_SINGLE,
    *(
        _called(who, _pet, pet=True)
        for who in words.pool("dog cat horse parrot rabbit hamster goldfish turtle boat")
    ),
    *(
        _called(who, _person, pet=False)
        for who in words.pool(
            """sister brother mother father wife husband son daughter friend neighbour boss teacher aunt uncle
    cousin grandmother grandfather doctor girlfriend boyfriend baby"""
        )
    ),
    _favourite("colour", _choice(words.COLOURS)),
    _favourite("food", _choice(words.FOODS)),
    _favourite("fruit", _choice(words.FRUITS)),
    _favourite("drink", _choice(words.DRINKS)),
    _favourite("animal", _choice(words.ANIMALS)),
    _favourite("sport", _choice(words.SPORTS)),
    _favourite("flower", _choice(words.FLOWERS)),
    _favourite("season", _choice((*words.SEASONS, *words.MONTHS))),
    _favourite("day", _choice(words.DAYS)),
    _favourite("city", _city),
    _favourite("number", lambda random: words.digits(random, 1, 4)),
    _favourite("singer", _person),
    _favourite("word", words.secret),
    _number("phone number", 5, 9),
    _number("room number", 2, 4),
    _number("door code", 3, 6),
    _number("pin", 4, 4),
    _number("lucky number", 1, 4),
    _number("ticket number", 4, 7),
    _number("house number", 1, 3),
    _number("locker number", 2, 4),
    _number("code", 3, 6),
    _clock("train", "leaves"),
    _clock("bus", "leaves"),
    _clock("plane", "leaves"),
    _clock("flight", "leaves"),
    _clock("ferry", "leaves"),
    _clock("meeting", "starts"),
    _clock("lesson", "starts"),
    _clock("film", "starts"),
    _clock("party", "starts"),
    _clock("concert", "starts"),
    _date("birthday", words.day_of_year),
    _date("wedding", words.day_of_year),
    _date("holiday", words.day_of_year),
    _date("exam", _choice(words.DAYS)),
    _date("appointment", _choice(words.DAYS)),
    *(_secret(what) for what in words.SECRETS),
)
