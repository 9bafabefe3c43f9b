"""Learned landmarks, number by number in float64; and in a cache, cut anywhere, saved and loaded."""

import math

import pytest
import torch

from landmark.attention import Scoring
from landmark.memory.blocks.cache import BlockCache, rotate_by
from landmark.memory.blocks.scorers.landmarks import Landmarks, Scorer
from landmark.utils.errors import UserError

BATCH, HEADS, GROUP, DIM, SIZE, VECTORS = 2, 2, 3, 6, 5, 2
FREQUENCIES = torch.tensor([1.0, 0.3], dtype=torch.float64)  # 4 of 6 channels turn


def some(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def landmarks(dtype=torch.float64):
    sizes = torch.tensor([1.5, 0.7], dtype=dtype)
    new = Landmarks.new(SIZE, VECTORS, "model", {3: (HEADS, GROUP, DIM, sizes, FREQUENCIES)})
    for number, (name, x) in enumerate(new.layers[3].weights.items()):
        new.layers[3].weights[name] = x.to(dtype) + some(*x.shape, seed=number).to(dtype)
    return new


def by_hand(weights, sizes, head, keys, values, start):
    """Vectors and biases of one block, whose first token is at position `start`."""
    pooled = []
    tokens = []
    for token in range(SIZE):
        content = rotate_by(FREQUENCIES, keys[token][None, None], torch.tensor([-(start + token)]))[0, 0]
        tokens.append(torch.cat([content / sizes[0], values[token] / sizes[1]]))
    for vector in range(VECTORS):
        logits = [
            float(tokens[t] @ weights["pool"][head, vector] + weights["place"][head, vector, t]) for t in range(SIZE)
        ]
        total = math.log(sum(math.exp(x) for x in logits))
        shares = [math.exp(x - total) for x in logits]
        key = sum(share * each for share, each in zip(shares, keys, strict=True))
        features = sum(share * each for share, each in zip(shares, tokens, strict=True))
        middle = start + int((vector + 0.5) * SIZE / VECTORS)
        own = rotate_by(FREQUENCIES, (features @ weights["map"][head])[None, None], torch.tensor([middle]))[0, 0]
        pooled.append((key + own, float(features @ weights["bias"][head])))
    return pooled


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_vectors_and_scores(softcap):
    layer, first, blocks = landmarks().layers[3], 4, 3
    keys, values = (some(BATCH * HEADS, blocks, SIZE, DIM, seed=seed) for seed in (10, 11))
    queries = some(BATCH * HEADS, 2, GROUP, 4, DIM, seed=12)
    summaries = layer.summarise(keys, values, first)
    found = layer.score(queries, summaries, softcap)
    expected = torch.empty_like(found)
    for cache in range(BATCH * HEADS):
        head = cache % HEADS
        for block in range(blocks):
            made = by_hand(
                layer.weights, layer.sizes, head, keys[cache, block], values[cache, block], (first + block) * SIZE
            )
            for tile in range(2):
                for group in range(GROUP):
                    for row in range(4):
                        q, total = queries[cache, tile, group, row] * layer.weights["scale"][head, group], 0.0
                        for vector, bias in made:
                            product = float(q @ vector)
                            product = product if softcap is None else softcap * math.tanh(product / softcap)
                            total += math.exp(product + bias)
                        level = float(layer.weights["level"][head, group])
                        expected[cache, tile, group, row, block] = math.log(total) + level
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    moved = layer.moved(summaries, lambda x, by: rotate_by(FREQUENCIES, x, by), torch.tensor([7 * SIZE] * blocks))
    turned = rotate_by(FREQUENCIES, keys, torch.tensor([7 * SIZE] * blocks))
    torch.testing.assert_close(moved, layer.summarise(turned, values, first + 7), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.score(queries[:, 0], summaries, softcap), found[:, 0], rtol=0, atol=1e-12)


ANYWHERE, BETWEEN_BLOCKS = (1, 2, 12, 35, 36, 58, 59), (5, 10, 35, 45, 60, 65)


@pytest.mark.parametrize(
    ("granularity", "gates", "stops"),
    [
        ("per_token_and_group", False, ANYWHERE),
        *((granularity, True, ANYWHERE) for granularity in ("per_token_and_group", "per_token_and_head", "per_token")),
        ("per_head", True, BETWEEN_BLOCKS),
    ],
)
def test_a_text_is_read_alike_however_it_is_cut_and_where_its_memory_was_saved(tmp_path, granularity, gates, stops):
    landmarks().save(file := tmp_path / "l.safetensors")
    settings = {"window": 5, "dense": 0, "scorer": {"name": "landmarks", "file": str(file)}, "gates": gates}
    settings |= {"positions": 40, "frequencies": FREQUENCIES, "granularity": granularity}

    def new():
        return BlockCache(SIZE, 3, **settings)

    q, k, v = (some(BATCH, n, 83, DIM, seed=n) for n in (HEADS * GROUP, HEADS, HEADS + 5))
    v = v[:, :HEADS]

    def read(memory, *stops):
        out = []
        for stop in stops:
            start = memory.position
            out.append(memory.attend(3, *(x[:, :, start:stop] for x in (q, k, v)), Scoring()))
            memory.commit()
        return torch.cat(out, 2)

    whole = read(new(), 83)
    *before, saved, after = stops
    pieces = read(memory := new(), *before, saved)
    torch.testing.assert_close(pieces, whole[:, :, :saved], rtol=0, atol=1e-12)
    memory.save(tmp_path / "memory")
    (loaded := new()).load(tmp_path / "memory")
    for each in (memory, loaded, memory.beginning(saved, {})):
        torch.testing.assert_close(read(each, after, 83), whole[:, :, saved:], rtol=0, atol=1e-12)
    mean = BlockCache(SIZE, 3, **settings | {"scorer": "mean_key"})
    assert (read(mean, 83) - whole).abs().max() > 1e-3


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x").write_text("text")
    scorer = Scorer(str(tmp_path / "x"))
    with pytest.raises(UserError, match="holds no landmarks"):
        scorer.in_layer(3)
    with pytest.raises(UserError, match="there is no such file, task=teach"):
        Scorer(str(tmp_path / "none")).in_layer(3)
    landmarks().save(tmp_path / "x")
    with pytest.raises(UserError, match=r"no landmarks of layer 4, only of \[3\]"):
        scorer.in_layer(4)
    scorer.check_model(lambda: "model", SIZE)
    with pytest.raises(UserError, match=f"set model.block_size={SIZE}"):
        scorer.check_model(lambda: "model", 32)
    with pytest.raises(UserError, match="were learned from another model"):
        scorer.check_model(lambda: "other", SIZE)
