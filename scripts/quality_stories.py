"""Stories of a known probability: one program both writes them and reads them back, so that the entropy of the text,
which no model can beat, is known to the last digit and any text can be scored under the truth.

A story keeps facts that its reader must keep too: who does what, how many apples are left, in which box the lamp is,
in which order a list was read. Wherever the program can go on in several ways it asks for a `Choice`, whose texts are
prefix-free: no text can have been written in two ways, and its probability is the product of those of its choices.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MOST_BOUGHT = 8
MOST_DAYS = 4
SHE = ("Mia", "Lena", "Sofia", "Nora", "Ida", "Clara", "Ruth", "Zoe", "Hanna", "Vera", "Olga", "Tess")
HE = ("Tom", "Ben", "Oscar", "Paul", "Leo", "Max", "Emil", "Jack", "Hugo", "Karl", "Finn", "Victor")
TRAITS = ("young", "clever", "quiet", "cheerful", "brave", "careful", "patient", "funny", "gentle", "proud", "lazy")
JOBS = {  # and what each of them carries about
    "baker": ("rolling pin", "apron", "oven glove"),
    "sailor": ("compass", "rope", "map"),
    "doctor": ("thermometer", "black bag", "notebook"),
    "painter": ("brush", "easel", "palette"),
    "farmer": ("spade", "straw hat", "bucket"),
    "teacher": ("globe", "red pen", "ruler"),
    "tailor": ("needle", "scissors", "thimble"),
    "gardener": ("watering can", "rake", "seed box"),
    "clockmaker": ("lens", "silver watch", "screwdriver"),
    "musician": ("flute", "drum", "songbook"),
}
HOMES = ("near the river", "at the edge of the forest", "above the shop", "by the old mill", "on the hill", "in town")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEATHER = {  # what it is after each
    "sunny": {"sunny": 6.0, "cloudy": 3.0, "windy": 1.0},
    "cloudy": {"sunny": 3.0, "rainy": 4.0, "windy": 3.0},
    "rainy": {"rainy": 5.0, "cloudy": 3.0, "foggy": 2.0},
    "windy": {"sunny": 4.0, "cloudy": 4.0, "rainy": 2.0},
    "foggy": {"foggy": 3.0, "rainy": 3.0, "sunny": 4.0},
}
OUTSIDE = ("park", "lake", "bridge", "orchard", "beach")
INSIDE = ("library", "museum", "station", "theatre")
FRUITS = ("apple", "pear", "plum", "lemon", "orange", "melon", "fig")
GOODS = ("bread", "milk", "salt", "cheese", "rice", "honey", "tea", "soap", "flour", "butter")
LOOKS = (
    "small", "grey", "tired", "hungry", "shiny", "wet", "round", "strange", "lonely", "wild", "dusty", "golden",
    "noisy", "sleepy", "broken", "huge", "pale", "merry", "rough", "tiny", "warm", "muddy", "lucky", "silent",
)  # fmt: skip
ANIMALS = (
    "dog", "cat", "duck", "horse", "goat", "fox", "heron", "mouse", "frog", "swan", "crow", "beetle", "rabbit",
    "pigeon", "hedgehog", "squirrel", "turtle", "snail", "owl", "lizard",
)  # fmt: skip
DOINGS = (
    "watching", "chasing", "hiding behind", "jumping over", "sniffing at", "sitting on", "running from",
    "playing with", "carrying", "sleeping under", "pushing", "guarding", "looking for", "pulling", "waiting beside",
)  # fmt: skip
THINGS = (
    "stone", "leaf", "ball", "boat", "tree", "wall", "shoe", "cart", "branch", "bell", "bench", "lamp", "window",
    "wheel", "barrel", "kite", "fence", "statue", "puddle", "newspaper", "sandwich", "button", "ladder", "feather",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white")
CONTAINERS = ("box", "drawer", "basket", "chest", "cupboard")
MORALS = (
    "A good friend is worth more than gold.",
    "Nothing is lost that somebody remembers.",
    "Tomorrow would be another day.",
    "Small things matter most.",
)


@dataclass(frozen=True)
class Choice:
    """Texts that a story can go on with, and how likely each is. Raises ValueError where one begins another."""

    texts: tuple[str, ...]
    logs: tuple[float, ...]  # natural logarithms of their probabilities
    bounds: tuple[float, ...]  # running sums of the probabilities

    @classmethod
    def of(cls, weights: dict[str, float]) -> Choice:
        for one, other in itertools.permutations(weights, 2):
            if other.startswith(one):
                raise ValueError(f"{one!r} begins {other!r}: a reader could not tell them apart")
        total = sum(weights.values())
        probabilities = [weight / total for weight in weights.values()]
        bounds = tuple(itertools.accumulate(probabilities[:-1]))
        return cls(tuple(weights), tuple(map(math.log, probabilities)), bounds)


class Departure(Exception):  # noqa: N818  # where a text leaves the grammar is a finding, not an error
    """A text that no story goes on with, from character `place` on."""

    def __init__(self, place: int) -> None:
        super().__init__(f"no story goes on like this from character {place} on")
        self.place = place


class Teller(Protocol):
    """Who goes through a story's program: the writer of a new one, or the reader of an old one."""

    def say(self, text: str) -> None:
        """Go on with the only text that is possible."""

    def choose(self, choice: Choice) -> str:
        """Go on with one of several texts, and return it."""


