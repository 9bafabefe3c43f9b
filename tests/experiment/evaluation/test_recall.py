"""Accuracy of answers: pass keys, tasks of RULER whose right blocks are given; and exact bounds."""

import math

import pytest
import torch

from landmark.experiment.config.schema import Config, EvalConfig, ModelConfig, RetrievalConfig
from landmark.experiment.data import SyntheticCorpus, load_tokenizer
from landmark.experiment.data.passkey import Passkey
from landmark.experiment.data.ruler import Ruler
from landmark.experiment.data.ruler.material import Essays
from landmark.experiment.evaluation.rows import evaluate_recall, evidence_blocks
from landmark.memory import Memory
from landmark.models import Decoder
from landmark.utils.significance import clopper_pearson, score_interval
from tests.configurations import decoder_config

BYTES, CODE = load_tokenizer("bytes"), load_tokenizer("code")
ESSAYS = Essays(CODE.encode("The crow sees the boat. The boat sees the crow. " * 50), CODE)


def decoder(kind="landmark", tokenizer=CODE):
    shape = {"num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "block_size": 20}
    torch.manual_seed(0)
    return Decoder(decoder_config(kind, tokenizer.vocab_size, landmark_id=tokenizer.landmark, **shape))


def settings(scorer="landmark", k=2, **changes) -> Config:
    evaluation = {"length": 310, "local": 100, "split": "test", "prompts": 9, "generated": 7, "batch_size": 4}
    retrieval = RetrievalConfig(k=k, scorer=scorer)
    return Config(model=ModelConfig(kind="landmark"), eval=EvalConfig(**evaluation | changes), retrieval=retrieval)


def test_counts_the_prompts_that_are_answered_and_parts_of_an_answer(monkeypatch):
    corpus = SyntheticCorpus(Ruler("niah_multivalue", 6, ESSAYS), CODE)
    expected = {tuple(prompt.tokens.tolist()): prompt.answer for prompt in corpus.prompts("test", 1200, 4)}
    found = dict(zip(expected, (4, 3, 0, 4), strict=True))  # of four values each

    def answer(model, prompts, count, local, memory, progress):
        assert (count, local) == (6, 100)
        assert isinstance(memory, Memory)
        read = [tuple(prompt.tolist()) for prompt in prompts]
        return [CODE.encode(" ".join(expected[each].split()[: found[each]])).tolist() for each in read]

    monkeypatch.setattr(Decoder, "generate", answer)
    results = evaluate_recall(decoder(), corpus, CODE, of_ruler())
    assert results["correct"] == [1, 0.75, 0, 1]
    assert results["accuracy"] == 2.75 / 4
    assert (results["accuracy_low"], results["accuracy_high"]) == score_interval([[1, 0.75, 0, 1]])
    assert [said for said, _ in results["answers"]] == list(expected.values())
    assert results["tokens"] == sum(map(len, expected))


@pytest.mark.parametrize(
    ("kind", "local", "tier"), [("landmark", 100, "device"), ("landmark", 100, "disk"), ("transformer", None, "device")]
)
def test_an_untrained_model_is_evaluated_on_the_real_path(kind, local, tier):
    corpus = SyntheticCorpus(Passkey(), BYTES)
    seen, config = [], settings(local=local)
    config.memory.tier = tier
    results = evaluate_recall(decoder(kind, BYTES), corpus, BYTES, config, lambda *done: seen.append(done))
    assert (results["memory"].get("cache_misses", 0) > 0) == (tier == "disk")
    assert results["accuracy"] == 0
    assert seen[-1] == (9 * 310, 9 * 310)
    assert all(len(BYTES.encode(text)) <= 7 or "\ufffd" in text for _, text in results["answers"])
    assert (results["memory"].get("retrievals", 0) > 0) == (kind == "landmark")


def of_ruler(scorer="landmark") -> Config:
    return settings(scorer, k=4, length=1200, prompts=4, generated=6, batch_size=2)


@pytest.mark.parametrize(("task", "needed"), [("niah_single_1", 1), ("vt", 3)])
def test_the_blocks_with_the_answer_are_given(task, needed, monkeypatch):
    """Whichever they are for each prompt of a batch, all of them or as many as k."""
    corpus = SyntheticCorpus(Ruler(task, 6, ESSAYS), CODE)
    evidence = {tuple(prompt.tokens.tolist()): prompt.evidence for prompt in corpus.prompts("test", 1200, 4)}
    asked = []

    def answer(model, prompts, count, memory, **_):
        assert isinstance(memory, Memory)
        for prompt, blocks in zip(prompts, memory.select.numbers, strict=True):
            wanted = {token // 20 for first, stop in evidence[tuple(prompt.tolist())] for token in range(first, stop)}
            assert {block for block in blocks.tolist() if block >= 0} == wanted
            asked.append(len(wanted))
        return [[] for _ in prompts]

    monkeypatch.setattr(Decoder, "generate", answer)
    evaluate_recall(decoder(), corpus, CODE, of_ruler("given"))
    assert len(asked) == 4
    assert min(asked) >= needed


def test_exact_intervals_hold_those_of_whole_answers_and_blocks_are_those_of_evidence():
    """Values from published tables of the binomial interval. A prompt without evidence stands beside others."""
    for successes, trials, low, high in ((0, 10, 0, 0.3085), (5, 10, 0.1871, 0.8129), (49, 50, 0.8935, 0.9995)):
        assert clopper_pearson(successes, trials) == pytest.approx((low, high), abs=1e-4)
    assert clopper_pearson(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert score_interval([[1, 1, 0, 1]]) == clopper_pearson(3, 4)
    low, high = score_interval([[0.5, 0.25, 1, 0]])
    assert low == clopper_pearson(1, 4)[0]
    assert high == clopper_pearson(math.ceil(1.75), 4)[1]
    assert score_interval([[0.2] * 5]) == clopper_pearson(1, 5)
    assert evidence_blocks([[(0, 3), (49, 51)], [], [(100, 150)]], 50).tolist() == [[0, 1], [-1, -1], [2, -1]]
