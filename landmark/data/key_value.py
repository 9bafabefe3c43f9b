"""Key-value pairs: definitions, then the same keys in another order, each followed by its value, the answer.

    Qk
    %t
    ==
    %t
    Qk

With few definitions in a block, the answer to a query is in another block (the task of the second reproduction of the
paper). With tokenizer=bytes every line is three tokens: a block of 3 holds one definition, a block of 15 five.
"""

from collections.abc import Iterator

import numpy as np

from landmark.data.synthetic_data import Piece, Prompt, SyntheticData, encode, largest, too_short
from landmark.data.tokenizers import Tokenizer
from landmark.utils.constants import ANSWER_WEIGHT

LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEYS = "".join(chr(code) for code in range(ord("!"), ord("~") + 1) if chr(code) not in f"{LETTERS}=")
QUERIES = "==\n"


class KeyValue(SyntheticData):
    """Synthetic data with key-value pairs.

    Values are lower-case letters, keys other printable characters except `=`. A text defines a key only once.
    answer_weight: weight of the loss of a query's value. Definitions and keys cannot be predicted and have no loss; the
    rest has the weight 1.
    """

    name = "key_value"

    def __init__(self, answer_weight: float = ANSWER_WEIGHT):
        self.answer_weight = answer_weight
        self.sample_settings = {"answer_weight": answer_weight, "version": 6}
        self.prompt_settings = {"version": 4}

    def sample(self, rng: np.random.Generator, length: int) -> Iterator[Piece]:
        """Pieces of a text: definitions, then queries for all of them in random orders until the text is full.

        There are at least two definitions, and at most as many as leave room for one query; the logarithm of their
        number is uniform. So definitions are asked for near and far.
        """
        line = len("Qk\n")
        room = min(len(KEYS), (length - len(QUERIES)) // line - 1)
        pairs = _pairs(rng, int(2 * (max(2, room + 1) / 2) ** rng.random()))
        yield from _definitions(pairs)
        written = len(QUERIES) + line * len(pairs)
        while written < length:
            for number in rng.permutation(len(pairs)):
                key, value = pairs[number]
                yield key, 0.0
                yield value, self.answer_weight
                yield "\n", 1.0
            written += line * len(pairs)

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """One query after as many definitions as fit into `length` tokens, at most one for each key."""
        pairs = _pairs(rng, len(KEYS))
        asked = rng.random()

        def pieces(count: int) -> list[Piece]:
            key = pairs[int(asked * count)][0]
            return [*_definitions(pairs[:count]), (key, 0.0)]

        def tokens(count: int) -> np.ndarray:
            return encode(pieces(count), tokenizer)[0]

        count = largest(lambda count: len(tokens(count)) <= length, len(pairs))
        if count == 0:
            raise too_short(self.name, length, len(tokens(1)))
        return Prompt(tokens(count), pairs[int(asked * count)][1])

    def answered(self, text: str, answer: str) -> bool:
        """The text begins with the value."""
        return text[:1] == answer


def _pairs(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    keys = rng.permutation(list(KEYS))[:count]
    return [(str(key), LETTERS[rng.integers(len(LETTERS))]) for key in keys]


def _definitions(pairs: list[tuple[str, str]]) -> Iterator[Piece]:
    for key, value in pairs:
        yield f"{key}{value}", 0.0
        yield "\n", 1.0
    yield QUERIES, 1.0