@dataclass
class Writer:
    """Draws every choice."""

    random: random.Random
    pieces: list[str] = field(default_factory=list)
    log_probability: float = 0.0

    def say(self, text: str) -> None:
        self.pieces.append(text)

    def choose(self, choice: Choice) -> str:
        chosen = bisect(choice.bounds, self.random.random())
        self.log_probability += choice.logs[chosen]
        self.pieces.append(choice.texts[chosen])
        return choice.texts[chosen]


@dataclass
class Reader:
    """Finds every choice in a text. Raises Departure where it has none of those that there are."""

    text: str
    place: int = 0
    log_probability: float = 0.0

    def say(self, text: str) -> None:
        if not self.text.startswith(text, self.place):
            raise Departure(self.place + _common(self.text[self.place :], text))
        self.place += len(text)

    def choose(self, choice: Choice) -> str:
        for text, log in zip(choice.texts, choice.logs, strict=True):
            if self.text.startswith(text, self.place):
                self.place += len(text)
                self.log_probability += log
                return text
        rest = self.text[self.place :]
        raise Departure(self.place + max(_common(rest, text) for text in choice.texts))


def write(generator: random.Random, days: int = MOST_DAYS) -> tuple[str, float]:
    """A new story of at most `days` days, and the natural logarithm of its probability."""
    writer = Writer(generator)
    story(writer, days)
    return "".join(writer.pieces), writer.log_probability


def read(text: str) -> float:
    """The natural logarithm of a story's probability. Raises Departure for a text that is no story."""
    reader = Reader(text)
    story(reader)
    if reader.place != len(text):
        raise Departure(reader.place)
    return reader.log_probability


def understood(text: str) -> float:
    """The share of a text, in characters, before it leaves the grammar: 1.0 for a story, or the beginning of one."""
    try:
        read(text)
    except Departure as departure:
        return departure.place / len(text) if text else 0.0
    return 1.0


def story(teller: Teller, days: int = MOST_DAYS) -> None:
    """The program: from the introduction to the moral."""
    hero = teller.choose(ranked(SHE + HE))
    she = hero in SHE
    teller.say(" was a ")
    trait = teller.choose(ranked(TRAITS))
    teller.say(" ")
    job = teller.choose(even(tuple(JOBS)))
    teller.say(" who lived ")
    home = teller.choose(ranked(HOMES))
    teller.say(f". {'Her' if she else 'His'} best friend was ")
    friend = teller.choose(ranked(SHE + HE, without=(hero,)))
    teller.say(".")
    cast = Cast(hero, friend, she, job)
    teller.say(" On ")
    day = DAYS.index(teller.choose(even(DAYS)))
    for left in reversed(range(days)):
        outing(teller, cast)
        EVENTS[teller.choose(ranked(tuple(EVENTS)))](teller, cast)
        if teller.choose(ANOTHER_DAY if left else NO_OTHER_DAY) == " That night ":
            break
        day = (day + 1) % len(DAYS)
        teller.say(DAYS[day])
    farewell(teller, cast)
    teller.say(f" And so the {trait} {job} {home} slept well. ")
    teller.choose(even(MORALS))


@dataclass
class Cast:
    """Who is in a story, and what has happened to them so far."""

    hero: str
    friend: str
    she: bool  # the hero
    job: str
    weather: str = ""
    stock: dict[str, int] = field(default_factory=dict)  # fruits that are left, in the order in which they came
    places: dict[str, str] = field(default_factory=dict)  # where each tool lies

    @property
    def pronoun(self) -> str:
        return "she" if self.she else "he"


def outing(teller: Teller, cast: Cast) -> None:
    teller.say(" it was ")
    odds = tuple(WEATHER[cast.weather].items()) if cast.weather else tuple((name, 1.0) for name in WEATHER)
    cast.weather = teller.choose(weighted(odds))
    teller.say(f", and {cast.hero} went to the ")
    fine = cast.weather in ("sunny", "windy")
    teller.choose(weighted(tuple((place, 4.0 if (place in OUTSIDE) == fine else 0.5) for place in OUTSIDE + INSIDE)))
    teller.say(f". There {cast.pronoun} saw a ")
    for texts, joint in ((LOOKS, " "), (ANIMALS, " that was "), (DOINGS, " a "), (LOOKS, " "), (THINGS, ".")):
        teller.choose(ranked(texts))
        teller.say(joint)


