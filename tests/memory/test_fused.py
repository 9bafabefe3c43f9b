"""A memory with the fused kernels, interpreted, gives the numbers of the other backends, on every tier."""

import pytest
import torch

from landmark.attention import ContextMiss, Grouped
from landmark.attention.fused.tuning import MOST_BLOCKS
from landmark.attention.keys import Keys
from landmark.memory import Memory, Store, TruePositions
from landmark.memory.landmarks import memory as memory_module
from landmark.memory.landmarks import reading_kernels
from landmark.memory.landmarks.select import Best, Newest
from landmark.memory.landmarks.select.scores_kernels import top_k_landmarks
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.memory.landmarks.step import NextToken, can_step
from landmark.models import DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.constants import MAPPINGS, TIERS
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of
from tests.saved import random_decoder
from tests.tape import tapes_of

CASES = all_pairs(
    {
        "chunks": [((3, 2), (0, 4)), ((2, 1), (0, 1), (0, 3)), ((3, 0), (0, 17))],  # blocks, and tokens more
        "heads": [(2, 2), (4, 2), (3, 1)],
        "batch": [1, 2],
        "dim": [4, 20],
        "cutoff": [None, 0.0, 0.5],
        "block_size": [1, 3, 20],
        "k": [0, 2, 3],
        "max_blocks": [None, 4],
        "granularity": GRANULARITIES,
        "layer": [0, 1],
        "mapping": MAPPINGS,
        "tier": TIERS,
        "second look": [None, 5],
        "keys": [(0.0, "token"), (0.5, "mean")],
        "alpha": [0.0, 0.5, 1.0],
        "splits": [1, 3],
    },
    lambda case: (  # few queries, where a program of the interpreter has one
        (case["second look"] is None or case["granularity"].startswith("per_token_and"))
        and (case["chunks"][-1] != (0, 17) or case["granularity"] == "per_head")
        and (case["batch"] == 1 or case["heads"] != (4, 2))
    ),
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernels_read_what_the_other_backends_do(case, monkeypatch, new_memory_is_nan):
    monkeypatch.setattr(reading_kernels, "splits_of", lambda *_: case["splits"])
    chunks = [blocks * (case["block_size"] + 1) + tokens for blocks, tokens in case["chunks"]]
    q, k, v, cmt = texts(sum(chunks), case["heads"], case["batch"], case["dim"])
    names = "block_size", "k", "max_blocks", "granularity", "mapping"
    settings = {name: case[name] for name in names} | {"cutoff": case["cutoff"] or 0.0, "rerank": case["second look"]}
    settings |= {"keys": Keys(*case["keys"]), "gate": Grouped(case["alpha"])}
    reading = {"layer": case["layer"], "extra": None if case["cutoff"] is None else ContextMiss(cmt)}
    memory, other = new_memory(**settings, tier=case["tier"], backend="triton"), new_memory(**settings)
    ours, expected = (feed(each, q, k, v, chunks, **reading) for each in (memory, other))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    for name in ("searches", "searches_skipped", "lookups", "retrievals", "blocks_retrieved"):
        assert memory.stats[name] == other.stats[name], name


@pytest.mark.parametrize(
    ("granularity", "rerank"), [("per_head", None), ("per_token_and_head", None), ("per_token_and_head", 4)]
)
def test_half_precision(granularity, rerank, monkeypatch):
    """The type of the queries, not that of the scores, decides whether kernels run: larger blocks would not fit."""
    asked, chosen = [], memory_module.backend_for
    monkeypatch.setattr(
        memory_module, "backend_for", lambda name, like, *rest: asked.append(like.dtype) or chosen(name, like, *rest)
    )
    q, k, v, _ = texts(36, (4, 2), batch=1, dtype=torch.float16)
    settings = {"k": 2, "granularity": granularity, "rerank": rerank}
    ours, expected = (
        feed(new_memory(5, **settings, backend=backend), q, k, v, [24, 11, 1]) for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, expected, atol=4e-3, rtol=4e-3)
    assert set(asked) == {torch.float16}


def test_blocks_whose_numbers_are_not_beside_each_other_are_read():
    generator = torch.Generator().manual_seed(0)
    rotated, keys, values = (torch.randn(*size, generator=generator) for size in ((2, 1, 3, 2, 8), *[(8, 5, 8)] * 2))
    others = torch.randn(1, 2, 4, 8, generator=generator), torch.tensor([3, 1]).expand(1, 2, 3, 2)
    strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (rotated, keys, values)]
    expected = reading_kernels.attend_to_retrieved_blocks(rotated, keys, values, *others, added=4, recent=1)
    ours = reading_kernels.attend_to_retrieved_blocks(*strided, *others, added=4, recent=1)
    torch.testing.assert_close(ours, expected)


