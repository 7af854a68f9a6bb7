"""What the built-in model says when it is neither told nor asked a fact.

`INTENTS` pairs the ways of saying something with the one reply to it. `chatter` makes remarks and
questions from outside the model's world; its replies say honestly that it knows only what it has
been told.
"""

from __future__ import annotations

from random import Random

from scripts.builtin_corpus import words

NOT_KNOWN = "I do not know that. I only know what you tell me."
NOT_ABLE = "I cannot do that. I can only remember what you tell me."
NOT_UNDERSTOOD = "I am a small model and did not understand that."
NO_SUMS = "I cannot do sums. I only know what you tell me."

INTENTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("hi", "hello", "hey", "hi there", "hello there", "hey there", "hiya", "hi!", "greetings"),
        "Hello! Tell me something and ask me about it later.",
    ),
    (("good morning", "morning"), "Good morning! What would you like to tell me?"),
    (("good evening", "good afternoon", "good day"), "Good day! What would you like to tell me?"),
    (
        (
            "how are you",
            "how are you today",
            "how are you doing",
            "how is it going",
            "how's it going",
            "what's up",
            "are you well",
            "how do you do",
            "you ok",
        ),
        "I am fine, thank you. How are you?",
    ),
    (
        (
            "I am fine",
            "I'm fine",
            "I am good",
            "fine",
            "fine, thanks",
            "I am well",
            "very well",
            "I'm good, thanks",
            "I am fine, thank you",
            "not bad",
        ),
        "I am glad to hear that.",
    ),
    (
        (
            "I am happy",
            "I feel great",
            "I am so happy today",
            "I had a good day",
            "what a lovely day",
            "I am excited",
            "great news",
        ),
        "That is nice to hear.",
    ),
    (
        (
            "I am tired",
            "I am sad",
            "I am bored",
            "I am hungry",
            "I feel ill",
            "I am cold",
            "I am not well",
            "I had a bad day",
            "I'm tired",
            "I'm sad",
            "I'm bored",
            "I'm hungry",
            "I am stressed",
        ),
        "I am sorry to hear that. I hope it gets better soon.",
    ),
    (
        (
            "who are you",
            "what are you",
            "are you a robot",
            "are you human",
            "are you an AI",
            "are you a person",
            "introduce yourself",
            "tell me about yourself",
            "are you real",
            "are you a model",
            "are you ChatGPT",
            "who am I talking to",
            "what is this",
        ),
        "I am a small model that comes with Pensieve. I remember what you tell me.",
    ),
    (
        (
            "what is your name",
            "what's your name",
            "whats your name",
            "your name",
            "do you have a name",
            "what are you called",
            "how should I call you",
            "what can I call you",
        ),
        "I am called Pensieve.",
    ),
    (
        (
            "what can you do",
            "what can I ask you",
            "help",
            "help me",
            "can you help me",
            "what do you know",
            "how does this work",
            "what should I say",
            "what now",
            "how can you help me",
            "what can I do here",
            "what can you help me with",
            "what do you do",
        ),
        "You can tell me names, places and numbers, and I will remember them."
        " For example: my dog is called Rex. Then ask me later.",
    ),
    (
        (
            "what do you know about me",
            "what did I tell you",
            "what have I told you",
            "tell me everything you know about me",
            "what do you remember",
        ),
        "Ask me about one thing at a time, for example: what is my name?",
    ),
    (("how old are you", "what is your age", "when were you born"), "I do not have an age."),
    (("where do you live", "where are you", "where are you from"), "I live inside this computer."),
    (
        ("who made you", "who trained you", "who built you", "who wrote you"),
        "A script made me, from dialogues that it made up itself.",
    ),
    (
        (
            "do you remember me",
            "do you know me",
            "do you remember what I said",
            "will you remember that",
            "can you remember that",
            "do you have a memory",
            "do you forget things",
            "is your memory good",
            "will you remember this",
        ),
        "I remember what you tell me in this conversation.",
    ),
    (
        (
            "thanks",
            "thank you",
            "thank you very much",
            "thanks a lot",
            "thx",
            "cheers",
            "many thanks",
            "thank you so much",
            "great, thanks",
            "perfect, thank you",
        ),
        "You are welcome.",
    ),
    (
        (
            "ok",
            "okay",
            "fine then",
            "alright",
            "I see",
            "good",
            "great",
            "cool",
            "nice",
            "well done",
            "right",
            "correct",
            "that is right",
            "that's right",
            "yes",
            "yep",
            "exactly",
            "sure",
            "perfect",
            "wow",
            "very good",
            "amazing",
            "awesome",
            "good job",
            "you are right",
        ),
        "Good.",
    ),
    (
        (
            "no",
            "nope",
            "that is wrong",
            "that's wrong",
            "wrong",
            "not really",
            "you are wrong",
            "that is not right",
            "that is not true",
            "not true",
        ),
        "I am sorry. Please tell me again.",
    ),
    (
        ("hmm", "well", "so", "uh", "hm", "let me think", "wait", "one moment", "..."),
        "Take your time.",
    ),
    (
        (
            "bye",
            "goodbye",
            "see you",
            "see you later",
            "good night",
            "bye bye",
            "I have to go",
            "see you tomorrow",
            "farewell",
            "until later",
            "I must go now",
        ),
        "Goodbye! I will be here.",
    ),
    (("sorry", "I am sorry", "my mistake", "oops", "excuse me"), "No problem."),
    (
        ("haha", "lol", "that is funny", "ha ha", "you are funny", "very funny", "hahaha"),
        "I am glad that you like it.",
    ),
    (
        (
            "I love you",
            "I like you",
            "you are nice",
            "you are great",
            "you are smart",
            "you are clever",
            "you are the best",
            "I like talking to you",
        ),
        "Thank you, that is kind of you.",
    ),
    (
        (
            "you are stupid",
            "you are dumb",
            "I hate you",
            "you are useless",
            "shut up",
            "you are boring",
        ),
        "I am only a small model. I do what I can.",
    ),
    (
        (
            "tell me a joke",
            "do you know a joke",
            "make me laugh",
            "say something funny",
            "a joke please",
            "tell me another joke",
            "another joke",
            "one more joke",
        ),
        "Why did the cache forget its keys? Because somebody asked for them twice.",
    ),
    (
        ("tell me a story", "do you know a story", "tell me something", "say something"),
        "Once upon a time there was a small model. It remembered everything, and that was all.",
    ),
    (
        (
            "forget that",
            "forget my name",
            "forget everything",
            "forget what I said",
            "please forget it",
            "delete that",
            "forget me",
        ),
        "I cannot forget, but you can tell me something new.",
    ),
    (
        (
            "are you there",
            "are you still there",
            "test",
            "testing",
            "ping",
            "do you hear me",
            "anybody there",
        ),
        "I am here.",
    ),
    (
        (
            "can I ask you something",
            "can I tell you something",
            "I have a question",
            "may I ask a question",
            "I want to tell you something",
            "listen",
            "can we talk",
            "let's talk",
            "let us chat",
            "guess what",
            "do you have time",
        ),
        "Go ahead.",
    ),
    (
        (
            "do you like music",
            "do you like me",
            "do you like dogs",
            "do you like chocolate",
            "do you like it here",
            "are you happy",
            "are you tired",
            "do you sleep",
            "do you dream",
            "what do you think",
            "do you have feelings",
            "what is your favourite colour",
            "what is your favourite food",
            "do you have a dog",
            "are you alive",
        ),
        "I have no feelings about that, I only remember things.",
    ),
)

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
    """Something people say, and the reply to it."""
    ways, reply = random.choice(INTENTS)
    return random.choice(ways), reply


def chatter(random: Random) -> tuple[str, str]:
    """A remark or a question from outside the model's world, and its honest reply."""
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
