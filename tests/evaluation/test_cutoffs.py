"""The cutoffs of the layers: what each drops alone and costs, and the cheapest that drop enough."""

import itertools
import json
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.config import to_config
from landmark.evaluation import choose_cutoffs, evaluate
from landmark.evaluation.cutoffs import CUTOFFS, STEPS, CutoffEffect, cheapest_cutoffs, measure_layers
from landmark.models import Decoder
from tests.configurations import compose_conf
from tests.evaluation.test_perplexity import LANDMARK, TOKENIZER, model_of, stream

__all__ = ["stream"]  # a fixture

COSTS = (0.5, 0.1, 2.0)


def measure(cutoffs):
    """Layer n drops its cutoff's square root and pays COSTS[n] times that."""
    dropped = [cutoff**0.5 for cutoff in cutoffs]
    return 3.0 + sum(cost * share for cost, share in zip(COSTS, dropped)), dropped


def test_each_layer_is_measured_alone():
    seen = []
    layers = measure_layers(measure, 3, lambda done, total: seen.append((done, total)))
    for cost, choices in zip(COSTS, layers):
        assert [choice.cutoff for choice in choices] == list(CUTOFFS)
        for choice in choices:
            assert choice.dropped == choice.cutoff**0.5
            assert choice.cost == pytest.approx(cost * choice.dropped)
    assert seen == [(n + 1, 27) for n in range(27)]


def test_the_cheapest_layer_drops_first():
    layers = measure_layers(measure, 3)
    assert cheapest_cutoffs(layers, 0.0) == [0.0, 0.0, 0.0]
    assert cheapest_cutoffs(layers, 1 / 3) == [0.0, 1.0, 0.0]
    assert cheapest_cutoffs(layers, 2 / 3) == [1.0, 1.0, 0.0]
    assert cheapest_cutoffs(layers, 1.0) == [1.0, 1.0, 1.0]


def test_an_impossible_share_gives_the_largest_possible():
    assert cheapest_cutoffs([[CutoffEffect(0.0, 0.0, 0.0), CutoffEffect(1.0, 0.7, 0.1)]], 0.9) == [1.0]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, STEPS), st.floats(0, 1)), min_size=1, max_size=3), min_size=1, max_size=3
    )
)
def test_no_other_choice_drops_enough_for_less(measured):
    layers = [
        [
            CutoffEffect(0.0, 0.0, 0.0),
            *(CutoffEffect(n + 1.0, parts / STEPS, cost) for n, (parts, cost) in enumerate(layer)),
        ]
        for layer in measured
    ]
    most = statistics.fmean(max(choice.dropped for choice in choices) for choices in layers)
    share = most * 0.6

    def total(chosen):
        return statistics.fmean(choice.dropped for choice in chosen), sum(choice.cost for choice in chosen)

    found = cheapest_cutoffs(layers, share)
    chosen = [next(c for c in choices if c.cutoff == cutoff) for choices, cutoff in zip(layers, found, strict=True)]
    dropped, cost = total(chosen)
    slack = 0.5 / STEPS / len(layers) + 1e-9  # the share is rounded to a part
    assert dropped >= share - slack
    for others in itertools.product(*layers):
        if total(others)[0] >= share + slack:
            assert cost <= total(others)[1] + 1e-9


def test_cutoffs_are_chosen_on_a_text_and_kept(stream, tmp_path):
    model = model_of(replace(LANDMARK, cmt=True))
    overrides = ["size=nano", "cmt=on", "cmt.cutoff=0.3", "cmt.per_layer=true", "retrieval.k=2", "model.num_layers=2"]
    config = to_config(compose_conf([*overrides, "eval.length=64", "eval.local=17", "eval.tokens=512", "eval.span=64"]))
    path = tmp_path / "cutoffs.json"
    chosen = choose_cutoffs(model, stream, TOKENIZER, config, path)
    assert len(chosen) == 2
    assert set(chosen) <= set(CUTOFFS)
    kept = json.loads(path.read_text())
    assert [[choice["cutoff"] for choice in layer] for layer in kept] == [list(CUTOFFS)] * 2
    kept[0] = [{"cutoff": 0.0, "dropped": 0.0, "cost": 0.0}, {"cutoff": 0.5, "dropped": 1.0, "cost": -9.0}]
    path.write_text(json.dumps(kept))
    assert choose_cutoffs(model, stream, TOKENIZER, config, path)[0] == 0.5, "what was measured is not measured again"


def test_chosen_cutoffs_drop_the_requested_share(stream, tmp_path):
    """On the text that they are chosen on, the chosen cutoffs drop about what the one cutoff drops."""
    model: Decoder = model_of(replace(LANDMARK, cmt=True))
    overrides = ["size=nano", "cmt=on", "retrieval.k=2", "model.num_layers=2", "eval.length=64", "eval.local=17"]
    config = to_config(compose_conf([*overrides, "eval.tokens=1024", "eval.span=64", "cmt.cutoff=0.2"]))
    chosen = choose_cutoffs(model, stream, TOKENIZER, config, tmp_path / "cutoffs.json")
    rates = []
    for cmt in (config.cmt, replace(config.cmt, cutoff=0.0, cutoffs=chosen)):
        results = evaluate(model, stream, TOKENIZER, replace(config, cmt=cmt))
        rates.append(results["memory"]["drop_rate"])
    assert 0 < rates[0] - 0.05 < rates[1]