def sorted_ages(rotated, landmarks, added, recent, k):
    """The ages of the k best blocks, by plain loops; scores are exact, for small integers."""
    lags, batch, queries, heads, _ = rotated.shape
    kv_heads, capacity = landmarks.shape[1:3]
    chosen = torch.empty(batch, heads, queries, k, dtype=torch.int64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        scored = []
        for row in range(min(added, capacity)):
            age = (added - 1 - row) % capacity + 1
            score = rotated[(age if age <= recent else lags) - 1, b, t, h] @ landmarks[b, h * kv_heads // heads, row]
            scored.append((-float(score), age))
        chosen[b, h, t] = torch.tensor(sorted(age for _, age in sorted(scored)[:k]))
    return chosen.flip(-1)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "dim", "capacity", "added", "recent", "k", "tied"),
    [
        (1, 2, 2, 4, 130, 130, 3, 3, False),  # one query of a head: no matrix product
        (1, 4, 2, 20, 96, 150, 4, 4, False),  # a ring buffer that went round, heads that share keys, a padded dimension
        (9, 4, 2, 16, 70, 70, 0, 5, False),  # true positions
        (3, 2, 1, 8, 20, 17, 6, 16, False),  # fewer landmarks than a tile
        (5, 1, 1, 8, 64, 200, 2, 1, False),
        *((queries, 4, 2, 8, 20, added, 3, 4, True) for queries, added in ((1, 9), (5, 9), (1, 40), (5, 40))),
    ],
)
def test_best_blocks_and_among_equal_scores_the_newer(queries, heads, kv_heads, dim, capacity, added, recent, k, tied):
    """Few different scores, zeros of both signs among them. tied: landmarks of older blocks are the same but for
    rounding, so that a sort of the scores themselves would take any of them."""
    generator = torch.Generator().manual_seed(0)
    rotated = torch.randint(-1, 2, (recent + 1, 2, queries, heads, dim), generator=generator).float()
    landmarks = torch.randint(-1, 2, (2, kv_heads, capacity, dim), generator=generator).float()
    landmarks[:, :, ::3] = -0.0
    older = [(added - age) % capacity for age in range(recent + 1, min(added, capacity) + 1)] if tied else [0]
    landmarks[:, :, older] = landmarks[:, :, older[:1]].clone()
    expected, of_store = sorted_ages(rotated, landmarks, added, recent, k), {"recent": recent, "k": k, "tied": tied}
    landmarks[:, :, older[1:]] += 1e-3 * torch.rand(2, kv_heads, len(older) - 1, dim, generator=generator)
    for count in (added, torch.tensor(added)):
        assert torch.equal(top_k_landmarks(rotated, landmarks, added=count, **of_store), expected)
    if tied:
        of_store["tied"] = False
        assert not torch.equal(top_k_landmarks(rotated, landmarks, added=added, **of_store), expected)


@pytest.mark.parametrize("blocks", [100, 9000])
def test_as_many_as_a_tile_holds_of_more_tiles_than_are_merged_at_once(blocks):
    rotated, landmarks = torch.randn(1, 1, 1, 1, 8), torch.randn(1, 1, blocks, 8)
    ours = top_k_landmarks(rotated, landmarks, added=blocks, recent=0, k=MOST_BLOCKS)
    expected = blocks - (landmarks[0, 0] @ rotated.flatten()).topk(MOST_BLOCKS).indices
    assert torch.equal(ours.flatten(), expected.sort(descending=True).values)


# ---- tokens that are read in tensors of fixed shapes: the numbers of the ordinary path


LANDMARK, VOCABULARY = 30, 32


