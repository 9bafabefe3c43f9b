"""Key-value pairs: its samples, its prompts and what counts as an answer."""

import re

import numpy as np
import pytest

from landmark.data import SyntheticCorpus, load_tokenizer
from landmark.data.key_value import KEYS, KeyValue
from landmark.data.synthetic_windows import SyntheticWindows
from landmark.utils.errors import UserError

TOKENIZER = load_tokenizer("bytes")
CORPUS = SyntheticCorpus(KeyValue(), TOKENIZER)
LINE = re.compile(r"([^\sa-z=])([a-z])\n")


def test_keys_are_single_bytes_that_mean_nothing_else():
    assert len(KEYS) == len(set(KEYS)) == 67
    assert len(KEYS.encode()) == 67
    assert KEYS.isprintable()
    assert not set(KEYS) & set("abcdefghijklmnopqrstuvwxyz= \n")


def test_samples_define_keys_and_ask_for_all_of_them_in_another_order():
    batch = SyntheticWindows(CORPUS, "train", length=100, batch_size=120, seed=0, block_size=None).batch(0)
    assert batch.weights is not None
    counts, orders = set(), set()
    for tokens, weights in zip(batch.tokens.numpy(), batch.weights.numpy()):
        text = TOKENIZER.decode(tokens)
        assert len(text) == 100
        defined, asked = text.split("==\n")
        pairs, queries = LINE.findall(defined), LINE.findall(asked)
        assert LINE.sub("", defined) == ""
        assert len(LINE.sub("", asked)) < 3, "cut at the end"
        count = len({key for key, _ in pairs})
        assert count == len(pairs)
        assert set(queries) <= set(pairs)
        for start in range(0, len(queries) - count + 1, count):
            assert sorted(queries[start : start + count]) == sorted(pairs)
        counts.add(count)
        orders.add(pairs == queries[:count])
        heaviest = np.flatnonzero(weights == weights.max()) + 1
        at = [match.start(2) for match in LINE.finditer(text) if match.start() > text.index("==\n")]
        assert heaviest[: len(at)].tolist() == at, "the values"
    assert min(counts) == 2
    assert (100 - 3) // 6 < max(counts) <= (100 - 3) // 3 - 1, "few queries in some texts, at least one in all"
    assert False in orders


def test_a_long_sample_defines_no_more_than_there_are_keys():
    batch = SyntheticWindows(CORPUS, "train", length=900, batch_size=40, seed=0, block_size=None).batch(0)
    counts = [TOKENIZER.decode(tokens).index("==\n") // 3 for tokens in batch.tokens.numpy()]
    assert 50 < max(counts) <= 67


@pytest.mark.parametrize("block_size", [3, 15])
def test_lines_and_blocks_end_together(block_size):
    width = block_size + 1
    batch = SyntheticWindows(CORPUS, "train", length=5 * width, batch_size=4, seed=0, block_size=block_size).batch(0)
    for tokens in batch.tokens.numpy():
        for block in tokens.reshape(-1, width):
            assert block[-1] == TOKENIZER.landmark
            lines = TOKENIZER.decode(block).splitlines(keepends=True)
            assert len(lines) == block_size // 3
            assert {len(line) for line in lines} == {3}


@pytest.mark.parametrize(("length", "definitions"), [(10, 2), (40, 12), (66, 20), (205, 67), (2000, 67)])
def test_prompts_are_as_full_as_they_can_be(length, definitions):
    for prompt in CORPUS.prompts("test", length, 5):
        defined, query = TOKENIZER.decode(prompt.tokens).split("==\n")
        pairs = LINE.findall(defined)
        assert LINE.sub("", defined) == ""
        assert len(dict(pairs)) == len(pairs) == definitions
        assert dict(pairs)[query] == prompt.answer


def test_prompts_ask_for_any_definition():
    places = {TOKENIZER.decode(p.tokens).index(chr(p.tokens[-1])) // 3 for p in CORPUS.prompts("test", 34, 100)}
    assert places == set(range(10))


def test_a_prompt_that_cannot_be_so_short_is_refused():
    with pytest.raises(UserError, match=r"eval\.length=6: a key_value prompt needs at least 7 tokens"):
        CORPUS.prompts("test", 6, 1)


@pytest.mark.parametrize(("text", "right"), [("k\n", True), ("k", True), ("x", False), ("", False), (" k", False)])
def test_the_first_letter_is_the_answer(text, right):
    assert KeyValue().answered(text, "k") is right
