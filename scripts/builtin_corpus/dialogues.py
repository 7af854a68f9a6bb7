"""Generate conversations to train the built-in model, and to examine it.

A conversation is a list of `Exchange`s: a message of the user and the one right reply. The generator
remembers the facts told so far. So the reply to a question is the newest value, or an honest "You have not
told me …". The `distance` is the number of turns from a fact to its question. The turns between them are
small talk, other facts and other questions.

There are two sources of conversations. The fact that an examination asks for never occurs in training
(`facts.is_held_out`):

    conversation(random)             a training conversation of any length, with questions throughout
    examination(random, distance)    filler, one held-out fact, distance - 1 more turns, its question
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from scripts.builtin_corpus import words
from scripts.builtin_corpus.facts import Fact, Topic, draw_fact
from scripts.builtin_corpus.single_topics import NAME
from scripts.builtin_corpus.small_talk import chatter, small_talk
from scripts.builtin_corpus.topics import FIXED, draw_topic

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are Pensieve.",
    "Be kind.",
)


@dataclass(frozen=True)
class Exchange:
    """One turn: the user's words, the right reply, and the values in it that come from memory."""

    user: str
    reply: str
    values: tuple[str, ...] = ()


@dataclass
class _Known:
    """A fact as it was told; the sentence keeps the user's spelling."""

    fact: Fact
    sentence: str
    value: str
    turn: int  # number of the turn with the last mention
    changed: bool  # an older value precedes it


@dataclass
class _Memory:
    """What has been told so far in one conversation."""

    turn: int = 0
    known: dict[str, _Known] = field(default_factory=dict)

    def tell(self, fact: Fact, small_letters: bool) -> _Known:
        sentence, value = fact.sentence(), fact.value
        if small_letters:
            sentence, value = sentence.lower(), value.lower()
        changed = fact.topic.key in self.known
        self.known[fact.topic.key] = known = _Known(fact, sentence, value, self.turn, changed)
        return known

    def some_known(self, random: Random, avoid: str = "") -> _Known | None:
        """Draw a known fact; facts that changed or were last mentioned long ago are likelier."""
        candidates = [known for key, known in self.known.items() if key != avoid]
        if not candidates:
            return None
        ages = [(self.turn - known.turn + 1) * (1 + 2 * known.changed) for known in candidates]
        return random.choices(candidates, weights=ages)[0]

    def unknown_topic(self, random: Random) -> Topic:
        while True:
            topic = draw_topic(random)
            if topic.key not in self.known and not (
                topic.about and any(k.fact.topic.about == topic.about for k in self.known.values())
            ):
                return topic


def system_prompt(random: Random) -> str | None:
    return random.choice(SYSTEM_PROMPTS) if random.random() < 0.25 else None


def conversation(random: Random) -> Iterator[Exchange]:
    """Yield exchanges without end, with a random share of small talk."""
    memory = _Memory()
    chattiness = random.choice((0.05, 0.2, 0.45, 0.75))
    while True:
        memory.turn += 1
        draw = random.random()
        if draw < chattiness:
            yield _aside(random)
        elif draw < chattiness + (1 - chattiness) * 0.4:
            yield _tell_random_facts(random, memory)
        else:
            yield _ask_random_question(random, memory)


def examination(random: Random, distance: int) -> list[Exchange]:
    """Return a conversation that ends with the question for a held-out fact told `distance` turns ago.

    The fact is not mentioned in between. One time in five an older value precedes it.
    """
    while True:
        topic = NAME if random.random() < 0.1 else draw_topic(random)
        try:
            fact = draw_fact(random, topic, held_out=True)
            break
        except LookupError:  # a topic of few values may have no held-out value
            continue
    memory = _Memory()
    exchanges = []

    def filler(turns: int) -> None:
        for _ in range(turns):
            memory.turn += 1
            draw = random.random()
            if draw < 0.35:
                exchanges.append(_aside(random))
            elif draw < 0.75:
                exchanges.append(_tell_random_facts(random, memory, avoid=topic))
            else:
                exchanges.append(_ask_random_question(random, memory, avoid=topic))

    filler(random.randint(0, 3))
    if random.random() < 0.2:
        exchanges.append(
            _exchange_telling(random, memory, [draw_fact(random, topic)], small_letters=False)
        )
        filler(random.randint(0, 2))
    exchanges.append(_exchange_telling(random, memory, [fact], small_letters=random.random() < 0.2))
    filler(distance - 1)
    known = memory.known[topic.key]
    exchanges.append(_exchange_asking(random, known, random.choice(topic.asks)))
    return exchanges


