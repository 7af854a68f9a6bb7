"""Topics with many possible subjects: absent people, and things with a place or a colour."""

from __future__ import annotations

from scripts.builtin_corpus import words
from scripts.builtin_corpus.facts import Topic, draw_city, draw_treat, one_of


def person_topics(name: str) -> tuple[Topic, ...]:
    """Return the topics about an absent person."""
    return (
        Topic(
            key=f"{name} lives",
            statement=f"{name} lives in {{v}}",
            unknown_clause=f"where {name} lives",
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
            draw=draw_city,
            names_somebody=True,
        ),
        Topic(
            key=f"{name} likes",
            statement=f"{name} likes {{v}}",
            unknown_clause=f"what {name} likes",
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
            draw=draw_treat,
            names_somebody=True,
        ),
        Topic(
            key=f"{name} works",
            statement=f"{name} works as {{v}}",
            unknown_clause=f"what {name} does for a living",
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
            unknown_clause=f"how old {name} is",
            tells=(f"{name} is {{v}} years old", f"{name} is {{v}}", f"{name} turned {{v}}"),
            asks=(f"how old is {name}", f"how old is {name}", f"what age is {name}"),
            draw=lambda random: str(random.randint(2, 99)),
            names_somebody=True,
        ),
    )


def thing_topic(what: str) -> Topic:
    return Topic(
        key=f"the {what} lies",
        statement=f"the {what} is {{v}}",
        unknown_clause=f"where the {what} is",
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


def colour_topic(what: str) -> Topic:
    return Topic(
        key=f"{what} colour",
        statement=f"your {what} is {{v}}",
        unknown_clause=f"what colour your {what} is",
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
        draw=one_of(words.COLOURS),
        thanks="I will remember it",
    )
