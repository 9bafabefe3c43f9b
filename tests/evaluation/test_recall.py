"""Accuracy of answers, and its exact bounds."""

import pytest

from landmark.config.schema import Config, EvalConfig, RetrievalConfig
from landmark.data import SyntheticCorpus, load_tokenizer
from landmark.data.passkey import Passkey
from landmark.evaluation import evaluate_recall
from landmark.memory import Memory
from landmark.models import Decoder
from landmark.utils.significance import clopper_pearson
from tests.configurations import decoder_config

TOKENIZER = load_tokenizer("bytes")


def settings(**changes) -> Config:
    evaluation = {"length": 310, "local": 100, "split": "test", "prompts": 9, "generated": 7, "batch_size": 4}
    return Config(eval=EvalConfig(**evaluation | changes), retrieval=RetrievalConfig(k=2))


def decoder(kind):
    shape = {"num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "block_size": 20}
    return Decoder(decoder_config(kind, TOKENIZER.vocab_size, landmark_id=TOKENIZER.landmark, **shape))


def test_counts_the_prompts_that_are_answered(monkeypatch):
    corpus = SyntheticCorpus(Passkey(), TOKENIZER)
    prompts = {tuple(p.tokens.tolist()): p.answer for p in corpus.prompts("test", 310, 9)}
    wrong = list(prompts)[3]

    def answer(model, read, count, local, memory, progress):
        assert local == 100
        assert isinstance(memory, Memory)
        rows = [tuple(row.tolist()) for row in read]
        texts = ["nothing" if row == wrong else f" {prompts[row]}. " for row in rows]
        return [TOKENIZER.encode(f"{text:9}")[:count].tolist() for text in texts]

    monkeypatch.setattr(Decoder, "generate", answer)
    results = evaluate_recall(decoder("landmark"), corpus, TOKENIZER, settings())
    assert results["correct"] == [1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert results["accuracy"] == 8 / 9
    assert (results["accuracy_low"], results["accuracy_high"]) == clopper_pearson(8, 9)
    assert [expected for expected, _ in results["answers"]] == list(prompts.values())
    assert results["tokens"] == 9 * 310


@pytest.mark.parametrize(
    ("kind", "local", "tier"), [("landmark", 100, "device"), ("landmark", 100, "disk"), ("transformer", None, "device")]
)
def test_an_untrained_model_is_evaluated_on_the_real_path(kind, local, tier):
    corpus = SyntheticCorpus(Passkey(), TOKENIZER)
    seen, config = [], settings(local=local)
    config.memory.tier = tier
    results = evaluate_recall(decoder(kind), corpus, TOKENIZER, config, lambda *done: seen.append(done))
    assert (results["memory"].get("cache_misses", 0) > 0) == (tier == "disk")
    assert results["accuracy"] == 0
    assert seen[-1] == (9 * 310, 9 * 310)
    assert all(len(TOKENIZER.encode(text)) <= 7 or "\ufffd" in text for _, text in results["answers"])
    assert (results["memory"].get("retrievals", 0) > 0) == (kind == "landmark")


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (49, 50, 0.8935, 0.9995)],
)
def test_clopper_pearson(successes, trials, low, high):
    """Values from published tables of the exact binomial interval."""
    assert clopper_pearson(successes, trials) == pytest.approx((low, high), abs=1e-4)
