"""Probes of models that truly look back, of models that cannot, and of real ones whose losses are summed by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.config.schema import ModelConfig
from landmark.data.evaluation_texts import copies
from landmark.data.stream import Stream
from landmark.evaluation.rows import evaluate_copy
from landmark.models.language_model import LanguageModel
from landmark.utils.significance import mean_and_error, paired_difference
from tests.evaluation import test_perplexity
from tests.evaluation.test_perplexity import LANDMARK, PLAIN, TOKENIZER, model_of

V = TOKENIZER.vocab_size
NOTHING = math.log(V)  # the loss of a guess


class Text(list):
    """A memory that keeps the chunks of a text; with `forgets` none of them."""

    stats: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, forgets):
        super().__init__()
        self.forgets = forgets


class Copier(LanguageModel):
    """Predicts the token that followed when the last token came before; guesses where it did not."""

    def __init__(self, config, certainty=50.0, forgets=False):
        super().__init__()
        self.config, self.certainty, self.forgets = config, certainty, forgets
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.chunks = []

    def new_memory(self, **settings):
        self.settings = settings
        return Text(self.forgets)

    def forward(self, tokens, memory=None, last=False):
        self.chunks.append(tuple(tokens.shape))
        before = [] if memory is None or memory.forgets else list(memory)
        read = torch.cat([*before, tokens], 1)
        logits = torch.zeros(*read.shape, V)
        for row, text in zip(logits, read.tolist(), strict=True):
            followers = {}
            for place, token in enumerate(text):
                if place:
                    followers[text[place - 1]] = token
                if token in followers:
                    row[place, followers[token]] = self.certainty
        if memory is not None:
            memory.append(tokens)
        return logits[:, -tokens.shape[1] :]


@pytest.fixture
def stream():
    """No token comes twice within 251."""
    tokens = (7 * np.arange(3000) % 251).astype(np.uint16)
    return Stream(tokens, "")


def settings(length=60, local=None, prompts=6, **given):
    """Of a row. Which memory it gets is up to the model's own configuration."""
    config = test_perplexity.settings(length, local, **given)
    config.size, config.model = "test", ModelConfig(kind="landmark")
    config.eval.prompts, config.eval.task = prompts, "copy"
    return config


@pytest.mark.parametrize(("length", "local"), [(60, None), (60, 7), (480, 50)])
def test_a_model_that_copies_pays_for_the_first_copy_alone(stream, length, local):
    results = evaluate_copy(Copier(LANDMARK), stream, settings(length, local))
    assert results["first_copy"] == pytest.approx(NOTHING)
    assert results["second_copy"] == results["nll"] < 1e-6
    assert results["perplexity"] == pytest.approx(1)
    assert results["tokens"] == 6 * (length // 2 - 1)
    assert results["prompts"] == 6


def test_a_model_that_knows_nothing_has_chance_and_rows_of_one_length_are_paired_segment_by_segment(stream):
    results = evaluate_copy(Copier(PLAIN, certainty=0.0), stream, settings())
    assert results["first_copy"] == pytest.approx(NOTHING) == results["second_copy"]
    assert results["second_copy_se"] == pytest.approx(0, abs=1e-9)
    # Nor has one that forgets its chunks: its text comes again just when it is gone.
    assert evaluate_copy(Copier(LANDMARK, forgets=True), stream, settings(60, 30))["nll"] == pytest.approx(NOTHING)
    copier, uniform = (evaluate_copy(Copier(LANDMARK, sure), stream, settings()) for sure in (50.0, 0.0))
    found = paired_difference(copier["segments"], uniform["segments"])
    assert found.stretches == 6
    assert found.nats == pytest.approx(-NOTHING)
    longer = evaluate_copy(Copier(LANDMARK), stream, settings(80))
    assert paired_difference(copier["segments"], longer["segments"]) is None


def test_segments_are_read_in_chunks_and_each_in_a_new_memory(stream):
    model = Copier(LANDMARK)
    seen = []
    results = evaluate_copy(model, stream, settings(60, 25, k=3, batch_size=4), progress=lambda *x: seen.append(x))
    assert model.chunks == [(4, 25), (4, 25), (4, 9), (2, 25), (2, 25), (2, 9)]  # the last token is not read
    assert model.settings["k"] == 3
    assert seen == [(240, 360), (360, 360)]
    assert results["first_copy"] == pytest.approx(NOTHING)  # else an earlier segment would be known


def test_losses_by_hand(stream):
    model = model_of(PLAIN)
    results = evaluate_copy(model, stream, settings(batch_size=4))
    first, second = [], []
    for tokens in torch.from_numpy(copies(settings().eval, stream)[0]):
        logits = model(tokens[None])[0].detach()
        for sums, those in zip((first, second), (range(1, 30), range(31, 60)), strict=True):
            sums.append(sum(float(F.cross_entropy(logits[p - 1], tokens[p])) for p in those))
    assert [each[1] for each in results["segments"]] == [29] * 6
    np.testing.assert_allclose([each[2] for each in results["segments"]], second, rtol=1e-4)
    assert results["nll"] == pytest.approx(sum(second) / (6 * 29), rel=1e-5)
    assert results["nll_se"] == pytest.approx(mean_and_error([[0, 29, nats] for nats in second])[1], rel=1e-3)
    assert results["first_copy"] == pytest.approx(sum(first) / (6 * 29), rel=1e-5)
    assert results["first_copy_se"] == pytest.approx(np.std(first, ddof=1) / 29 / math.sqrt(6), rel=1e-3)
    assert results["first_segments"] != results["segments"]
