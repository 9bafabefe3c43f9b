"""Tasks of RULER answered by models: the right blocks are given, and partial answers are scored."""

import math

import pytest
import torch

from landmark.config.schema import Config, EvalConfig, MemoryConfig, ModelConfig, RetrievalConfig
from landmark.data import SyntheticCorpus, load_tokenizer
from landmark.data.ruler import Ruler
from landmark.data.ruler.material import Essays
from landmark.evaluation import evaluate_recall
from landmark.evaluation.recall import score_interval
from landmark.memory import Memory
from landmark.models import Decoder
from landmark.utils.significance import clopper_pearson
from tests.configurations import decoder_config

CODE = load_tokenizer("code")
ESSAYS = Essays(CODE.encode("The crow sees the boat. The boat sees the crow. " * 50), CODE)
SHAPE = {"num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "block_size": 20}
LANDMARK = decoder_config("landmark", CODE.vocab_size, landmark_id=CODE.landmark, **SHAPE)


def settings(scorer="landmark", length=1200):
    return Config(
        size="test",
        model=ModelConfig(kind="landmark"),
        eval=EvalConfig(length, 100, "test", prompts=4, generated=6, batch_size=2),
        retrieval=RetrievalConfig(k=4, scorer=scorer),
        memory=MemoryConfig(),
    )


@pytest.mark.parametrize(("task", "needed"), [("niah_single_1", 1), ("vt", 3)])
def test_the_blocks_with_the_answer_are_given(task, needed, monkeypatch):
    """Whichever they are for each prompt of a batch, all of them or as many as k."""
    corpus = SyntheticCorpus(Ruler(task, 6, ESSAYS), CODE)
    evidence = {tuple(prompt.tokens.tolist()): prompt.evidence for prompt in corpus.prompts("test", 1200, 4)}
    asked = []

    def answer(model, prompts, count, memory, **_):
        assert isinstance(memory, Memory)
        for prompt, blocks in zip(prompts, memory.select.innermost.numbers, strict=True):
            wanted = {token // 20 for first, stop in evidence[tuple(prompt.tolist())] for token in range(first, stop)}
            assert {block for block in blocks.tolist() if block >= 0} == wanted
            asked.append(len(wanted))
        return [[] for _ in prompts]

    monkeypatch.setattr(Decoder, "generate", answer)
    evaluate_recall(Decoder(LANDMARK), corpus, CODE, settings("given"))
    assert len(asked) == 4
    assert min(asked) >= needed


@pytest.mark.parametrize("scorer", ["landmark", "given"])
def test_an_untrained_model_is_evaluated_on_the_real_path(scorer):
    torch.manual_seed(0)
    corpus = SyntheticCorpus(Ruler("niah_multivalue", 6, ESSAYS), CODE)
    results = evaluate_recall(Decoder(LANDMARK), corpus, CODE, settings(scorer))
    assert results["accuracy"] == 0
    assert results["memory"]["retrievals"] > 0
    assert [len(expected.split()) for expected, _ in results["answers"]] == [4] * 4


def test_parts_of_an_answer_count(monkeypatch):
    corpus = SyntheticCorpus(Ruler("niah_multivalue", 6, ESSAYS), CODE)
    answers = {tuple(prompt.tokens.tolist()): prompt.answer for prompt in corpus.prompts("test", 1200, 4)}

    def answer(model, prompts, count, **_):
        return [CODE.encode(" ".join(answers[tuple(prompt.tolist())].split()[:3])).tolist() for prompt in prompts]

    monkeypatch.setattr(Decoder, "generate", answer)
    results = evaluate_recall(Decoder(LANDMARK), corpus, CODE, settings())
    assert results["correct"] == [0.75] * 4
    assert results["accuracy"] == 0.75
    assert (results["accuracy_low"], results["accuracy_high"]) == clopper_pearson(3, 4)


def test_the_interval_of_parts_holds_that_of_whole_answers():
    assert score_interval([1, 1, 0, 1]) == clopper_pearson(3, 4)
    low, high = score_interval([0.5, 0.25, 1, 0])
    assert low == clopper_pearson(1, 4)[0]
    assert high == clopper_pearson(math.ceil(1.75), 4)[1]
    assert score_interval([0.2] * 5) == clopper_pearson(1, 5)
