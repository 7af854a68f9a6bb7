"""The words of the built-in model's dialogues, and a source of invented words.

A part of the names, passwords and things is invented (`invented_word`), so that the model must copy them
instead of choosing from a list that it has learned.
"""

from __future__ import annotations

from random import Random


def pool(words: str) -> tuple[str, ...]:
    """Split a string of words at its spaces."""
    return tuple(words.split())


PEOPLE = pool(
    """Anna Bob Alice Tom Emma Jack Lena Max Mia Paul Nina Oscar Sara Leo Julia Felix Clara Simon Laura
    David Eva Peter Maria John Lucy Martin Sophie Daniel Kate Adam Helen Robert Jane Mark Rosa Henry
    Olga Victor Irene Frank Grace Hugo Ida Ivan Linda Karl Nora Louis Mary Nick Olivia Omar Pia
    Ralph Ruth Sam Tina Tim Ursula Walter Vera Will Yara Zoe Ahmed Aisha Akira Amir Anton Astrid Ben
    Bianca Boris Bruno Carla Carlos Cecilia Chen Chris Cora Dana Diana Diego Dora Edgar Elena Elias
    Ella Eric Ernst Esther Fatima Fiona Fred Gina George Greta Hanna Hans Harry Heidi Igor Ines
    Isabel Ingrid James Jan Jasmin Joe Jonas Jorge Judith Kai Karin Kim Kofi Lars Lea Leila Liam
    Lily Lisa Lola Luca Luis Magda Marco Marta Matt Mei Michael Milan Mona Nadia Naomi Nils Noah
    Otto Pablo Paula Petra Philip Priya Rachel Raj Ravi Rita Roman Rosie Sandra Sergio Sofia Stella
    Steve Sven Tanja Teresa Theo Thomas Toni Ulrich Uma Valentin Wanda Wei William Xavier Yusuf
    Yvonne Zara Aaron Amanda Andrew Barbara Brian Charlie Dennis Edward Gabriel Ian Kevin Margaret
    Nathan Patrick Richard Susan Tiffany"""
)
PETS = pool(
    """Rex Bello Fluffy Luna Rocky Bella Buddy Coco Daisy Duke Felix Ginger Jerry Kitty Lucky Milo Minka
    Mimi Molly Nemo Oreo Pepper Poppy Rusty Sandy Shadow Simba Smokey Snowy Socks Spot Teddy Tiger
    Toby Whiskers Ziggy Bandit Biscuit Blacky Bruno Cookie Dusty Fido Flash Fritz Goldie Honey
    Lassie Max Mickey Monty Nala Patch Pluto Pongo Pumpkin Ruby Sammy Scout Snoopy Storm Sunny Tom
    Waldo Wolfie Ace Apollo Archie Barney Bear Bingo Casper Chester Hazel Jasper Leo Maggie Oscar
    Penny Romeo Rosie Sasha Sparky Stella Zeus"""
)
CITIES = pool(
    """Berlin Paris London Rome Madrid Vienna Oslo Athens Dublin Lisbon Prague Warsaw Helsinki Stockholm
    Copenhagen Brussels Amsterdam Budapest Zurich Geneva Munich Hamburg Cologne Milan Naples Venice
    Florence Turin Barcelona Seville Valencia Porto Lyon Marseille Nice Bordeaux Glasgow Edinburgh
    Manchester Liverpool Oxford Cambridge Bristol Leeds Boston Chicago Denver Seattle Dallas Austin
    Miami Atlanta Houston Toronto Montreal Vancouver Ottawa Havana Lima Quito Bogota Santiago Tokyo
    Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Manila Jakarta Sydney Melbourne
    Perth Auckland Cairo Tunis Lagos Nairobi Accra Dakar Tehran Istanbul Ankara Moscow Kiev Riga
    Vilnius Tallinn Sofia Bucharest Belgrade Zagreb Bern Basel Graz Salzburg Bergen Malmo Turku
    Ghent Bruges Rotterdam Utrecht Krakow Brno Leipzig Dresden Bonn Bremen"""
)
COUNTRIES = pool(
    """Germany France Italy Spain Portugal Austria Norway Sweden Finland Denmark Poland Greece Ireland
    Iceland England Scotland Wales Belgium Hungary Romania Bulgaria Serbia Croatia Turkey Russia
    Ukraine Egypt Morocco Kenya Ghana Nigeria Ethiopia Canada Mexico Cuba Brazil Argentina Chile
    Peru Colombia Japan China India Korea Vietnam Thailand Indonesia Australia Malaysia Nepal Iran
    Iraq Israel Jordan Lebanon Switzerland Holland Estonia Latvia Lithuania"""
)
JOBS = pool(
    """baker teacher doctor nurse farmer cook driver painter singer writer lawyer gardener butcher
    carpenter plumber pilot sailor soldier dentist waiter judge librarian mechanic tailor dancer
    musician photographer scientist student hairdresser postman policeman fireman fisherman miner
    banker clown programmer journalist translator surgeon vet barber chemist physicist"""
)
AN_JOBS = ("actor", "architect", "artist", "astronaut", "author", "engineer", "electrician")
COLOURS = pool(
    """red blue green yellow black white brown grey orange purple pink violet silver gold turquoise beige
    crimson scarlet olive indigo"""
)
FOODS = pool(
    """pizza pasta rice soup bread cheese cake chocolate salad sushi curry fish chicken potatoes noodles
    beans tomatoes pancakes eggs toast sausages lasagne risotto goulash dumplings tacos paella stew
    porridge waffles lentils mushrooms spinach butter honey popcorn burgers"""
)
FRUITS = pool(
    """apples pears plums cherries bananas oranges lemons grapes melons peaches apricots figs dates mangoes
    kiwis strawberries raspberries blueberries pineapples"""
)
DRINKS = pool("tea coffee water milk juice lemonade cocoa beer wine cider cola")
ANIMALS = pool(
    """lion elephant giraffe wolf fox bear owl eagle dolphin whale penguin zebra monkey panda koala otter
    hedgehog squirrel deer swan frog snake spider butterfly camel kangaroo shark"""
)
SPORTS = pool(
    """football tennis swimming running skiing cycling rowing boxing golf hockey basketball climbing
    sailing judo volleyball rugby cricket badminton skating"""
)
HOBBIES = pool(
    """chess reading painting singing dancing gardening cooking knitting hiking fishing photography pottery
    sewing baking drawing writing travelling diving astronomy"""
)
INSTRUMENTS = pool("piano violin guitar flute cello drums trumpet harp organ clarinet saxophone")
LANGUAGES = pool(
    """English German French Italian Spanish Portuguese Russian Polish Greek Turkish Arabic Chinese
    Japanese Korean Hindi Swedish Norwegian Danish Finnish Dutch Hungarian Czech"""
)
FLOWERS = pool("roses tulips lilies daisies violets orchids sunflowers poppies irises")
SEASONS = ("spring", "summer", "autumn", "winter")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = pool(
    """January February March April May June July August September October November December"""
)
THINGS = pool(
    """key book map letter ring lamp box hat coat umbrella camera wallet phone passport ticket bike ladder
    hammer knife spoon cup plate bottle basket bag suitcase guitar ball doll clock mirror picture
    chair table bucket broom torch rope tent blanket pillow scarf glove shoe boot pen pencil
    notebook laptop charger remote treasure gold money present cake medicine"""
)
SPOTS = pool(
    """kitchen garden cellar attic garage bathroom bedroom office hall drawer cupboard car fridge oven box
    basket bag desk shelf wardrobe shed barn library station harbour park forest church school"""
)
UNDER_SPOTS = pool(
    "mat bed sofa table tree stairs carpet chair piano bridge stone pillow roof desk"
)
SECRETS = ("password", "secret word", "magic word", "code word", "answer", "codename", "motto")
SECRET_VALUES = pool(
    """swordfish sesame thunder rainbow dragon marble lantern velvet falcon comet walnut copper pepper
    saffron granite willow ember cobalt harvest meadow pebble cactus magnet rocket puzzle candle
    silver winter anchor button castle pirate island pumpkin whistle feather tiger"""
)

