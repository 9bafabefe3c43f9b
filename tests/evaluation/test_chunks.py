"""What a segment's chunks attend to: counted here as in the FLOPs of a training."""

import pytest

from landmark.evaluation.chunks import attention_size
from landmark.training.fit import training_flops_per_token
from landmark.utils.flops import flops_per_token, keys_per_query
from tests.configurations import changed
from tests.evaluation.test_perplexity import LANDMARK, PLAIN, XL, model_of, settings
from tests.training.training_case import make_config


@pytest.mark.parametrize(("length", "window", "cache"), [(2048, 256, 256), (64, 16, 24), (50, 16, 0)])
def test_transformer_xl_attends_to_as_many_keys_in_training_and_evaluation(length, window, cache):
    shape = changed(XL, window=window, cache=cache)
    keys = keys_per_query(length, window, cache)
    assert attention_size(shape, settings(length), length, window) == (keys, 0.0)
    model = model_of(shape)
    config = make_config("transformer_xl", length=length)
    assert training_flops_per_token(model, config) == flops_per_token(model.num_parameters(), 2, 16, keys)


def test_keys_of_the_papers_transformer_xl():
    assert keys_per_query(2048, 256, 256) == 352.5


def test_a_plain_model_attends_to_its_whole_segment():
    assert attention_size(PLAIN, settings(64), 64, 64) == (keys_per_query(64), 0.0)


@pytest.mark.parametrize(("block", "window", "k", "dense"), [(5, 10, 3, 0), (4, 0, 2, 0), (3, 21, 1, 0), (4, 8, 2, 40)])
def test_a_model_that_reads_without_landmarks_attends_to_its_window_and_its_blocks(block, window, k, dense):
    """As the memory reads: blocks that end before the window of a query's block are far, and k of them are read."""
    config, shape = settings(64, k=k, window=window), changed(LANDMARK, block_size=block)
    config.model.as_is, config.memory.dense = True, dense
    config.retrieval.scorer, config.retrieval.granularity = "mean_key", "per_token_and_group"
    seen = []
    for query in range(64):
        far = max(0, query // block * block - window) // block
        seen.append(query + 1 - (0 if query // block * block < dense else max(0, far - k) * block))
    assert attention_size(shape, config, 64, 16)[0] == sum(seen) / 64
