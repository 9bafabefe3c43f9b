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


def test_a_rule_may_be_of_some_layers():
    scorer = scorer_of({"name": "in_layers", "rule": "quest", "first": 2, "last": 3})
    assert [scorer.in_layer(layer).saved() for layer in range(5)] == [
        "mean_key",
        "mean_key",
        "quest",
        "quest",
        "mean_key",
    ]
    to_the_last = scorer_of({"name": "in_layers", "rule": "quest", "first": 2})
    assert to_the_last.in_layer(99).saved() == "quest"
    with pytest.raises(UserError, match="tokens=8 must divide"):
        scorer_of({"name": "in_layers", "rule": "parts", "first": 2}).check_model(lambda: None, 12)


@pytest.mark.parametrize(("setting", "value"), [("first", "x"), ("first", True), ("last", 1.5), ("rule", 3)])
def test_a_setting_of_another_type_is_refused(setting, value):
    said = {"name": "in_layers", "rule": "quest", "first": 2, setting: value}
    with pytest.raises(UserError, match=f"{setting}={value} must be of type"):
        scorer_of(said)


def test_a_memory_says_with_which_rule_it_was_read(tmp_path):
    """Settings of a rule too, in the form that the command line takes."""
    pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
    from tests.models.huggingface.conftest import FREE, wrapped_model

    rule = {"name": "in_layers", "rule": "best_token", "first": 1}
    model = wrapped_model("llama", **FREE)
    memory = model.new_memory(scorer=rule)
    model(torch.arange(60)[None], past_key_values=memory)
    memory.save(tmp_path / "memory")
    model.new_memory(scorer=rule).load(tmp_path / "memory")
    said = r"set retrieval.scorer=\{name: in_layers, rule: best_token, first: 1, last: null\}"
    with pytest.raises(UserError, match=said):
        model.new_memory(scorer={**rule, "first": 2}).load(tmp_path / "memory")
