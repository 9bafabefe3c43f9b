"""Needles in a haystack: values of keys are hidden in a long text, and some of them are asked for.

    One of the special magic numbers for brave-otter is: 4829173.

The haystack is noise (the same five sentences), an essay, or other needles. Random numbers are drawn in the order of
RULER's generator, so that the same ones make the same text.
"""

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from landmark.data.ruler.question import NOISE, Material, Question

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INTRODUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER = " The special magic {kind} for {query} mentioned in the provided text are"
DEPTHS = [round(100 * number / 39) for number in range(40)]  # percent of an essay's sentences
_SHUFFLE = 42  # RULER shuffles the needles of every sample by this seed


@dataclass(frozen=True)
class Needles:
    """A kind of needle and haystack.

    haystack: what the needles are hidden in. keys: number of keys. values: of each key. queries: keys asked for.
    words: whether keys are words (adjective-noun), else UUIDs. numbers: whether values are numbers of 7 digits, else
    UUIDs.
    """

    haystack: Literal["noise", "essay", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    words: bool = True
    numbers: bool = True

    @property
    def least(self) -> int:
        """Fewest sentences (of an essay: words) of the haystack."""
        return 0 if self.haystack == "essay" else self.keys * self.values

    def question(self, rng: random.Random, size: int, length: int, material: Material) -> Question:
        """A haystack with the needles, and the question for some of their values.

        Args:
            rng: draws everything that is random.
            size: sentences of the haystack; of an essay words.
            length: not used.
            material: keys, and the words of the essay.
        """
        drawn = self.draw(rng, material)
        context, sentences = self.context(rng, drawn, size, material)
        keys = list(drawn)
        asked = [keys[index] for index in rng.sample(range(self.keys), self.queries)]
        question, beginning = self.ask(asked)
        found = [(value, sentences[value]) for key in asked for value in drawn[key]]
        text = f"{self.introduction()}{context}\n{question}{beginning}"
        return Question(text, tuple(value for value, _ in found), tuple(sentence for _, sentence in found))

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        return ", ".join(answers)

    def draw(self, rng: random.Random, material: Material) -> dict[str, list[str]]:
        """Keys with their values."""
        drawn: dict[str, list[str]] = {}
        for _ in range(self.keys):
            key = self._key(rng, material, drawn)
            drawn[key] = [self._value(rng) for _ in range(self.values)]
        return drawn

    def context(
        self, rng: random.Random, drawn: dict[str, list[str]], size: int, material: Material
    ) -> tuple[str, dict[str, str]]:
        """The haystack with the needles in it, and the needle of each value.

        Args:
            rng: draws their places.
            drawn: keys with their values.
            size: sentences of the haystack; of an essay words.
            material: what the haystack is made of.
        """
        sentences = {value: self._needle(key, value) for key, values in drawn.items() for value in values}
        needles = list(sentences.values())
        random.Random(_SHUFFLE).shuffle(needles)
        if self.haystack == "essay":
            return _in_essay(rng, needles, _sentences(" ".join(material.essay[:size]).strip())), sentences
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(self._key(rng, material, drawn), self._value(rng)) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines), sentences

    def lines(self, drawn: dict[str, list[str]]) -> str:
        """All needles and nothing else, a line each."""
        return "\n".join(self._needle(key, value) for key, values in drawn.items() for value in values)

    def introduction(self) -> str:
        """The first sentences of a text."""
        return self._in_number(INTRODUCTION)

    def ask(self, keys: Sequence[str]) -> tuple[str, str]:
        """A question for the values of keys, and the beginning of its answer."""
        query = ", ".join(keys[:-1]) + f", and {keys[-1]}" if len(keys) > 1 else keys[0]
        return self._in_number(QUESTION).replace("{query}", query), self._in_number(ANSWER).replace("{query}", query)

    @property
    def _kind(self) -> str:
        return "numbers" if self.numbers else "uuids"

    def _in_number(self, template: str) -> str:
        """The template with the kind of value, in the singular where one value is asked for."""
        if self.queries * self.values > 1:
            return template.replace("{kind}", self._kind)
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            template = template.replace(plural, singular)
        return template.replace("{kind}", self._kind.removesuffix("s"))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self._kind, key=key, value=value)

    def _key(self, rng: random.Random, material: Material, taken: dict[str, list[str]]) -> str:
        while (key := rng.choice(material.keys) if self.words else _uuid(rng)) in taken:
            pass
        return key

    def _value(self, rng: random.Random) -> str:
        return str(rng.randint(10**6, 10**7 - 1)) if self.numbers else _uuid(rng)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _in_essay(rng: random.Random, needles: Sequence[str], sentences: Sequence[str]) -> str:
    """The essay's sentences with the needles at different depths."""
    places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
    parts, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [" ".join(sentences[last:place]), needle]
        last = place
    return " ".join([*parts, " ".join(sentences[last:])])


@lru_cache(maxsize=4)
def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)