def _aside(random: Random) -> Exchange:
    """Return a turn that leaves no trace in memory."""
    draw = random.random()
    if draw < 0.15:
        return _echo(random)
    said, reply = small_talk(random) if draw < 0.65 else chatter(random)
    return Exchange(_styled(random, said, question=reply.startswith("I do not know")), reply)


def _echo(random: Random) -> Exchange:
    pool = random.choice((words.PEOPLE, words.CITIES, words.THINGS, words.FOODS, words.COLOURS))
    length = random.randint(1, 5)
    text = random.choice(
        (
            " ".join(random.choice(pool) for _ in range(length)),
            " ".join(words.invented_word(random) for _ in range(length)),
            " ".join(words.digits(random, 1, 5) for _ in range(random.randint(1, 3))),
            " ".join(random.choice((words.name_of(random, pool), "and")) for _ in range(length)),
        )
    )
    order = random.choice(("repeat after me", "please repeat", "say after me"))
    return Exchange(f"{order}: {text}", f"You said: {text}", (text,))


def _tell_random_facts(random: Random, memory: _Memory, avoid: Topic | None = None) -> Exchange:
    """Tell one to three facts: new facts, or new values of known facts."""
    facts: list[Fact] = []
    for _ in range(random.choice((1, 1, 1, 1, 2, 3))):
        known = memory.some_known(random) if random.random() < 0.35 else None
        topic = known.fact.topic if known else memory.unknown_topic(random)
        clash = avoid and (topic.key == avoid.key or (avoid.about and topic.about == avoid.about))
        if not clash and all(topic.key != fact.topic.key for fact in facts):
            facts.append(draw_fact(random, topic))
    if not facts:
        return _aside(random)
    told = _exchange_telling(random, memory, facts, small_letters=random.random() < 0.25)
    recalled = memory.some_known(random, avoid=avoid.key if avoid else "")
    if recalled is None or recalled.turn == memory.turn or random.random() > 0.08:
        return told
    recalled.turn = memory.turn
    asked = _exchange_asking(random, recalled, random.choice(recalled.fact.topic.asks))
    return Exchange(
        f"{told.user.rstrip('.!')}. {asked.user}",
        f"{told.reply} {asked.reply}",
        (*told.values, *asked.values),
    )


def _exchange_telling(
    random: Random, memory: _Memory, facts: list[Fact], small_letters: bool
) -> Exchange:
    joint = random.choice((" and ", ", ", ". ", ", and "))
    clauses = []
    for fact in facts:
        clause = random.choice(fact.topic.tells)
        if fact.topic.key in memory.known and random.random() < 0.4:
            clause = _corrected(random, clause)
        clause = clause.replace("{v}", fact.value)
        clauses.append(clause.lower() if small_letters else clause)
    said = joint.join(clauses)
    begins_with_a_name = facts[0].topic.names_somebody or said.startswith(facts[0].value)
    if begins_with_a_name and random.random() < 0.7:
        said = random.choice(("so ", "well, ", "listen, ", "you know, ", "by the way, ")) + said
    known = [memory.tell(fact, small_letters) for fact in facts]
    reply = f"{facts[0].topic.thanks}, {known[0].sentence}."
    for other in known[1:]:
        reply += f" And {other.sentence}."
    return Exchange(
        _styled(random, said, question=False, keep_letters=True),
        reply,
        tuple(each.value for each in known),
    )


def _corrected(random: Random, clause: str) -> str:
    """Return the clause as a correction of an earlier statement."""
    if " is {v}" in clause and random.random() < 0.5:
        return clause.replace(" is {v}", " is now {v}")
    return random.choice(("no, ", "sorry, ", "actually, ", "now ", "but ")) + clause


