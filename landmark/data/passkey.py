"""Pass keys: a number is hidden in much irrelevant text, and asked for at its end (paper, Figure 3a).

Half of the training samples are prompts in the paper's words. From these alone, learning to copy takes very long. So
the other half is dense: a few labelled keys are stated, and asked for many times in random order, with filler between.
"""

import re
from collections.abc import Iterator

import numpy as np

from landmark.data.synthetic_data import Piece, Prompt, SyntheticData, encode, largest, too_short
from landmark.data.tokenizer import Tokenizer

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there. "
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SENTENCES = [f"{sentence}." for sentence in FILLER.rstrip(". ").split(". ")]
LARGEST = 50_000
LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Passkey(SyntheticData):
    """Synthetic data with pass keys.

    needles: keys hidden in a prompt; several have labels, and one of them is asked for. dense: fraction of training
    samples that are dense. answer_weight: weight of the loss of a key's digits where the text before states the key; a
    key stated for the first time has no loss, and other text the weight 1.
    """

    name = "passkey"

    def __init__(self, needles: int = 1, dense: float = 0.5, answer_weight: float = 10.0):
        self.needles, self.dense, self.answer_weight = needles, dense, answer_weight
        self.sample_settings = {"dense": dense, "answer_weight": answer_weight, "version": 1}
        self.prompt_settings = {"needles": needles, "version": 1}

    def sample(self, rng: np.random.Generator, length: int) -> Iterator[Piece]:
        """Pieces of a dense text that is cut at its end, or of a prompt of up to `length` bytes with its answer."""
        if rng.random() < self.dense:
            yield from self._dense(rng, length)
        else:
            needles = [("", _key(rng))]
            shortest = sum(len(text) for text, _ in self._prompt(rng, needles, 0)) + 8
            filler = int(rng.integers(0, max(1, length - shortest)))
            yield from self._prompt(rng, needles, filler)
            yield f" {needles[0][1]}", self.answer_weight
            yield ".", 1.0

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt of `length` tokens, or a few less, because filler is added by characters."""
        labels = rng.permutation(list(LABELS))[: self.needles] if self.needles > 1 else [""]
        needles = [(f" {label}".rstrip(), _key(rng)) for label in labels]
        state = rng.bit_generator.state

        def tokens(filler: int) -> np.ndarray:
            rng.bit_generator.state = state
            return encode(self._prompt(rng, needles, filler), tokenizer)[0]

        if len(tokens(0)) > length:
            raise too_short(self.name, length, len(tokens(0)))
        filler = largest(lambda characters: len(tokens(characters)) <= length, 8 * length)
        return Prompt(tokens(filler), str(needles[0][1]))

    def answered(self, text: str, answer: str) -> bool:
        """The first integer of the text is the key."""
        found = re.search(r"\d+", text)
        return found is not None and found.group() == answer

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
        label = needles[0][0]
        yield f" What is the pass key{label}? The pass key{label} is", 1.0

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
                question = f"What is the pass key {label}? The pass key {label} is"
                pieces = [(question, 1.0), (f" {keys[label]}", self.answer_weight), (". ", 1.0)]
            written += sum(len(text) for text, _ in pieces)
            yield from pieces


def _key(rng: np.random.Generator) -> int:
    return int(rng.integers(1, LARGEST + 1))
