"""Words that are counted: the most common words of a list (`cwe`), and the most frequent words of a text (`fwe`)."""

import math
import random
import string
from collections.abc import Sequence

from landmark.data.ruler.question import Material, Question

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
_LETTERS = 6  # of a coded word
_SEED = 42  # by which RULER shuffles coded words, in every sample
_ZETA_2 = math.pi**2 / 6


class CommonWords:
    """The task `cwe`: ten words come 30 times, others 3 times; in less than 4096 tokens 6 times and once.

    A worked example comes first: 40 words, 10 times and 3 times, or 20 words, 3 times and once.
    """

    least = COMMON
    """Fewest different words."""

    def question(self, rng: random.Random, size: int, length: int, material: Material) -> Question:
        """As `Task.question`; size: different words. Where the material has too few, others are random letters."""
        short = length < _SHORT
        example, known = word_list(rng, 20 if short else 40, (3, 1) if short else (10, 3), material.words)
        context, common = word_list(rng, size, (6, 1) if short else (30, 3), material.words)
        worked = LIST.format(context=example) + LIST_ANSWER + numbered(known)
        return Question(f"{worked}\n{LIST.format(context=context)}{LIST_ANSWER}", tuple(common))

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        return numbered(answers)


class FrequentWords:
    """The task `fwe`: words of random letters, the word of rank r in proportion to 1/r²; the first is dots."""

    least = 30
    """Fewest words of the text: the answers come once."""

    def question(self, rng: random.Random, size: int, length: int, material: Material) -> Question:
        """As `Task.question`; size: words of the text. There are length // 50 different ones."""
        different = max(_ANSWERS + 1, length // 50)
        words = [_word(rng) for _ in range(different)]
        while len(set(words)) < different:
            words.append(_word(rng))
        words = sorted(set(words))
        random.Random(_SEED).shuffle(words)
        words[0] = "..."
        counts = [int(size * rank**-2.0 / _ZETA_2) for rank in range(1, different + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(_SEED).shuffle(text)
        return Question(CODED.format(context=" ".join(text)) + CODED_ANSWER, tuple(words[1 : _ANSWERS + 1]))

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        return ", ".join(answers)


def word_list(rng: random.Random, count: int, repeats: tuple[int, int], names: Sequence[str]) -> tuple[str, list[str]]:
    """A numbered, shuffled list of words, and those that are common.

    Args:
        rng: draws the words and their order.
        count: number of different words.
        repeats: how often a common word comes, and another.
        names: words to choose from.
    """
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
    return "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
