"""Texts of probes: which tokens are read twice, and which of them are counted."""

import hashlib

import numpy as np
import pytest

from landmark.config.schema import EvalConfig
from landmark.data.evaluation_texts import probe_texts
from landmark.data.stream import Stream
from landmark.data.tokenizers import load_tokenizer
from landmark.utils.errors import UserError

TOKENIZER = load_tokenizer("bytes")


@pytest.fixture
def stream(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    return Stream(tmp_path / "x.bin", tokens, hashlib.sha256(tokens.tobytes()).hexdigest(), 1, 1000, 100)


def texts(stream, probe, length, prompts, split="test"):
    return probe_texts(EvalConfig(probe=probe, length=length, prompts=prompts, split=split), stream, TOKENIZER)


@pytest.mark.parametrize(("length", "prompts"), [(4, 7), (60, 5), (222, 9), (1998, 1)])
def test_a_stretch_of_the_split_comes_twice(stream, length, prompts):
    copies, half = texts(stream, "copy", length, prompts), length // 2
    assert copies.tokens.shape == (prompts, length)
    assert copies.tokens.dtype == np.int64
    for tokens, start in zip(copies.tokens, copies.starts, strict=True):
        stretch = stream.tokens[start - 1 : start - 1 + half]  # the first token of a stretch is not counted
        np.testing.assert_array_equal(tokens, [*stretch, *stretch])


def test_both_copies_are_counted_from_their_second_token_on(stream):
    copies = texts(stream, "copy", 60, 5)
    assert (list(copies.compared), list(copies.counted)) == (list(range(1, 30)), list(range(31, 60)))
    np.testing.assert_array_equal(copies.tokens[:, copies.compared], copies.tokens[:, copies.counted])


def test_stretches_lie_evenly_over_the_split_and_do_not_overlap(stream):
    starts = np.array(texts(stream, "copy", 60, 20).starts)
    gaps = np.diff(starts)
    assert starts[0] == 1
    assert gaps.min() >= 30
    assert gaps.max() - gaps.min() <= 1
    assert starts[-1] + 30 + gaps.max() >= 1000


def test_pairs_come_again_in_another_order(stream):
    pairs = texts(stream, "recall", 80, 6)
    assert pairs.tokens.shape == (6, 80)
    for tokens in pairs.tokens:
        told, asked = (list(map(tuple, half.reshape(20, 2))) for half in (tokens[:40], tokens[40:]))
        assert sorted(told) == sorted(asked)
        assert told != asked
        assert len({token for pair in told for token in pair}) == 40
        assert [value for _, value in asked] == tokens[pairs.counted].tolist()
    assert list(pairs.compared) == []
    assert len({tuple(tokens) for tokens in pairs.tokens}) == 6


def test_pairs_are_of_all_tokens_but_special_and_unused_ones(stream):
    drawn = texts(stream, "recall", 512, 3).tokens
    assert set(drawn.ravel().tolist()) == set(range(256)) == set(np.flatnonzero(TOKENIZER.byte_lengths))
    assert {TOKENIZER.eot, TOKENIZER.landmark}.isdisjoint(drawn.ravel().tolist())


def test_pairs_are_a_function_of_split_and_number(stream):
    five = texts(stream, "recall", 40, 5)
    np.testing.assert_array_equal(five.tokens[:3], texts(stream, "recall", 40, 3).tokens)
    assert five.starts[:3] == texts(stream, "recall", 40, 3).starts
    assert not (five.tokens == texts(stream, "recall", 40, 5, split="validation").tokens).all()


@pytest.mark.parametrize(
    ("probe", "length", "prompts", "said"),
    [
        ("copy", 222, 10, "eval.prompts=10: the test split has 1,000 tokens, that is 9 stretches of 111"),
        ("copy", 4000, 1, "that is 0 stretches of 2,000 for eval.probe=copy: lower eval.prompts or eval.length"),
        (
            "recall",
            516,
            1,
            "eval.length=516: eval.probe=recall needs 258 different tokens, and tokenizer=bytes has 256: "
            "lower eval.length to at most 512",
        ),
    ],
)
def test_a_split_or_a_vocabulary_too_small_is_refused(stream, probe, length, prompts, said):
    with pytest.raises(UserError) as error:
        texts(stream, probe, length, prompts)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
