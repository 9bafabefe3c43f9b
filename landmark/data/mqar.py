"""Multi-query associative recall (MQAR), as zoology defines it (Arora et al. 2023): ids of a vocabulary without text.

Pairs of a key and a value come first; then each key comes once more, and the model should give its value. Keys are of
the lower half of the vocabulary, values of the upper half. With two pairs::

    tokens    2 8  4 7  0 0  4 0  0 0  0 0  2 0  0 0
    targets   - -  - -  - -  7 -  - -  - -  8 -  - -

Queries stand on even places after the pairs, the n-th of these places with a probability in proportion to n^(a−1),
a = 0.01, all on different places. A value does not follow its query in the text: only the target has it. The rest is
the id 0, which is no key (zoology's random_non_queries=False, as in its figure 2).
"""

import numpy as np

from landmark.data.synthetic_data import SyntheticData, TrainingText
from landmark.data.tokenizers import Tokenizer
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError

POWER = 0.01  # a


class Mqar(SyntheticData):
    """Texts with `pairs` pairs. Training texts are drawn anew for each step, not repeated in epochs."""

    name = "mqar"

    def __init__(self, pairs: int = 8):
        self.pairs = pairs
        self.sample_settings = {"pairs": pairs, "version": 1}
        self.prompt_settings = {"pairs": pairs, "version": 1}

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> TrainingText:
        """A training text; an odd last token is 0.

        Raises UserError where the pairs do not fit, or the tokenizer has too few ids.
        """
        odd = length % 2
        tokens, targets = self.text(rng, length - odd, tokenizer)
        tokens, targets = np.pad(tokens, (0, odd)), np.pad(targets, (0, odd), constant_values=NO_LOSS)
        return TrainingText(tokens, targets, (targets != NO_LOSS).astype(float))

    def check(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> None:
        self.text(rng, length, tokenizer)

    def text(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets (length,) of a text; NO_LOSS where nothing is to be predicted.

        Raises UserError where the pairs do not fit, or the tokenizer has too few ids.
        """
        pairs, half = self.pairs, tokenizer.eot // 2
        if length % 2 or 4 * pairs > length:
            raise UserError(
                f"data.pairs={pairs}: a text needs an even number of tokens, at least {4 * pairs}, and has {length}"
            )
        if pairs >= half:
            raise UserError(f"data.pairs={pairs}: tokenizer={tokenizer.name} has only {half - 1} keys")
        keys = rng.choice(np.arange(1, half), pairs, replace=False)
        values = rng.choice(np.arange(half, tokenizer.eot), pairs, replace=False)
        places = (length - 2 * pairs) // 2
        probability = np.arange(1, places + 1) ** (POWER - 1)
        gaps = rng.choice(places, pairs, replace=False, p=probability / probability.sum())
        tokens = np.zeros(length, np.int64)
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[2 * pairs + 2 * gaps] = keys
        targets = np.full(length, NO_LOSS)
        targets[2 * pairs + 2 * gaps] = values
        return tokens, targets
