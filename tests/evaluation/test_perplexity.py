"""A row's perplexity: which predictions count, fed how, with which memory."""

import math

import numpy as np
import pytest
import torch

from landmark.config.schema import CmtConfig, Config, EvalConfig, MemoryConfig, PositionsConfig, RetrievalConfig
from landmark.data.stream import Stream
from landmark.data.tokenizers import load_tokenizer
from landmark.evaluation.chunks import attention_size
from landmark.evaluation.rows import evaluate
from landmark.models import Decoder
from landmark.training.fit import training_flops_per_token
from landmark.utils.flops import flops_per_token, keys_per_query
from tests.configurations import changed, decoder_config
from tests.training.training_case import make_config

TOKENIZER = load_tokenizer("bytes")
PLAIN = decoder_config("transformer", vocab_size=320, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32)
LANDMARK = changed(PLAIN, kind="landmark", block_size=5, landmark_id=257)
XL = changed(PLAIN, kind="transformer_xl", window=16, cache=16)


@pytest.fixture
def stream():
    text = ("It was the best of times, it was the worst of times. " * 30).encode()
    tokens = np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), np.array([256], np.uint16)])
    return Stream(tokens, "")


def settings(
    length=64, local=None, k=2, span=256, cutoff=0.0, mapping="stingy", tokens=None, batch_size=None, **memory
):
    return Config(
        eval=EvalConfig(length, local, "test", tokens, span, batch_size),
        retrieval=RetrievalConfig(k=k),
        memory=MemoryConfig(**memory),
        cmt=CmtConfig(cutoff=cutoff),
        positions=PositionsConfig(mapping=mapping),
    )


def model_of(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    return model


def test_whole_split_by_hand(stream):
    model, seen = model_of(PLAIN), []
    result = evaluate(model, stream, TOKENIZER, settings(batch_size=5), progress=lambda *x: seen.append(x))
    count = (len(stream) - 1) // 64
    assert seen[-1] == (count * 64, count * 64)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    tokens = torch.from_numpy(stream.tokens.astype(np.int64))
    expected = 0.0
    for i in range(count):
        part = tokens[i * 64 : i * 64 + 65]
        logits = model(part[None, :-1])[0].detach()
        expected += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    assert result["tokens"] == count * 64
    assert result["nll"] == pytest.approx(expected / (count * 64), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["bits_per_byte"] == pytest.approx(result["nll"] / math.log(2), rel=1e-9)  # a token is a byte here
    assert sum(n for n, _ in result["position_nll"]) == result["tokens"]
    assert sum(x for _, x in result["position_nll"]) == pytest.approx(expected, rel=1e-5)
    assert result["keys_attended"] == 32.5


def test_batches_do_not_matter(stream):
    model = model_of(LANDMARK)
    found = [
        evaluate(model, stream, TOKENIZER, settings(local=20, batch_size=size, tokens=448, span=448))["segments"]
        for size in (1, 3, 100)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4)


def test_memory_that_holds_everything_equals_one_window(stream):
    """Wherever its blocks are put; with fewer of them, the places matter."""
    model = model_of(LANDMARK)
    whole, losses = evaluate(model, stream, TOKENIZER, settings(length=60)), set()
    for mapping in ("stingy", "true"):
        chunks, fewer = (
            evaluate(model, stream, TOKENIZER, settings(length=60, local=17, k=k, mapping=mapping)) for k in (12, 4)
        )
        assert chunks["nll"] == pytest.approx(whole["nll"], rel=1e-4)
        assert abs(fewer["nll"] - whole["nll"]) > 1e-4
        assert fewer["keys_attended"] < chunks["keys_attended"] == whole["keys_attended"] == 30.5
        losses.add(fewer["nll"])
    assert len(losses) == 2


def test_dropped_lookups_are_counted_and_attend_to_nothing(stream):
    model = model_of(changed(LANDMARK, cmt=True))
    kept, half, none = (
        evaluate(model, stream, TOKENIZER, settings(local=17, batch_size=4, cutoff=cutoff))
        for cutoff in (0.0, 0.2, 1.0)
    )
    rates = [result["memory"]["drop_rate"] for result in (kept, half, none)]
    assert rates[0] == 0 < rates[1] < rates[2] == 1
    lookups = [result["memory"]["lookups"] for result in (kept, half, none)]
    assert lookups[1] / lookups[0] == pytest.approx(1 - rates[1])
    heads = [rate for layer in half["memory"]["drop_rates"] for rate in layer]
    assert len(heads) == 4
    assert sum(heads) / 4 == pytest.approx(rates[1])
    attended = [result["keys_attended"] for result in (kept, half, none)]
    assert (attended[0] - attended[1]) / (attended[0] - attended[2]) == pytest.approx(rates[1])
    assert none["memory"]["skipped"] == 1
    assert len({result["nll"] for result in (kept, half, none)}) == 3


def test_transformer_xl_reads_its_windows_and_a_plain_transformer_with_sinks_and_a_window(stream):
    model = model_of(XL)
    result = evaluate(model, stream, TOKENIZER, settings(length=64))
    assert result["keys_attended"] == 8.5 + 16 * 3 / 4
    plain = evaluate(model_of(PLAIN), stream, TOKENIZER, settings(length=64))
    assert result["nll"] != pytest.approx(plain["nll"], rel=1e-4)
    long = evaluate(model_of(changed(XL, cache=64)), stream, TOKENIZER, settings(length=64))
    assert long["nll"] == pytest.approx(plain["nll"], rel=1e-4)
    model = model_of(PLAIN)
    whole = evaluate(model, stream, TOKENIZER, settings(length=64))
    everything = evaluate(model, stream, TOKENIZER, settings(length=64, local=16, window=60))
    assert everything["nll"] == pytest.approx(whole["nll"], rel=1e-4)
    assert everything["keys_attended"] == whole["keys_attended"]
    part = evaluate(model, stream, TOKENIZER, settings(length=64, local=16, window=12, sinks=2))
    assert part["nll"] != pytest.approx(whole["nll"], rel=1e-4)
    assert part["keys_attended"] == 8.5 + 14 * 3 / 4
    assert part["memory"]["keys_kept"] == 14


def test_every_row_of_a_budget_counts_the_same_text(stream):
    model = model_of(LANDMARK)
    rows = [evaluate(model, stream, TOKENIZER, settings(length=n, tokens=600, span=200)) for n in (200, 50, 36)]
    assert {row["tokens"] for row in rows} == {600}
    starts = [{s[0] for s in row["segments"]} for row in rows]
    assert starts[0] < starts[1]
    for row in rows:
        assert row["nll"] == pytest.approx(sum(s[2] for s in row["segments"]) / 600)


@pytest.mark.parametrize(("length", "window", "cache"), [(2048, 256, 256), (64, 16, 24), (50, 16, 0), (10, 16, 16)])
def test_transformer_xl_attends_to_as_many_keys_in_training_and_evaluation(length, window, cache):
    shape = changed(XL, window=window, cache=cache)
    keys, starts = keys_per_query(length, window, cache), [at // window * window for at in range(length)]
    assert keys == pytest.approx(sum(at - start + 1 + min(start, cache) for at, start in enumerate(starts)) / length)
    assert keys == 352.5 or length < 2048  # of the paper's
    assert attention_size(PLAIN, settings(64), 64, 64) == (keys_per_query(64), 0.0)
    assert attention_size(shape, settings(length), length, window) == (keys, 0.0)
    model = model_of(shape)
    config = make_config("transformer_xl", length=length)
    assert training_flops_per_token(model, config) == flops_per_token(model.num_parameters(), 2, 16, keys)


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