def _ask_random_question(random: Random, memory: _Memory, avoid: Topic | None = None) -> Exchange:
    """Ask for one or two things, known or not."""
    avoided = avoid.key if avoid else ""
    first = memory.some_known(random, avoided)
    if first is None or random.random() < 0.2:
        return _ask_unknown(random, memory, avoid)
    first.turn = memory.turn
    topic = first.fact.topic
    if topic.about and random.random() < 0.2:
        return _ask_about(random, first)
    if random.random() < 0.06:  # "is my dog called Rex?" is answered with the known value
        other = draw_fact(random, topic).value if random.random() < 0.5 else first.value
        said = f"is it true that {topic.statement.replace('{v}', other).replace('your ', 'my ')}"
        said = said.replace(" you are ", " I am ").replace(" you ", " I ").replace("were", "was")
        return _exchange_asking(random, first, said)
    question = random.choice(topic.asks)
    second = memory.some_known(random, avoided)
    if second is None or second.fact.topic.key == topic.key or random.random() > 0.12:
        return _exchange_asking(random, first, question)
    second.turn = memory.turn
    joint = random.choice((" and ", " and ", "? "))
    asked = _exchange_asking(random, first, question)
    also = _exchange_asking(random, second, random.choice(second.fact.topic.asks))
    return Exchange(
        asked.user.rstrip("?") + joint + also.user,
        f"{asked.reply} {also.reply}",
        (*asked.values, *also.values),
    )


def _ask_about(random: Random, known: _Known) -> Exchange:
    about = known.fact.topic.about
    question = random.choice(
        (
            f"what did I tell you about {about}",
            f"what did I tell you about {about}",
            f"what do you know about {about}",
            f"tell me about {about}",
            f"do you remember {about}",
        )
    )
    if random.random() < 0.3:
        question = random.choice((f"and {about}", f"what about {about}"))
    reply = f"You told me that {known.sentence}."
    return Exchange(_styled(random, question, question=True), reply, (known.value,))


def _ask_unknown(random: Random, memory: _Memory, avoid: Topic | None) -> Exchange:
    topic = random.choice(FIXED) if random.random() < 0.5 else draw_topic(random)
    while (
        topic.key in memory.known
        or (avoid is not None and topic.key == avoid.key)
        or (topic.about and any(k.fact.topic.about == topic.about for k in memory.known.values()))
    ):
        topic = draw_topic(random)
    question = random.choice(topic.asks)
    if topic.about and random.random() < 0.15:
        question = f"what did I tell you about {topic.about}"
    unknown = topic.unknown_clause
    if random.random() < 0.25:
        question, unknown = question.lower(), unknown.lower()
    return Exchange(_styled(random, question, True, True), f"You have not told me {unknown}.")


def _exchange_asking(random: Random, known: _Known, question: str) -> Exchange:
    """Ask for one fact; the reply spells a name as it was told."""
    sentence = known.sentence
    if known.fact.topic.names_somebody:
        question = question.lower() if sentence.islower() else question
        reply = f"You said that {sentence}."
    else:
        reply = f"{sentence[0].upper()}{sentence[1:]}."
    said = _styled(random, question, True, keep_letters=known.fact.topic.names_somebody)
    return Exchange(said, reply, (known.value,))


def _styled(random: Random, said: str, question: bool, keep_letters: bool = False) -> str:
    """Return the words as people type them, with varying capitals, apostrophes and punctuation."""
    if random.random() < 0.05:
        said = random.choice(("please, ", "ok, ", "hey, ", "um, ", "and ", "now, ")) + said
    elif question and random.random() < 0.06:
        said = random.choice(("can you tell me, ", "I forgot, ", "quick question, ")) + said
    said = re.sub(r"\ba (?=[aeiou])", "an ", said)
    letters = random.random()
    if letters < 0.3 and not keep_letters:
        said = said.lower()
    elif letters < 0.75:
        said = said[0].upper() + said[1:]
    if random.random() < 0.1:
        said = said.replace("'", "")
    if said[-1] in "?!.":
        return said
    ending = random.random()
    if question:
        return said + ("?" if ending < 0.75 else "")
    return said + ("." if ending < 0.5 else "!" if ending < 0.6 else "")