def count(teller: Teller, cast: Cast) -> None:
    """Some fruits are bought, some of them given away: a sum, kept for the end of the story."""
    room = tuple(f"{fruit}s" for fruit in FRUITS if cast.stock.get(fruit, 0) + MOST_BOUGHT < len(NUMBERS))
    if not room:
        teller.say(f" {cast.pronoun} bought nothing.")
        return
    teller.say(f" {cast.pronoun} bought ")
    bought = NUMBERS.index(teller.choose(even(NUMBERS[2 : MOST_BOUGHT + 1])))
    teller.say(" ")
    fruit = teller.choose(ranked(room))[:-1]
    teller.say(f", gave {cast.friend} ")
    given = NUMBERS.index(teller.choose(even(NUMBERS[1:bought])))
    teller.say(f" and kept {NUMBERS[bought - given]}.")
    cast.stock[fruit] = cast.stock.get(fruit, 0) + bought - given


def hide(teller: Teller, cast: Cast) -> None:
    """A tool of the hero's trade is put somewhere: perhaps not for the first time."""
    teller.say(f" {cast.pronoun} put the ")
    tool = teller.choose(ranked(JOBS[cast.job]))
    teller.say(" into the ")
    cast.places[tool] = place(teller, cast.places.get(tool))
    teller.say(".")


def move(teller: Teller, cast: Cast) -> None:
    """The friend moves something that was put somewhere, from where it lay."""
    if not cast.places:
        teller.say(f" {cast.friend} looked for something to tidy up and found nothing.")
        return
    teller.say(f" {cast.friend} took the ")
    tool = teller.choose(even(tuple(cast.places)))
    teller.say(f" out of the {cast.places[tool]} and put it into the ")
    cast.places[tool] = place(teller, cast.places[tool])
    teller.say(".")


def shop(teller: Teller, cast: Cast) -> None:
    """A list of three things, bought in its order or backwards."""
    goods: list[str] = []
    for joint in (" the list said ", ", ", " and "):
        teller.say(joint)
        goods.append(teller.choose(ranked(GOODS, without=tuple(goods))))
    teller.say(f", so {cast.hero} bought the ")
    first = teller.choose(weighted(((goods[0], 0.7), (goods[2], 0.3))))
    last = goods[2] if first == goods[0] else goods[0]
    teller.say(f", the {goods[1]} and at last the {last}.")


def talk(teller: Teller, cast: Cast) -> None:
    teller.say(' "I like ')
    fruit = teller.choose(ranked(tuple(f"{fruit}s" for fruit in FRUITS)))
    teller.say(',"')
    teller.say(" said ")
    speaker = teller.choose(even((cast.hero, cast.friend)))
    teller.say(f'. "I like {fruit} too," said {cast.friend if speaker == cast.hero else cast.hero}.')


EVENTS = {
    " At the market": count,
    " Back at home": hide,
    " Meanwhile": move,
    " In the shop": shop,
    " A little later:": talk,
}


def place(teller: Teller, now: str | None) -> str:
    """A coloured container, another than that of `now`."""
    places = tuple(f"{colour} {container}" for colour in COLOURS for container in CONTAINERS)
    return teller.choose(even(tuple(known for known in places if known != now)))


def farewell(teller: Teller, cast: Cast) -> None:
    """What the hero still has and where it lies: nothing that a good reader does not know."""
    left = [f"{NUMBERS[number]} {fruit}{'s' if number > 1 else ''}" for fruit, number in cast.stock.items()]
    teller.say(f"{cast.hero} counted the fruit: {', '.join(left) or 'there was none'}.")
    for tool, where in cast.places.items():
        teller.say(f" The {tool} was in the {where}.")


@cache
def weighted(odds: tuple[tuple[str, float], ...]) -> Choice:
    return Choice.of(dict(odds))


@cache
def even(texts: tuple[str, ...]) -> Choice:
    return Choice.of(dict.fromkeys(texts, 1.0))


@cache
def ranked(texts: tuple[str, ...], without: tuple[str, ...] = ()) -> Choice:
    """The first is the most likely, by one over its rank, but for some that are left out."""
    return Choice.of({text: 1 / rank for rank, text in enumerate(texts, 1) if text not in without})


ANOTHER_DAY = Choice.of({" On ": 0.6, " That night ": 0.4})
NO_OTHER_DAY = Choice.of({" That night ": 1.0})


def _common(text: str, other: str) -> int:
    """The length of their common beginning."""
    return next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def batch(seed: int, number: int, size: int, days: int = MOST_DAYS) -> list[tuple[str, float]]:
    """`size` stories with their log-probabilities: a function of the seed, the batch's number and `days` alone."""
    generator = random.Random(f"stories {seed} {number}")
    return [write(generator, days) for _ in range(size)]


def total(stories: Iterable[tuple[str, float]]) -> float:
    """The log-probability of independent stories."""
    return math.fsum(log for _, log in stories)


def sizes(stories: Sequence[tuple[str, float]]) -> int:
    """Bytes of some stories."""
    return sum(len(text.encode()) for text, _ in stories)
