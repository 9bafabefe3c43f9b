"""What stands for a block: each rule is a plain loop of its definition, in float64."""

import math

import pytest
import torch

from landmark.memory.blocks.scorer import scorer_of
from landmark.utils.errors import UserError
from tests.memory.blocks.test_attention import turned

BLOCK, DIM, FIRST = 8, 10, 3


def dot(query, key, softcap):
    product = sum(a * b for a, b in zip(query.tolist(), key.tolist(), strict=True))
    return product if softcap is None else softcap * math.tanh(product / softcap)


def log_sum_exp(scores):
    return math.log(sum(map(math.exp, scores)))


def mean(keys):
    return sum(keys) / len(keys)


def exact(query, keys, softcap):
    return log_sum_exp([dot(query, key, softcap) for key in keys])


def best_token(query, keys, softcap):
    return max(dot(query, key, softcap) for key in keys)


def quest(query, keys, softcap):
    bound = sum(max(float(n * x) for x in channel) for n, channel in zip(query, keys.T, strict=True))
    return dot(torch.ones(1), torch.tensor([bound], dtype=torch.float64), softcap)


def parts(query, keys, softcap):
    return max(dot(query, mean(keys[start : start + 4]), softcap) for start in range(0, BLOCK, 4))


def representatives(query, keys, softcap):
    far = sorted(keys, key=lambda key: -float((key - mean(keys)).norm()))
    return log_sum_exp([dot(query, key, softcap) for key in far[:3]])


def low_rank(query, keys, softcap):
    _, vectors = torch.linalg.eigh(keys.T @ keys)  # the largest last
    return max(dot(query, vectors[:, -5:] @ (vectors[:, -5:].T @ key), softcap) for key in keys)


RULES = {
    "mean_key": ("mean_key", lambda query, keys, softcap: dot(query, mean(keys), softcap)),
    "quest": ("quest", quest),
    "representatives": ({"name": "representatives", "tokens": 3}, representatives),
    "parts": ({"name": "parts", "tokens": 4}, parts),
    "low_rank": ({"name": "low_rank", "rank": 5}, low_rank),
    "exact": ("exact", exact),
    "best_token": ("best_token", best_token),
    "recent": ("recent", lambda _, number, softcap: 0.01 * number),
}


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_the_loop_of_its_definition(rule, softcap):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (
        torch.randn(2, *shape, DIM, generator=generator, dtype=torch.float64) for shape in ((5, 3, 2), (4, BLOCK))
    )
    said, by_hand = RULES[rule]
    scorer = scorer_of(said)
    scorer.check_model(lambda: None, BLOCK)
    summaries = scorer.summarise(keys, keys, FIRST)
    found = scorer.score(queries, summaries, softcap)
    for cache in range(2):
        for number in range(4):
            block = FIRST + number if rule == "recent" else keys[cache, number]
            expected = [by_hand(query, block, softcap) for query in queries[cache].flatten(0, 2)]
            expected = torch.tensor(expected, dtype=torch.float64).view(5, 3, 2)
            torch.testing.assert_close(found[cache, ..., number], expected, rtol=0, atol=1e-12)
    assert scorer.summarise(keys[:, :0], keys[:, :0], 0).shape == (2, 0, *summaries.shape[2:])


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("quest", "recent")])
def test_summaries_turn_with_the_keys(rule):
    generator = torch.Generator().manual_seed(1)
    queries, keys = (
        torch.randn(1, *shape, DIM, generator=generator, dtype=torch.float64) for shape in ((1, 1, 6), (3, BLOCK))
    )
    scorer, distances = scorer_of(RULES[rule][0]), torch.tensor([2, 5, 9])
    moved = scorer.moved(scorer.summarise(keys, keys, 0), turned, distances)
    anew = scorer.summarise(turned(keys, distances), keys, 0)
    torch.testing.assert_close(*(scorer.score(queries, x, None) for x in (moved, anew)), rtol=0, atol=1e-12)


def test_bounds_of_keys_do_not_turn():
    with pytest.raises(UserError, match=r"retrieval.scorer=quest: .* set positions.mapping=true"):
        scorer_of("quest").moved(torch.zeros(1, 1, 2, DIM), turned, torch.tensor([1]))


def test_parts_divide_a_block():
    with pytest.raises(UserError, match=r"retrieval.scorer=parts: tokens=5 must divide model.block_size=8"):
        scorer_of({"name": "parts", "tokens": 5}).check_model(lambda: None, BLOCK)
