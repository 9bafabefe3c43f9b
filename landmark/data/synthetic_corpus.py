"""Synthetic data with the interface of a corpus. Loads no torch."""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from landmark.data.passkey import Passkey
from landmark.data.random_numbers import sample_generator
from landmark.data.ruler import Ruler
from landmark.data.ruler.material import Essays
from landmark.data.synthetic_data import Prompt, SyntheticData
from landmark.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from landmark.config.schema import Config, DataConfig
    from landmark.data.stream import Stream


@dataclass(frozen=True)
class SyntheticSplit:
    """The part of a `Stream` that identities of runs and rows need."""

    sha256: str


class SyntheticCorpus:
    """Synthetic data with the attributes of a `Corpus` that the rest of the program reads."""

    def __init__(self, data: SyntheticData, tokenizer: Tokenizer):
        self.data, self.tokenizer = data, tokenizer
        self.folder = f"{data.name} (made as needed)"
        self.manifest: dict[str, Any] = {"splits": {}}

    def split(self, name: str) -> SyntheticSplit:
        settings = self.data.sample_settings if name == "train" else self.data.prompt_settings
        described = [self.data.name, name, settings, self.tokenizer.hash]
        if self.tokenizer.beginning:
            described.append(self.tokenizer.beginning)
        text = json.dumps(described, sort_keys=True)
        return SyntheticSplit(hashlib.sha256(text.encode()).hexdigest())

    def prompts(self, split: str, length: int, count: int) -> list[Prompt]:
        """The split's first `count` prompts of at most `length` tokens, with those that begin a text."""
        beginning, prompts = np.array(self.tokenizer.beginning, dtype=np.int64), []
        for number in range(count):
            generator = sample_generator(split, length, number)
            prompt = self.data.prompt(generator, length - len(beginning), self.tokenizer)
            evidence = tuple((first + len(beginning), stop + len(beginning)) for first, stop in prompt.evidence)
            prompts.append(Prompt(np.concatenate([beginning, prompt.tokens]), prompt.answer, evidence))
        return prompts

    def check(self, split: str, length: int) -> None:
        """Raise UserError if `length` tokens are too few for an evaluation."""
        room = length - len(self.tokenizer.beginning)
        self.data.check(sample_generator(split, length, 0), room, self.tokenizer)


def synthetic_corpus(data: "DataConfig", tokenizer: Tokenizer) -> SyntheticCorpus | None:
    """The synthetic data with the name `data.name`; None if this is the name of a corpus."""
    return SyntheticCorpus(Passkey(data.needles), tokenizer) if data.name == "passkey" else None


def task_corpus(config: "Config", stream: "Stream", tokenizer: Tokenizer) -> SyntheticCorpus:
    """The prompts of `eval.task`; those of RULER are made of a stream. `eval.generated` must be filled in."""
    settings = config.eval
    assert settings.question is not None
    assert settings.generated is not None
    if settings.task == "passkey":
        return SyntheticCorpus(Passkey(config.data.needles), tokenizer)
    return SyntheticCorpus(Ruler(settings.question, settings.generated, Essays(stream.tokens, tokenizer)), tokenizer)
