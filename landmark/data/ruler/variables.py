"""Variable tracking (`vt`): a chain of assignments is hidden in noise, and all variables of one value are asked for.

    VAR KWQZA = 12345 … VAR PLOIR = VAR KWQZA … VAR ZZTQM = VAR PLOIR

Random numbers are drawn in the order of RULER's generator. One worked example, with names of three letters, comes
first.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from landmark.data.ruler.question import NOISE, Material, Question

INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "
)
HOPS = 4
_LETTERS, _EXAMPLE_LETTERS = 5, 3  # of a name
_EXAMPLE_LINES = 5  # of noise; RULER's example has as many as make up 500 tokens with its question


@dataclass(frozen=True)
class Variables:
    """The task `vt`. worked: whether an example comes first."""

    worked: bool = True

    @property
    def least(self) -> int:
        """Fewest lines of noise."""
        return 1

    def question(self, rng: random.Random, size: int, length: int, material: Material) -> Question:
        """As `Task.question`; size: lines of noise."""
        worked = ""
        if self.worked:
            example = chain_question(rng, _EXAMPLE_LINES, _EXAMPLE_LETTERS)
            worked = f"{example.text} {' '.join(example.answers)}\n\n"
        found = chain_question(rng, size, _LETTERS)
        return Question(worked + found.text.rstrip(), found.answers, found.evidence)

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        return " ".join(answers)


def chain_question(rng: random.Random, lines: int, letters: int) -> Question:
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
    question = (QUESTION + ANSWER).format(value=value, count=HOPS + 1)
    return Question(f"{INTRODUCTION}{context}{question}", tuple(names), tuple(chain))
