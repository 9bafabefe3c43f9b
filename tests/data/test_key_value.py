"""The key-value task: its samples, its prompts and what counts as an answer."""

import re

import numpy as np
import pytest

from landmark.data import SyntheticCorpus, load_tokenizer
from landmark.data.key_value import KeyValue
from landmark.errors import UserError

TOKENIZER = load_tokenizer("bytes")
CORPUS = SyntheticCorpus(KeyValue(), TOKENIZER)
LINE = re.compile(r"([a-z]{2})=([a-z])\n")


def test_samples_define_keys_and_ask_for_all_of_them_in_another_order():
    batch = CORPUS.windows("train", length=200, batch_size=40, seed=0, block_size=None).batch(0)
    assert batch.weights is not None
    counts, orders = set(), set()
    for tokens, weights in zip(batch.tokens.numpy(), batch.weights.numpy()):
        text = TOKENIZER.decode(tokens)
        assert len(text) == 200
        defined, asked = text.removeprefix("=== definitions ===\n").split("=== queries =======\n")
        pairs, queries = LINE.findall(defined), LINE.findall(asked)
        assert LINE.sub("", defined) == ""
        assert len(LINE.sub("", asked)) < 5, "cut at the end"
        count = len({key for key, _ in pairs})
        assert count == len(pairs)
        for start in range(0, len(queries) - count + 1, count):
            assert sorted(queries[start : start + count]) == sorted(pairs)
        counts.add(count)
        orders.add(pairs == queries[:count])
        heaviest = np.flatnonzero(weights == weights.max()) + 1
        at = [match.start(2) for match in LINE.finditer(text) if match.start() > text.index("=== queries")]
        assert heaviest[: len(at)].tolist() == at, "the values"
    assert min(counts) == 2
    assert max(counts) == (200 - 40) // 10
    assert False in orders


@pytest.mark.parametrize("length", [60, 300, 2000])
def test_prompts_are_as_full_as_they_can_be(length):
    for prompt in CORPUS.prompts("test", length, 5):
        text = TOKENIZER.decode(prompt.tokens)
        assert length - 5 < len(prompt.tokens) <= length
        defined, query = text.removeprefix("=== definitions ===\n").split("=== queries =======\n")
        assert dict(LINE.findall(defined))[query.removesuffix("=")] == prompt.answer


def test_a_prompt_that_cannot_be_so_short_is_refused():
    with pytest.raises(UserError, match=r"eval\.length=30: a key_value prompt needs at least 48 tokens"):
        CORPUS.prompts("test", 30, 1)


@pytest.mark.parametrize(("text", "right"), [(" k\n", True), ("k", True), (" x", False), ("", False), (" K", False)])
def test_the_first_letter_is_the_answer(text, right):
    assert KeyValue().answered(text, "k") is right
