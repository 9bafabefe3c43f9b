"""Multi-query associative recall: its texts, its windows, and its evaluation by models whose answers are known."""

import numpy as np
import pytest
import torch

from landmark.config.schema import Config, DataConfig, EvalConfig, MemoryConfig, ModelConfig, RetrievalConfig
from landmark.data import SyntheticCorpus, load_tokenizer, synthetic_corpus
from landmark.data.mqar import Mqar
from landmark.data.synthetic_windows import SyntheticWindows
from landmark.evaluation import evaluate_mqar
from landmark.models import Decoder
from landmark.models.language_model import LanguageModel
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from tests.configurations import changed, decoder_config

SYMBOLS = load_tokenizer("symbols", vocab_size=64)
PLAIN = decoder_config("transformer", vocab_size=SYMBOLS.vocab_size, num_layers=1, num_heads=1, head_dim=8, mlp_dim=8)
LANDMARK = changed(PLAIN, kind="landmark", block_size=5, landmark_id=SYMBOLS.landmark)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("pairs", "length"), [(1, 4), (4, 64), (8, 32), (16, 256)])
def test_texts_are_pairs_and_then_each_key_once_more(pairs, length):
    for seed in range(20):
        tokens, targets = Mqar(pairs).text(rng(seed), length, SYMBOLS)
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys.tolist())) == len(set(values.tolist())) == pairs
        assert ((keys >= 1) & (keys < 32)).all()
        assert ((values >= 32) & (values < 64)).all()
        asked = np.flatnonzero(targets != NO_LOSS)
        assert sorted(tokens[asked]) == sorted(keys)
        assert (asked >= 2 * pairs).all()
        assert (asked % 2 == 0).all()
        known = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [known[key] for key in tokens[asked].tolist()] == targets[asked].tolist()
        rest = np.setdiff1d(np.arange(2 * pairs, length), asked)
        assert (tokens[rest] == 0).all()


def test_gaps_follow_the_power_law():
    places = np.zeros(60)
    for seed in range(1000):
        _, targets = Mqar(1).text(rng(seed), 122, SYMBOLS)
        places[(np.flatnonzero(targets != NO_LOSS)[0] - 2) // 2] += 1
    law = np.arange(1, 61) ** (0.01 - 1.0)
    np.testing.assert_allclose(places / 1000, law / law.sum(), atol=4 * np.sqrt(0.25 * 0.75 / 1000))


@pytest.mark.parametrize("block_size", [None, 3, 15])
def test_windows_have_the_text_between_their_landmarks(block_size):
    length = 64 if block_size is None else 64 + 64 // block_size
    corpus = SyntheticCorpus(Mqar(4), SYMBOLS)
    batch = SyntheticWindows(corpus, "train", length=length, batch_size=5, seed=0, block_size=block_size).batch(2)
    for tokens, targets in zip(batch.tokens.numpy(), batch.targets.numpy()):
        is_text = tokens != SYMBOLS.landmark
        assert (targets[~is_text] == NO_LOSS).all()
        tokens, targets = tokens[is_text], targets[is_text]
        assert len(tokens) >= 63
        known = dict(zip(tokens[:8:2].tolist(), tokens[1:8:2].tolist(), strict=True))
        asked = np.flatnonzero(targets != NO_LOSS)
        assert 3 <= len(asked) <= 4
        assert [known[key] for key in tokens[asked].tolist()] == targets[asked].tolist()
    assert batch.weights is not None
    assert ((batch.weights == 1) == (batch.targets != NO_LOSS)).all()


@pytest.mark.parametrize(
    ("pairs", "length", "said"), [(4, 63, "even"), (4, 14, "at least 16"), (32, 500, "only 31 keys")]
)
def test_pairs_that_do_not_fit_are_refused(pairs, length, said):
    with pytest.raises(UserError, match=said):
        SyntheticCorpus(Mqar(pairs), SYMBOLS).check("test", length)


class Table(LanguageModel):
    """Knows the value of each key that it has read, or with `forgets` of none before the present chunk."""

    def __init__(self, config, forgets=False):
        super().__init__()
        self.config, self.forgets, self.unused = config, forgets, torch.nn.Parameter(torch.zeros(1))

    def new_memory(self, **settings):
        return []

    def forward(self, tokens, memory=None, last=False):
        logits = torch.zeros(*tokens.shape, SYMBOLS.vocab_size)
        if not memory:
            memory.append([{} for _ in tokens])
        for row, text, known in zip(logits, tokens.tolist(), memory[0], strict=True):
            for place, token in enumerate(text):
                if place and token >= 32:
                    known.setdefault(text[place - 1], token)
                if token in known:
                    row[place, known[token]] = 9.0
        if self.forgets:
            memory.clear()
        return logits


def settings(length, local, batch_size=None):
    return Config(
        size="test",
        model=ModelConfig(kind="landmark"),
        data=DataConfig(name="mqar", pairs=4),
        eval=EvalConfig(length, local, "test", batch_size=batch_size, prompts=10),
        retrieval=RetrievalConfig(k=2),
        memory=MemoryConfig(),
    )


def evaluated(model, config):
    corpus = synthetic_corpus(config.data, SYMBOLS)
    assert corpus is not None
    return evaluate_mqar(model, corpus, SYMBOLS, config)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(("length", "local"), [(64, 64), (64, 10), (400, 50)])
def test_a_model_that_remembers_recalls_everything(length, local, batch_size):
    results = evaluated(Table(LANDMARK), settings(length, local, batch_size))
    assert results["recall"] == 1
    assert results["correct"] == [4] * 10
    assert results["tokens"] == 40
    assert results["recall_low"] > 0.9


def test_a_model_that_forgets_recalls_what_is_asked_in_the_chunk_of_the_pairs():
    results = evaluated(Table(LANDMARK, forgets=True), settings(64, 10))
    assert 0 < results["recall"] < 0.5


def test_an_untrained_model_is_evaluated_on_the_real_path():
    torch.manual_seed(0)
    results = evaluated(Decoder(LANDMARK), settings(64, 10))
    assert results["recall"] < 0.5
    assert results["memory"]["retrievals"] > 0
