"""The model's replies to messages that neither tell nor ask a fact.

`small_talk` draws from `intents.py`. `chatter` draws remarks and questions about other things, with replies
that say honestly that the model knows only what it has been told.
"""

from __future__ import annotations

from random import Random

from scripts.builtin_corpus import words
from scripts.builtin_corpus.intents import INTENTS, NO_SUMS, NOT_ABLE, NOT_KNOWN, NOT_UNDERSTOOD

_CLOCK_QUESTIONS = (
    "what time is it",
    "what day is it today",
    "what is the date",
    "what year is it",
    "what is the weather like",
    "will it rain tomorrow",
    "how is the weather",
    "what is the news",
)
_VERBS = words.pool(
    """bought sold found saw lost liked painted cleaned carried fixed made broke wanted got"""
)
_TIMES = (
    "today",
    "yesterday",
    "this morning",
    "last week",
    "on Monday",
    "at noon",
    "again",
    "last night",
    "this evening",
    "",
)
_ADJECTIVES = words.pool("big small old new nice funny strange heavy cheap lovely wonderful")


def small_talk(random: Random) -> tuple[str, str]:
    """Draw something people say, and the reply to it."""
    ways, reply = random.choice(INTENTS)
    return random.choice(ways), reply


def chatter(random: Random) -> tuple[str, str]:
    """Draw a remark or a question about something that the model cannot know, and its honest reply."""
    return random.choice((_remark, _remark, _question, _question, _order, _sum, _noise))(random)


def _remark(random: Random) -> tuple[str, str]:
    time = random.choice(_TIMES)
    thing, animal = random.choice(words.THINGS), random.choice(words.ANIMALS)
    adjective = random.choice(_ADJECTIVES)
    remark = random.choice(
        (
            f"I {random.choice(_VERBS)} a {adjective} {thing} {time}",
            f"we {random.choice(_VERBS)} a {thing} {time}",
            f"I went to {random.choice(words.CITIES)} {time}",
            f"we went to the {random.choice(words.SPOTS)} {time}",
            f"I had {random.choice(words.FOODS)} for dinner {time}",
            f"there was a {adjective} {animal} in the {random.choice(words.SPOTS)} {time}",
            f"I saw a {animal} {time}",
            f"it is raining {time}",
            "it is raining",
            "the sun is shining",
            "it is cold outside",
            f"the {thing} is {adjective}",
            f"that {thing} was {adjective}",
            f"{random.choice(words.PEOPLE)} came to see me {time}",
            f"I talked to {random.choice(words.PEOPLE)} {time}",
            f"I have to go to the {random.choice(words.SPOTS)} {time}",
            f"I will play {random.choice(words.SPORTS)} {time}",
            f"I am reading a {adjective} book {time}",
            f"I need a new {thing}",
            f"I do not like {random.choice(words.FOODS)}",
            f"{random.choice(words.FRUITS)} are {adjective}",
            "I am going to work now",
            "I just got up",
            "I am having a coffee",
            "work was hard today",
            "the bus was late again",
        )
    )
    return remark.strip(), "I see."


def _question(random: Random) -> tuple[str, str]:
    country, city = random.choice(words.COUNTRIES), random.choice(words.CITIES)
    animal, food = random.choice(words.ANIMALS), random.choice(words.FOODS)
    question = random.choice(
        (
            f"what is the capital of {country}",
            f"who is the president of {country}",
            f"how many people live in {city}",
            f"how far is it to {city}",
            f"how do I cook {food}",
            f"how do I get to {city}",
            f"what do {animal}s eat",
            f"how big is a {animal}",
            f"why do people like {food}",
            f"what is a {animal}",
            f"what is a {random.choice(words.THINGS)}",
            f"what does {words.invented_word(random)} mean",
            f"how much is a {random.choice(words.THINGS)}",
            f"who invented the {random.choice(words.THINGS)}",
            f"is {food} healthy",
            f"when was {city} built",
            "why is the sky blue",
            "what is the meaning of life",
            "who won the match",
            "how tall is the highest mountain",
            "what is love",
            random.choice(_CLOCK_QUESTIONS),
            random.choice(_CLOCK_QUESTIONS),
        )
    )
    return question, NOT_KNOWN


def _order(random: Random) -> tuple[str, str]:
    order = random.choice(
        (
            f"write a poem about {random.choice(words.FLOWERS)}",
            f"write me a letter to {random.choice(words.PEOPLE)}",
            f"translate {random.choice(words.SECRET_VALUES)} into {random.choice(words.LANGUAGES)}",
            f"draw a {random.choice(words.ANIMALS)}",
            "sing me a song",
            "sing a song",
            "write a program",
            "write some code",
            f"open the {random.choice(words.THINGS)}",
            "turn on the light",
            f"call {random.choice(words.PEOPLE)}",
            f"buy a {random.choice(words.THINGS)}",
            "play some music",
            "count to ten",
            "search the web",
        )
    )
    return order, NOT_ABLE


def _sum(random: Random) -> tuple[str, str]:
    first, second = random.randint(0, 99), random.randint(0, 99)
    sign = random.choice(("+", "-", "*", "plus", "minus", "times"))
    question = random.choice((f"what is {first} {sign} {second}", f"{first} {sign} {second}"))
    return question, NO_SUMS


def _noise(random: Random) -> tuple[str, str]:
    noise = random.choice(
        (
            " ".join(words.invented_word(random) for _ in range(random.randint(1, 4))),
            "".join(random.choice("asdfghjkl") for _ in range(random.randint(3, 9))),
            "".join(random.choice("!?.,;:-_+*#") for _ in range(random.randint(1, 5))),
            "".join(random.choice("äöüßéñçλπ中文日本😀🎉👍") for _ in range(random.randint(1, 4))),
            words.digits(random, 1, 6),
        )
    )
    return noise, NOT_UNDERSTOOD
