"""The tasks of RULER: each makes samples, a long text that ends in a question and the beginning of its answer.

Random numbers are drawn in the order of RULER's generator, so that the same ones make the same text. Needles are values
of keys, which are hidden in a haystack: noise (the same five sentences), an essay, or other needles::

    One of the special magic numbers for brave-otter is: 4829173.
"""

import math
import random
import re
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from landmark.experiment.data.ruler.material import NOISE, Material

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INTRODUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER = " The special magic {kind} for {query} mentioned in the provided text are"
DEPTHS = [round(100 * number / 39) for number in range(40)]  # percent of an essay's sentences
_SHUFFLE = 42  # RULER shuffles needles and coded words of every sample by this seed
CHAIN_INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
CHAIN_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
CHAIN_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "
)
HOPS = 4
_NAME_LETTERS, _EXAMPLE_LETTERS = 5, 3  # of a variable
_EXAMPLE_LINES = 5  # of noise; RULER's example has as many as make up 500 tokens with its question
COMMON, _ANSWERS = 10, 3  # words asked for: of a list, of a text
LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
LIST_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
CODED_ANSWER = " Answer: According to the coded text above, the three most frequently appeared words are:"
_SHORT = 4096  # tokens, below which words are repeated less often
_WORD_LETTERS = 6  # of a coded word
_ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class Sample:
    """A text, and what the answer must contain. evidence: the parts that state the answers, where single parts do."""

    text: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...] = ()


class Task:
    """A kind of sample."""

    @property
    def least(self) -> int:
        """The smallest size of a text."""
        return 1

    def make(self, rng: random.Random, size: int, length: int, material: Material) -> Sample:
        """A sample, of which `rng` draws everything random. size: of the text, in the task's sentences, lines or words.
        length: tokens of the prompt and its answer together.
        """
        raise NotImplementedError

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        return ", ".join(answers)


@dataclass(frozen=True)
class Needles(Task):
    """A kind of needle and haystack. The size is its sentences; of an essay words. values: of each key. queries: keys
    asked for. words: keys are words (adjective-noun), else UUIDs. numbers: values have 7 digits, else UUIDs.
    """

    haystack: Literal["noise", "essay", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    words: bool = True
    numbers: bool = True

    @property
    def least(self) -> int:
        return 0 if self.haystack == "essay" else self.keys * self.values

    def make(self, rng: random.Random, size: int, length: int, material: Material) -> Sample:
        """A haystack with needles, and a question for some of their values."""
        drawn = self.draw(rng, material)
        context, sentences = self.context(rng, drawn, size, material)
        keys = list(drawn)
        asked = [keys[index] for index in rng.sample(range(self.keys), self.queries)]
        question, beginning = self.ask(asked)
        found = [(value, sentences[value]) for key in asked for value in drawn[key]]
        text = f"{self.introduction()}{context}\n{question}{beginning}"
        return Sample(text, tuple(value for value, _ in found), tuple(sentence for _, sentence in found))

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
        """The haystack of a size with the needles in it, and the needle of each value."""
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


@dataclass(frozen=True)
class Variables(Task):
    """Variable tracking (`vt`): a chain VAR KWQZA = 12345 … VAR PLOIR = VAR KWQZA … in noise, of which all variables
    are asked for. worked: an example comes first, with names of three letters. The size is lines of noise.
    """

    worked: bool = True

    def make(self, rng: random.Random, size: int, length: int, material: Material) -> Sample:
        """A chain in noise, and the question for its names."""
        worked = ""
        if self.worked:
            example = chain_sample(rng, _EXAMPLE_LINES, _EXAMPLE_LETTERS)
            worked = f"{example.text} {' '.join(example.answers)}\n\n"
        found = chain_sample(rng, size, _NAME_LETTERS)
        return Sample(worked + found.text.rstrip(), found.answers, found.evidence)

    def reply(self, answers: Sequence[str]) -> str:
        return " ".join(answers)


def chain_sample(rng: random.Random, lines: int, letters: int) -> Sample:
    """A chain in some lines of noise, and the question for its names, each of so many letters."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(HOPS + 1)]
    while len(set(names)) < HOPS + 1:
        names = list(dict.fromkeys([*names, "".join(rng.choices(string.ascii_uppercase, k=letters))]))
    value = rng.randrange(10000, 99999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    sentences = [f"{NOISE}\n"] * lines
    if len(sentences) <= len(chain):  # too few lines to choose places from: sentences
        parts = [part for line in sentences for part in line.split(".")]
        sentences = [f"{part}." if part.strip() else part for part in parts]
    places = sorted(rng.sample(range(len(sentences)), len(chain)))
    for before, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        sentences.insert(place + before, assignment)
    context = " ".join(sentences).replace(". \n", ".\n")
    question = (CHAIN_QUESTION + CHAIN_ANSWER).format(value=value, count=HOPS + 1)
    return Sample(f"{CHAIN_INTRODUCTION}{context}{question}", tuple(names), tuple(chain))


class CommonWords(Task):
    """The most common words of a list (`cwe`): ten come 30 times, others 3 times; below 4096 tokens 6 times and once. A
    worked example comes first: 40 words, 10 times and 3 times, or 20 words, 3 times and once.
    """

    @property
    def least(self) -> int:
        return COMMON

    def make(self, rng: random.Random, size: int, length: int, material: Material) -> Sample:
        """size: number of different words. Where the material has too few, others are made of random letters."""
        short = length < _SHORT
        example, known = word_list(rng, 20 if short else 40, (3, 1) if short else (10, 3), material.words)
        context, common = word_list(rng, size, (6, 1) if short else (30, 3), material.words)
        worked = LIST.format(context=example) + LIST_ANSWER + numbered(known)
        return Sample(f"{worked}\n{LIST.format(context=context)}{LIST_ANSWER}", tuple(common))

    def reply(self, answers: Sequence[str]) -> str:
        return numbered(answers)


class FrequentWords(Task):
    """The most frequent words of a text (`fwe`), of random letters, rank r in proportion to 1/r²; the first is dots."""

    @property
    def least(self) -> int:
        return 30  # words, of which the answers come once

    def make(self, rng: random.Random, size: int, length: int, material: Material) -> Sample:
        """size: words of the text, of which length // 50 are different."""
        different = max(_ANSWERS + 1, length // 50)
        words = [_word(rng) for _ in range(different)]
        while len(set(words)) < different:
            words.append(_word(rng))
        words = sorted(set(words))
        random.Random(_SHUFFLE).shuffle(words)
        words[0] = "..."
        counts = [int(size * rank**-2.0 / _ZETA_2) for rank in range(1, different + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(_SHUFFLE).shuffle(text)
        return Sample(CODED.format(context=" ".join(text)) + CODED_ANSWER, tuple(words[1 : _ANSWERS + 1]))


def word_list(rng: random.Random, count: int, repeats: tuple[int, int], names: Sequence[str]) -> tuple[str, list[str]]:
    """A shuffled list of `count` words, and the common ones. repeats: how often a common word comes, and another."""
    chosen = rng.sample(list(names), min(count, len(names)))
    chosen += [_word(rng) for _ in range(count - len(chosen))]
    common, others = chosen[:COMMON], chosen[COMMON:]
    words = common * repeats[0] + others * repeats[1]
    rng.shuffle(words)
    return numbered(words), common


def numbered(words: Sequence[str]) -> str:
    """`1. first 2. second …`"""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=_WORD_LETTERS))
