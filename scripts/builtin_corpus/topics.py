"""All topics of the corpus, and how a topic is drawn."""

from __future__ import annotations

from random import Random

from scripts.builtin_corpus import words
from scripts.builtin_corpus.facts import Draw, Topic, draw_city, draw_person, draw_pet, one_of
from scripts.builtin_corpus.open_topics import colour_topic, person_topics, thing_topic
from scripts.builtin_corpus.single_topics import NAME, SINGLE


def draw_topic(random: Random) -> Topic:
    """Draw a topic; nearly half of the topics drawn have many possible subjects."""
    family = random.random()
    if family < 0.12:
        return NAME
    if family < 0.55:
        return random.choice(FIXED)
    if family < 0.75:
        return random.choice(person_topics(words.name_of(random, words.PEOPLE)))
    if family < 0.93:
        return thing_topic(words.thing(random))
    return colour_topic(words.thing(random))


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
        unknown_clause=f"what your {who} is called",
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
        unknown_clause=f"your favourite {what}",
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
        unknown_clause=f"your {what}",
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
        unknown_clause=f"when your {what} {verb}",
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
        unknown_clause=f"when your {what} is",
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


def _secret(what: str) -> Topic:
    return Topic(
        key=what,
        statement=f"the {what} is {{v}}",
        unknown_clause=f"the {what}",
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


FIXED: tuple[Topic, ...] = (
    *SINGLE,
    *(
        _called(who, draw_pet, pet=True)
        for who in words.pool("dog cat horse parrot rabbit hamster goldfish turtle boat")
    ),
    *(
        _called(who, draw_person, pet=False)
        for who in words.pool(
            """sister brother mother father wife husband son daughter friend neighbour boss teacher aunt uncle
    cousin grandmother grandfather doctor girlfriend boyfriend baby"""
        )
    ),
    _favourite("colour", one_of(words.COLOURS)),
    _favourite("food", one_of(words.FOODS)),
    _favourite("fruit", one_of(words.FRUITS)),
    _favourite("drink", one_of(words.DRINKS)),
    _favourite("animal", one_of(words.ANIMALS)),
    _favourite("sport", one_of(words.SPORTS)),
    _favourite("flower", one_of(words.FLOWERS)),
    _favourite("season", one_of((*words.SEASONS, *words.MONTHS))),
    _favourite("day", one_of(words.DAYS)),
    _favourite("city", draw_city),
    _favourite("number", lambda random: words.digits(random, 1, 4)),
    _favourite("singer", draw_person),
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
    _date("exam", one_of(words.DAYS)),
    _date("appointment", one_of(words.DAYS)),
    *(_secret(what) for what in words.SECRETS),
)