def decoder(block_size=5, heads=(2, 2), dtype=torch.float32, dim=8):
    widths = {"num_layers": 2, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim, "mlp_dim": 16}
    config = DecoderConfig(VOCABULARY, **widths, landmarks=Landmarks(LANDMARK, block_size), backend="triton")
    return random_decoder(config).to(dtype)


def read(model, memory, tokens):
    with torch.no_grad():
        return model(tokens, memory=memory, last=True)


STEPS = all_pairs(
    {
        "block_size": [1, 2, 3],
        "prompt": [1, 9, 17],
        "heads": [(2, 2), (2, 1)],
        "batch": [1, 2],
        "dim": [8, 20],
        "k": [0, 1, 3],
        "max_blocks": [None, 3, 6],
        "granularity": ["per_token_and_head", "per_head"],
    }
)


@pytest.mark.parametrize("case", STEPS, ids=name_of)
def test_logits_are_those_of_the_ordinary_path(case, new_memory_is_nan):
    """Both read the prompt, then token by token; by turns too: each goes on with what the other has left."""
    model = decoder(case["block_size"], case["heads"], dim=case["dim"])
    settings = {name: case[name] for name in ("k", "max_blocks", "granularity")}
    memory, other = model.new_memory(**settings), model.new_memory(**settings, backend="blockwise")
    text = torch.randint(0, LANDMARK, (case["batch"], case["prompt"] + 5))
    for each in (memory, other):
        read(model, each, text[:, : case["prompt"]])
    assert can_step(memory, model.embedding.weight)
    read_next = NextToken(model, memory, LANDMARK)
    for number, token in enumerate(text[:, case["prompt"] :].split(1, 1)):
        ours = read(model, memory, token) if number in (2, 4) else read_next(token)
        torch.testing.assert_close(ours, read(model, other, token), atol=2e-5, rtol=2e-5)
    assert memory.position == other.position
    for name in ("chunks", "searches", "lookups", "retrievals", "blocks_retrieved", "blocks_kept"):
        assert memory.stats[name] == other.stats[name], name
    for layer, state in memory.layers.items():
        torch.testing.assert_close(state.pending, other.layers[layer].pending, atol=2e-5, rtol=2e-5)
        assert len(state.store) == len(other.layers[layer].store)


def test_what_is_recorded_once_is_right_for_later_tokens(monkeypatch):
    """From the beginning of a text on: while there are few blocks, where the store grows, and after both."""
    model = decoder(3, (2, 1))
    memory, other = model.new_memory(k=1), model.new_memory(k=1, backend="blockwise")
    text = torch.randint(0, LANDMARK, (1, 19))
    for each in (memory, other):
        read(model, each, text[:, :1])
    read_next = NextToken(model, memory, LANDMARK)
    tapes, read_next.graphs.captures = tapes_of(monkeypatch), True
    for token in text[:, 1:].split(1, 1):
        torch.testing.assert_close(read_next(token), read(model, other, token), atol=2e-5, rtol=2e-5)
    assert [tape.replays for tape in tapes] == [1, 8, 3]


def test_other_memories_read_by_themselves():
    q = torch.randn(1, 8)
    assert can_step(Memory(5, backend="triton"), q)
    assert not can_step(Memory(5), q)  # there is no GPU
    assert not can_step(Memory(5, backend="triton"), q.double())
    others = {"select": Newest("per_head")}, {"select": Best("per_token")}, {"positions": TruePositions()}
    for other in (*others, {"store": Store(tier="cpu")}, {"observer": print}, {"k": 17}):
        assert not can_step(Memory(5, backend="triton", **other), q), other
    assert not can_step(None, q)


def test_generated_tokens_are_the_same(monkeypatch):
    model, prompts = decoder(3), [torch.randint(0, LANDMARK, (length,)) for length in (10, 5)]
    expected = model.generate(prompts, 5, memory=lambda: model.new_memory(k=2))
    made, made_for = [], lambda memory: made.append(NextToken(model, memory, LANDMARK)) or made[-1]
    monkeypatch.setattr(model, "token_forward", made_for)
    assert model.generate(prompts, 5, memory=lambda: model.new_memory(k=2)) == expected
    assert made
