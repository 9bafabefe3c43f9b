"""Pass keys: a number is hidden in much irrelevant text, and asked for at its end (paper, Figure 3a).

Half of the training windows begin with a prompt in the paper's words: half of these have several labelled keys, and ask
for each. From prompts alone, learning to copy takes very long. So the rest of the window, and the other windows, are
dense: a few labelled keys are stated, and asked for many times in random order, with filler between.
"""

import bisect
import re
from collections.abc import Iterator

import numpy as np

from landmark.experiment.data.synthetic import Piece, Prompt, SyntheticData, TrainingText, encode, filled
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.constants import ANSWER_WEIGHT, DENSE_SHARE, PASSKEY_PROMPTS_VERSION, PASSKEY_VERSION
from landmark.utils.errors import UserError

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there. "
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SENTENCES = [f"{sentence}." for sentence in FILLER.rstrip(". ").split(". ")]
LARGEST = 50_000
LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOST = 4  # labelled keys of a prompt in training
_SPARE = 8  # tokens by which filler that is cut anywhere may exceed its usual number


class Passkey(SyntheticData):
    """needles: keys in a prompt; of several, one is asked for. dense: fraction of training windows that are dense from
    their beginning. answer_weight: of the loss of digits that are in the text before; others have none. generated:
    tokens that a prompt leaves for the answer.
    """

    name = "passkey"

    def __init__(
        self, needles: int = 1, dense: float = DENSE_SHARE, answer_weight: float = ANSWER_WEIGHT, generated: int = 0
    ):
        self.needles, self.dense, self.answer_weight, self.generated = needles, dense, answer_weight, generated
        self.sample_settings = {"dense": dense, "answer_weight": answer_weight, "version": PASSKEY_VERSION}
        self.prompt_settings = {"needles": needles, "version": PASSKEY_PROMPTS_VERSION}

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> TrainingText:
        """Texts one after another, of which only the first may be a prompt."""

        def text(room: int) -> tuple[np.ndarray, np.ndarray]:
            dense = room < length or rng.random() < self.dense
            return encode(self._dense(rng, room), tokenizer) if dense else self._answered(rng, room, tokenizer)

        return filled(length, tokenizer.eot, text)

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt that fills `length` tokens with its answer, or a few less, because filler is added by characters."""
        room = length - self.generated
        needles = _needles(rng, self.needles)
        state = rng.bit_generator.state

        def tokens(filler: int) -> np.ndarray:
            rng.bit_generator.state = state
            return encode(self._prompt(rng, needles, filler), tokenizer)[0]

        if (least := len(tokens(0)) + self.generated) > length:
            raise UserError(f"eval.length={length}: a passkey prompt and its answer need at least {least} tokens")
        filler = bisect.bisect(range(1, 8 * room + 1), room, key=lambda characters: len(tokens(characters)))
        return Prompt(tokens(filler), str(needles[0][1]))

    def score(self, text: str, answer: str) -> float:
        """1 if the first integer of the text is the key, else 0."""
        found = re.search(r"\d+", text)
        return int(found is not None and found.group() == answer)

    def _prompt(self, rng: np.random.Generator, needles: list[tuple[str, int]], filler: int) -> Iterator[Piece]:
        """The paper's prompt with `filler` characters of filler, and the key anywhere among them."""
        yield INTRODUCTION, 1.0
        places = sorted(int(place) for place in rng.integers(0, filler + 1, len(needles)))
        order = rng.permutation(len(needles))
        for place, until, which in zip([0, *places], [*places, filler], [*order, None], strict=True):
            yield (FILLER * (1 + (until - place) // len(FILLER)))[: until - place], 1.0
            if which is not None:
                label, key = needles[which]
                yield f" The pass key{label} is", 1.0
                yield f" {key}", 0.0
                yield ". Remember it.", 1.0
                yield f" {key}", self.answer_weight
                yield f" is the pass key{label}. ", 1.0
        yield _question(needles[0][0]), 1.0

    def _answered(self, rng: np.random.Generator, room: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of a prompt of up to `room` tokens, in which each of its keys is asked for and answered."""
        needles = _needles(rng, 1 if rng.random() < 0.5 else int(rng.integers(2, _MOST + 1)))

        def pieces(filler: int) -> Iterator[Piece]:
            yield from self._prompt(rng, needles, filler)
            for number, (label, key) in enumerate(needles):
                if number:
                    yield _question(label), 1.0
                yield f" {key}", self.answer_weight
                yield ".", 1.0

        while (free := room - _SPARE - len(encode(pieces(0), tokenizer)[0])) < 0 and len(needles) > 1:
            needles.pop()
        filler = free * len(FILLER) // len(tokenizer.encode(FILLER))
        return encode(pieces(int(rng.integers(0, max(1, filler)))), tokenizer)

    def _dense(self, rng: np.random.Generator, length: int) -> Iterator[Piece]:
        labels = rng.permutation(list(LABELS))[: rng.integers(2, 7)]
        keys = {str(label): _key(rng) for label in labels}
        written, untold = 0, list(keys)
        while written < length:
            if untold and (len(untold) == len(keys) or rng.random() < 0.5):
                label = untold.pop()
                pieces = [(f"The pass key {label} is", 1.0), (f" {keys[label]}", 0.0), (". ", 1.0)]
            elif rng.random() < 0.3:
                pieces = [(f"{SENTENCES[rng.integers(len(SENTENCES))]} ", 1.0)]
            else:
                told = [label for label in keys if label not in untold]
                label = told[rng.integers(len(told))]
                pieces = [(_question(f" {label}").lstrip(), 1.0), (f" {keys[label]}", self.answer_weight), (". ", 1.0)]
            written += sum(len(text) for text, _ in pieces)
            yield from pieces


def _key(rng: np.random.Generator) -> int:
    return int(rng.integers(1, LARGEST + 1))


def _needles(rng: np.random.Generator, count: int) -> list[tuple[str, int]]:
    """Labels, with a space before each, and keys. A single key has no label."""
    labels = rng.permutation(list(LABELS))[:count] if count > 1 else [""]
    return [(f" {label}".rstrip(), _key(rng)) for label in labels]


def _question(label: str) -> str:
    return f" What is the pass key{label}? The pass key{label} is"
