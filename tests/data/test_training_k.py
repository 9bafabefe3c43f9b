"""`train.k`: the number of blocks that a step's queries attend to."""

import itertools

import pytest
import torch

from landmark.data.datamodule import WindowDataModule
from landmark.models import build
from tests.training.training_case import TOKENIZER, make_config, make_corpus


def module_of(folder, k, rank=0, devices=1):
    config = make_config("landmark")
    config.train.k = k
    module = WindowDataModule(make_corpus(folder), TOKENIZER, config)
    module.trainer = type("Trainer", (), {"global_rank": rank, "world_size": devices})()  # pyright: ignore
    return module


def drawn(module, count, start=0):
    module.start_step = start
    return [batch.top_k for batch in itertools.islice(module.train_dataloader(), count)]


def test_each_step_draws_one_of_the_numbers(tmp_path):
    """A function of the step alone: after a resume and on every device the same."""
    found = drawn(module_of(tmp_path, [1, 2, 4]), 60)
    assert all(10 < found.count(k) < 30 for k in (1, 2, 4))
    assert drawn(module_of(tmp_path, [1, 2, 4]), 20, start=40) == found[40:]
    assert drawn(module_of(tmp_path, [1, 2, 4], rank=1, devices=2), 60) == found
    assert drawn(module_of(tmp_path, None), 3) == [None] * 3


def test_validation_reads_all_blocks(tmp_path):
    assert {batch.top_k for batch in module_of(tmp_path, [1]).val_dataloader()} == {None}


@pytest.mark.parametrize("k", [1, 100])
def test_the_models_losses_follow_it(k, tmp_path):
    module, every = module_of(tmp_path, [k]), module_of(tmp_path, None)
    config = make_config("landmark")
    model = build(config.model, TOKENIZER)
    batch, whole = (next(iter(each.train_dataloader())) for each in (module, every))
    (loss, _), (expected, _) = (next(iter(model.window_losses(each.rows(slice(0, 2))))) for each in (batch, whole))
    assert torch.equal(batch.tokens, whole.tokens)
    assert bool((loss - expected).abs() < 1e-6) == (k == 100)
