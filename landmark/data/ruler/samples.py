"""Training windows of RULER's tasks: a question about a text that fits into the window, then further questions.

    One of the special magic numbers for brave-otter is: 4829173. … What is the special magic number for brave-otter
    mentioned in the provided text? The special magic number for brave-otter mentioned in the provided text is 4829173.

A published prompt asks once. Here texts with needles are asked for each of their keys, in random order, so that there
is more to learn from a window. What remains of it is filled with the next text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from landmark.data.ruler import TASKS, Ruler
from landmark.data.ruler.essays import Essays
from landmark.data.ruler.needles import Needles
from landmark.data.ruler.variables import Variables
from landmark.data.synthetic_data import Piece, SyntheticData, Window, encode, window_of
from landmark.data.tokenizer import Tokenizer
from landmark.utils.constants import RULER_VERSION
from landmark.utils.errors import UserError

_MOST_KEYS = 6  # of a text with needles
_NEEDLES = 0.75  # share of texts with needles
_FURTHEST = 1 << 17  # word of the essays with which a text may begin
_STATED = re.compile(r"(?<= for)( \S+ is: [0-9a-f-]+)")


class RulerSamples(SyntheticData):
    """Windows of all tasks of which a text fits into the window.

    answer_weight: weight of the loss of answers; keys and values where a needle states them have none, other text has
    1.
    """

    name = "ruler"

    def __init__(self, essays: Essays, answer_weight: float = 10.0):
        self.answer_weight = answer_weight
        self.sample_settings: dict[str, Any] = {"answer_weight": answer_weight, "version": RULER_VERSION}
        self.prompt_settings = self.sample_settings
        made = TASKS | {"vt": Variables(worked=False)}  # with an example it seldom fits
        self._rulers = {name: Ruler(name, 0, essays, task) for name, task in made.items()}

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Window:
        """Texts one after another, each closed by end of text; the last one is cut."""
        draw = random.Random(int(rng.integers(1 << 62)))
        ids, weights = [], []
        while (room := length - sum(map(len, ids))) > 0:
            text, weight = self._text(draw, room if not ids else length, tokenizer)
            ids += [text, np.array([tokenizer.eot])]
            weights += [weight, np.zeros(1)]
        return window_of(np.concatenate(ids), np.concatenate(weights), length, tokenizer.eot)

    def _text(self, draw: random.Random, room: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of a text, whose first question is answered within `room` tokens."""
        fitting = [name for name, ruler in self._rulers.items() if ruler.fits(room, tokenizer)]
        if not fitting:
            raise UserError(f"data.tasks: no task fits into a window of {room} tokens: raise train.length")
        needles = [name for name in fitting if isinstance(TASKS[name], Needles)]
        others = [name for name in fitting if name not in needles]
        ruler = self._rulers[draw.choice(needles if needles and (not others or draw.random() < _NEEDLES) else others)]
        size = draw.randint(ruler.task.least, ruler.size(room, tokenizer))
        first, keys, seed = draw.randrange(_FURTHEST), draw.randint(1, _MOST_KEYS), draw.getrandbits(62)
        while True:
            again = random.Random(seed)
            if isinstance(ruler.task, Needles):
                pieces, more = self._needles(again, ruler, ruler.task, size, max(keys, ruler.task.keys), first)
            else:
                question, more = ruler.question(again, size, room, first), []
                pieces = [(question.text, 1.0), *self._reply(ruler.task.reply(question.answers))]
            ids, weights = encode(pieces, tokenizer)
            if len(ids) <= room or (size == ruler.task.least and keys == 1):
                break
            size, keys = max(ruler.task.least, 2 * size // 3), max(1, keys - 1)
        if not more:
            return ids, weights
        more_ids, more_weights = encode(more, tokenizer)
        return np.concatenate([ids, more_ids]), np.concatenate([weights, more_weights])

    def _needles(
        self, draw: random.Random, ruler: Ruler, task: Needles, size: int, keys: int, first: int
    ) -> tuple[list[Piece], list[Piece]]:
        """A text with needles up to its first answer, and further questions for each key with their answers.

        Args:
            draw: draws everything that is random.
            ruler: gives the material.
            task: kind of needle and haystack.
            size: of the haystack.
            keys: number of keys.
            first: word of the essay to begin with.
        """
        task, one = replace(task, keys=keys), replace(task, keys=keys, queries=1)
        material, size = ruler.material(size, first), max(size, task.least)
        drawn = task.draw(draw, material)
        context, _ = task.context(draw, drawn, size, material)
        parts = _STATED.split(f"{task.introduction()}{context}\n")
        pieces = [(part, float(number % 2 == 0)) for number, part in enumerate(parts)]
        pieces += self._asked(task, draw.sample(list(drawn), task.queries), drawn)
        further = [[("\n", 1.0), *self._asked(one, [key], drawn)] for key in draw.sample(list(drawn), keys)]
        return pieces, [piece for question in further for piece in question]

    def _asked(self, task: Needles, keys: Sequence[str], drawn: dict[str, list[str]]) -> list[Piece]:
        values = [value for key in keys for value in drawn[key]]
        return [("".join(task.ask(keys)), 1.0), *self._reply(task.reply(values))]

    def _reply(self, reply: str) -> list[Piece]:
        return [(f" {reply}", self.answer_weight), (".", 1.0)]