_ONSETS = pool("b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh sk st t tr v w y z")
_VOWELS = pool("a e i o u a e i o ai ee oo ou")
_CODAS = ("", "", "", *pool("n r l s m k t x nd rt sk"))


def known_words() -> tuple[str, ...]:
    """Return every word of the pools; each should have a token of its own."""
    pools = (value for name, value in globals().items() if name.isupper() and name[0] != "_")
    return tuple(sorted({part for pool in pools for word in pool for part in word.split()}))


def invented_word(random: Random) -> str:
    """Invent a pronounceable lower-case word of two or three syllables."""
    syllables = random.choice((2, 2, 3))
    return "".join(
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS)
        for _ in range(syllables)
    )


def invented_name(random: Random) -> str:
    return invented_word(random).capitalize()


def name_of(random: Random, pool: tuple[str, ...]) -> str:
    """Draw a name from the pool or, one time in three, invent a name."""
    return invented_name(random) if random.random() < 0.33 else random.choice(pool)


def digits(random: Random, fewest: int, most: int) -> str:
    return "".join(random.choice("0123456789") for _ in range(random.randint(fewest, most)))


def time_of_day(random: Random) -> str:
    return random.choice(
        (
            f"{random.randrange(24)}:{random.randrange(12) * 5:02d}",
            f"{random.randrange(10, 24)}:{random.randrange(60):02d}",
            f"{random.randint(1, 12)} {random.choice(('am', 'pm'))}",
        )
    )


def day_of_year(random: Random) -> str:
    return f"{random.randint(1, 31)} {random.choice(MONTHS)}"


def job(random: Random) -> str:
    if random.random() < 0.15:
        return f"an {random.choice(AN_JOBS)}"
    return f"a {random.choice(JOBS)}"


def spot(random: Random) -> str:
    if random.random() < 0.35:
        return f"under the {random.choice(UNDER_SPOTS)}"
    return f"in the {random.choice(SPOTS)}"


def secret(random: Random) -> str:
    return invented_word(random) if random.random() < 0.4 else random.choice(SECRET_VALUES)


def thing(random: Random) -> str:
    return invented_word(random) if random.random() < 0.15 else random.choice(THINGS)
