"""Training windows of RULER's tasks: a text and a question about it, then a sentence for every other key.

    One of the special magic numbers for brave-otter is: 4829173. … What is the special magic number for brave-otter
    mentioned in the provided text? The special magic number for brave-otter mentioned in the provided text is 4829173.
    The special magic number for calm-king mentioned in the provided text is 5370963. …

A published prompt asks once, so that most of a window teaches nothing about answers. Here texts with needles answer for
as many keys as fit, in random order, and values of a key come in the order of the text. What remains of a window is
filled with the next text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from landmark.experiment.data.ruler import TASKS, Ruler
from landmark.experiment.data.ruler.material import Essays
from landmark.experiment.data.ruler.tasks import Needles, Variables
from landmark.experiment.data.synthetic import Piece, SyntheticData, TrainingText, encode, filled
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.constants import ANSWER_WEIGHT, RULER_SAMPLES_VERSION
from landmark.utils.errors import UserError

_MOST_KEYS = 6  # of a text with needles
_KINDS = {  # share of texts of each kind; UUIDs fill a window with few answers
    ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery"): 0.7,
    ("niah_single_3", "niah_multikey_3"): 0.05,
    ("vt",): 0.2,
    ("cwe", "fwe"): 0.05,
}
_FURTHEST = 1 << 17  # word of the essays with which a text may begin
_STATED = re.compile(r"(?<= for)( \S+ is: [0-9a-f-]+)")


class RulerSamples(SyntheticData):
    """Windows of all tasks of which a text fits. answer_weight: of the loss of answers; keys and values where a needle
    states them have none, other text has 1.
    """

    name = "ruler"

    def __init__(self, essays: Essays, answer_weight: float = ANSWER_WEIGHT):
        self.answer_weight = answer_weight
        self.sample_settings: dict[str, Any] = {"answer_weight": answer_weight, "version": RULER_SAMPLES_VERSION}
        self.prompt_settings = self.sample_settings
        made = TASKS | {"vt": Variables(worked=False)}  # with an example it seldom fits
        self._rulers = {name: Ruler(name, 0, essays, task) for name, task in made.items()}

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> TrainingText:
        """Texts one after another. Where none fits into what remains one is cut."""
        draw = random.Random(int(rng.integers(1 << 62)))

        def text(room: int) -> tuple[np.ndarray, np.ndarray]:
            made = self._text(draw, room, tokenizer) or self._text(draw, length, tokenizer)
            if made is None:
                raise UserError(f"data.tasks: no task fits into a window of {length} tokens: raise train.length")
            return made

        return filled(length, tokenizer.eot, text)

    def _text(self, draw: random.Random, room: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids and weights of a text with as many questions as fit into `room` tokens; None if no task fits."""
        fitting = [name for name, ruler in self._rulers.items() if ruler.fits(room, tokenizer)]
        if not fitting:
            return None
        kinds = [[name for name in fitting if name in kind] for kind in _KINDS]
        kind = draw.choices(kinds, [share * bool(kind) for kind, share in zip(kinds, _KINDS.values(), strict=True)])[0]
        ruler = self._rulers[draw.choice(kind)]
        size, keys = draw.randint(ruler.task.least, ruler.size(room, tokenizer)), draw.randint(1, _MOST_KEYS)
        first, seed = draw.randrange(_FURTHEST), draw.getrandbits(62)
        while True:
            again = random.Random(seed)
            if isinstance(ruler.task, Needles):
                pieces, more = self._needles(again, ruler, ruler.task, size, max(keys, ruler.task.keys), first)
            else:
                made, more = ruler.make(again, size, room, first), []
                pieces = [(made.text, 1.0), *self._reply(ruler.task.reply(made.answers))]
            ids, weights = encode(pieces, tokenizer)
            if len(ids) <= room or (size == ruler.task.least and keys == 1):
                break
            size, keys = max(ruler.task.least, 2 * size // 3), max(1, keys - 1)
        for answered in more:
            more_ids, more_weights = encode(answered, tokenizer)
            if len(ids) + len(more_ids) > room:
                break
            ids, weights = np.concatenate([ids, more_ids]), np.concatenate([weights, more_weights])
        return ids, weights

    def _needles(
        self, draw: random.Random, ruler: Ruler, task: Needles, size: int, keys: int, first: int
    ) -> tuple[list[Piece], list[list[Piece]]]:
        """A text with needles up to its first answer; then each key in a sentence that gives its values. size: of the
        haystack, or number of needles in one of needles. keys: their number elsewhere. first: word of the essay to
        begin with.
        """
        among_needles = task.haystack == "needles"
        task = replace(task, keys=size if among_needles else keys)
        material = ruler.material(size, first)
        drawn = task.draw(draw, material)
        context = task.lines(drawn) if among_needles else task.context(draw, drawn, max(size, task.least), material)[0]
        drawn = {key: sorted(values, key=context.index) for key, values in drawn.items()}
        parts = _STATED.split(f"{task.introduction()}{context}\n")
        pieces = [(part, float(number % 2 == 0)) for number, part in enumerate(parts)]
        asked = draw.sample(list(drawn), task.queries)
        pieces += [(task.ask(asked)[0], 1.0), *self._answered(task, asked, drawn)]
        one, others = replace(task, queries=1), [key for key in drawn if key not in asked]
        draw.shuffle(others)
        return pieces, [[("\n", 1.0), *self._answered(one, [key], drawn)] for key in others]

    def _answered(self, task: Needles, keys: Sequence[str], drawn: dict[str, list[str]]) -> list[Piece]:
        """The sentence that gives the values of some keys."""
        values = [value for key in keys for value in drawn[key]]
        return [(task.ask(keys)[1], 1.0), *self._reply(task.reply(values))]

    def _reply(self, reply: str) -> list[Piece]:
        return [(f" {reply}", self.answer_weight), (".", 1.0)]
