"""A row's perplexity: which predictions count, fed how, with which memory; and what its memory retrieves."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.experiment.config import schema
from landmark.experiment.data.evaluation_texts import copies
from landmark.experiment.data.stream import Stream
from landmark.experiment.data.tokenizers import load_tokenizer
from landmark.experiment.evaluation import rows
from landmark.experiment.evaluation.chunks import attention_size
from landmark.experiment.evaluation.retrieval import CELLS, RetrievalMap, distinct
from landmark.experiment.evaluation.rows import evaluate, evaluate_copy
from landmark.experiment.training.fit import training_flops_per_token
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.models import Decoder
from landmark.utils.flops import flops_per_token, keys_per_query
from landmark.utils.significance import paired_difference
from tests.configurations import changed, decoder_config
from tests.experiment.training.training_case import make_config
from tests.models.test_decoder import tiny

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
    return schema.Config(
        eval=schema.EvalConfig(length, local, "test", tokens, span, batch_size),
        retrieval=schema.RetrievalConfig(k=k),
        memory=schema.MemoryConfig(**memory),
        cmt=schema.CmtConfig(cutoff=cutoff),
        positions=schema.PositionsConfig(mapping=mapping),
    )


def model_of(config):
    return tiny(config, scale=10).float().eval()


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
        expected += float(F.cross_entropy(logits, part[1:], reduction="sum"))
    assert result["tokens"] == count * 64
    assert result["nll"] == pytest.approx(expected / (count * 64), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["bits_per_byte"] == pytest.approx(result["nll"] / math.log(2), rel=1e-9)  # a token is a byte here
    assert sum(n for n, _ in result["position_nll"]) == result["tokens"]
    assert sum(x for _, x in result["position_nll"]) == pytest.approx(expected, rel=1e-5)
    assert result["keys_attended"] == 32.5


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


@pytest.mark.parametrize(("block", "window", "k", "dense"), [(5, 10, 3, 0), (4, 0, 2, 0), (3, 20, 1, 0), (4, 8, 2, 40)])
def test_a_model_that_reads_without_landmarks_attends_to_its_window_and_its_blocks(block, window, k, dense):
    """As the memory reads: blocks that end before the window of a query's block are far, and k of them are read."""
    config, shape = settings(64, k=k, window=window), changed(LANDMARK, block_size=block)
    config.model.as_is, config.memory.dense = True, dense
    config.retrieval.scorer, config.retrieval.granularity = "mean_key", "per_token_and_group"
    seen = []
    for query in range(64):
        far = max(0, query // block * block - math.ceil(window / block) * block) // block
        seen.append(query + 1 - (0 if query // block * block < dense else max(0, far - k) * block))
    assert attention_size(shape, config, 64, 16)[0] == sum(seen) / 64


# ---- the copy probe against sums by hand; observers, on the retrievals of real models, against plain loops


BLOCK = 5  # of the model LANDMARK
CMT = changed(LANDMARK, cmt=True)


def copy_settings(length=60, local=None, prompts=6, **given):
    """Which memory a row gets is up to the model's own configuration."""
    config = settings(length, local, **given)
    config.size, config.model = "test", schema.ModelConfig(kind="landmark")
    config.eval.prompts, config.eval.task = prompts, "copy"
    return config


@pytest.mark.parametrize(("shape", "local"), [(PLAIN, None), (LANDMARK, 25)])
@torch.no_grad()
def test_losses_of_both_copies_by_hand(shape, local, stream):
    """Each text is read in chunks with a memory of its own, and its last token is not read."""
    model, chunks, seen = model_of(shape), [], []
    hook = model.register_forward_pre_hook(lambda _, given: chunks.append(tuple(given[0].shape)))
    given = copy_settings(60, local, k=1, batch_size=4)
    results = evaluate_copy(model, stream, given, progress=lambda *done: seen.append(done))
    hook.remove()
    assert chunks == [(texts, size) for texts in (4, 2) for size in ([25, 25, 9] if local else [59])]
    assert seen == [(240, 360), (360, 360)]
    first, second = [], []
    for tokens in torch.from_numpy(copies(given.eval, stream)[0]):
        memory = model.new_memory(k=1) if local else None
        logits = torch.cat([model(part[None], memory=memory)[0] for part in tokens[:-1].split(local or 59)])
        for sums, those in zip((first, second), (range(1, 30), range(31, 60)), strict=True):
            sums.append(sum(float(F.cross_entropy(logits[p - 1], tokens[p])) for p in those))
    assert [each[1] for each in results["segments"]] == [29] * 6
    np.testing.assert_allclose([each[2] for each in results["segments"]], second, rtol=1e-4)
    assert results["second_copy"] == results["nll"] == pytest.approx(sum(second) / (6 * 29), rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(results["nll"]))
    assert (results["prompts"], results["tokens"]) == (6, 6 * 29)
    assert results["first_copy"] == pytest.approx(sum(first) / (6 * 29), rel=1e-5)
    assert results["first_segments"] != results["segments"]
    assert paired_difference([results["segments"]], [results["first_segments"]]).nats < 0


def test_long_texts_have_cells_of_several_blocks():
    found = RetrievalMap(2 * 5 * CELLS + 2, 10, 5)
    assert found.cell == 15
    assert (found.size - 1) * 15 < 2 * 5 * CELLS + 1 <= found.size * 15


def plain_map(model, texts, config, layer, head, is_weighed):
    """Of a head its map, the share of blocks found, and their weight, by loops over what the observer is told."""
    length, local, block = config.eval.length, config.eval.local, BLOCK
    size = -(-(length - 1) // block)
    sums, queries, hits, counted, right = np.zeros((size, size)), np.zeros(size), 0, 0, 0.0
    for text in texts:
        told = []
        asked = config.retrieval
        kept = {
            "k": asked.k,
            "granularity": asked.granularity,
            "scorer": asked.scorer,
            "max_blocks": config.memory.blocks,
        }
        memory = model.new_memory(**kept, cutoff=config.cmt.cutoff, observer=told.append)
        for start in range(0, length - 1, local):
            told.clear()
            before = start // block
            with torch.no_grad():
                model(text[None, start : min(start + local, length - 1)], memory=memory)
            ages, weights = (each[0, head].tolist() for each in told[layer].per_query())
            token = start
            for place, (each, share) in enumerate(zip(ages, weights, strict=True)):
                if (told[layer].position + place) % (BLOCK + 1) == BLOCK:
                    continue
                queries[token // block] += 1
                earlier = (token - length // 2) // block
                chosen = [before - age for age in each if age]
                for number, weight in zip(chosen, [w for a, w in zip(each, share, strict=True) if a], strict=True):
                    weight = weight if is_weighed else 1.0
                    sums[token // block, number] += weight
                    right += weight * (number == earlier)
                if token // local > length // 2 // local and earlier < before:
                    counted += 1
                    hits += earlier in chosen
                token += 1
    return sums / queries[:, None], hits / counted, right


class WithoutWeights(RetrievalMap):
    """As with a fused kernel, which tells no weights."""

    def __call__(self, retrieval):
        super().__call__(replace(retrieval, weights=None))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("shape", "length", "local", "blocks", "scorer", "kind"),
    [
        (LANDMARK, 80, 17, None, "landmark", RetrievalMap),
        (LANDMARK, 80, 17, 4, "mean_key", WithoutWeights),
        (LANDMARK, 84, 17, None, "recent", RetrievalMap),
        *((CMT, 84, 43, None, "landmark", kind) for kind in (RetrievalMap, WithoutWeights)),
    ],
)
def test_a_real_map_equals_plain_loops(stream, granularity, shape, length, local, blocks, scorer, kind, monkeypatch):
    """Some queries are below the cutoff, and retrieve nothing, not the first block."""
    if scorer == "recent" and granularity != "per_token_and_head":
        pytest.skip("the last blocks take no granularity")
    monkeypatch.setattr(rows, "RetrievalMap", kind)
    model, config = model_of(shape), copy_settings(length, local, k=3, prompts=3, batch_size=2, blocks=blocks)
    config.retrieval.granularity, config.retrieval.scorer = granularity, scorer
    config.cmt.cutoff, is_weighed = 0.2 if shape is CMT else 0.0, kind is RetrievalMap
    results = evaluate_copy(model, stream, config)
    shown = results["copy_map"]
    assert (0 < results["memory"].get("drop_rate", 0.0) < 1) == (shape is CMT)
    texts = torch.from_numpy(copies(config.eval, stream)[0])
    heads = [(layer, head) for layer in range(2) for head in range(2)]
    expected = {each: plain_map(model, texts, config, *each, is_weighed) for each in heads}
    best, found, right = expected[shown["layer"], shown["head"]]
    assert right == pytest.approx(max(each[2] for each in expected.values()), rel=1e-4)
    np.testing.assert_allclose(shown["best"], best, atol=1e-4)
    assert shown["found"] == pytest.approx(found, abs=1e-4)
    assert (found == 0) == (scorer == "recent" or blocks is not None)
    assert (shown["cell"], shown["share_of"]) == (BLOCK, "attention" if is_weighed else "queries")


def test_only_rows_that_retrieve_have_a_map_and_only_unique_blocks_statistics_of_keys_moved_once(stream):
    for config, given in (
        (LANDMARK, copy_settings(60)),  # one chunk
        (LANDMARK, copy_settings(60, 17, k=0)),
        (PLAIN, copy_settings(60)),
        (XL, copy_settings(60, 16)),
    ):
        assert "copy_map" not in evaluate_copy(model_of(config), stream, given)
    assert "retrieval" not in evaluate(model_of(LANDMARK), stream, TOKENIZER, settings(local=20))  # unless asked for
    ages = torch.tensor([[[[1, 2]], [[2, 3]], [[1, 2]], [[1, 2]]]])  # four heads, one set each
    blocks, pairs = distinct(ages, kept=5, kv_heads=2)
    assert (blocks.tolist(), pairs.tolist()) == ([3], [3 + 2])
    assert distinct(ages, kept=5, kv_heads=4)[1].tolist() == [8]


LENGTH, LOCAL, K = 64, 20, 3  # chunks of 20, 20, 20 and 4; before the third 8 blocks of 5 are there


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_statistics_equal_plain_loops(stream, granularity):
    config = settings(length=LENGTH, local=LOCAL, k=K, batch_size=7)
    config.eval.task = "unique_blocks"
    config.retrieval.granularity = granularity
    model, stream = model_of(LANDMARK), replace(stream, tokens=stream.tokens[:600])
    found = evaluate(model, stream, TOKENIZER, config)["retrieval"]
    segments = (len(stream) - 1) // LENGTH
    counts, pairs = np.zeros((2, 9), int), np.zeros(2)
    for segment in range(segments):
        for layer, ages in enumerate(retrieved(model, stream, segment * LENGTH, granularity)):
            heads = 2 if granularity == "per_token" else 1  # heads that choose as one
            blocks, moved = set(), set()
            for head, tokens in enumerate(ages.tolist()):
                for token in tokens:
                    blocks |= set(token)
                    moved |= {(head, block) for block in token}
            counts[layer, len(blocks)] += 1
            pairs[layer] += len(moved) * heads
    assert (found["samples"], found["blocks_cached"]) == (segments, 8)
    assert [layer["distinct_blocks"] for layer in found["layers"]] == counts.tolist()
    bytes_a_pair = 2 * 5 * 8 * 4  # keys and values of 5 tokens, 8 numbers of 4 bytes
    np.testing.assert_allclose([layer["bytes_moved"] for layer in found["layers"]], pairs / segments * bytes_a_pair)
    assert found["bytes_moved"] == pytest.approx(pairs.sum() / segments * bytes_a_pair)
    assert found["bytes_cached"] == 2 * 2 * 8 * bytes_a_pair
    assert found["distinct_blocks"] == pytest.approx((counts @ np.arange(9)).sum() / segments / 2)


def retrieved(model: Decoder, stream, start: int, granularity: str) -> list[torch.Tensor]:
    """Ages (H or 1, T or 1, q) of each layer in the third chunk, fed by hand."""
    seen = []
    memory = model.new_memory(k=K, granularity=granularity, observer=lambda retrieval: seen.append(retrieval.ages[0]))
    tokens = torch.from_numpy(stream.tokens[start : start + 3 * LOCAL].astype(np.int64))[None]
    for chunk in tokens.split(LOCAL, 1):
        seen.clear()
        with torch.no_grad():
            model(chunk, memory=memory)
    return seen
