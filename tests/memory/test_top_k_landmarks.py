"""The Triton kernel that finds the best landmarks, interpreted, against a sort of all scores by score and recency."""

import pytest
import torch

from landmark.attention.fused.tuning import MOST_BLOCKS
from landmark.memory.select.scores_kernels import top_k_landmarks


def sorted_ages(rotated, landmarks, added, blocks, recent, k):
    """The ages of the k best blocks, by plain loops; scores are exact, for small integers."""
    lags, batch, queries, heads, _ = rotated.shape
    kv_heads, capacity = landmarks.shape[1:3]
    chosen = torch.empty(batch, heads, queries, k, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                scored = []
                for row in range(blocks):
                    age = (added - 1 - row) % capacity + 1
                    lag = age if age <= recent else lags
                    score = rotated[lag - 1, b, t, h] @ landmarks[b, h * kv_heads // heads, row]
                    scored.append((-float(score), age))
                chosen[b, h, t] = torch.tensor(sorted(age for _, age in sorted(scored)[:k]))
    return chosen


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "dim", "capacity", "added", "recent", "k"),
    [
        (1, 2, 2, 4, 130, 130, 3, 3),  # one query of a head: no matrix product
        (1, 4, 2, 20, 96, 150, 4, 4),  # a ring buffer that went round, heads that share keys, a padded dimension
        (9, 4, 2, 16, 70, 70, 0, 5),  # true positions
        (3, 2, 1, 8, 20, 17, 6, 16),  # fewer landmarks than a tile
        (5, 1, 1, 8, 64, 200, 2, 1),
    ],
)
def test_finds_the_best_blocks_and_among_equal_scores_the_newer(
    queries, heads, kv_heads, dim, capacity, added, recent, k
):
    blocks = min(added, capacity)
    generator = torch.Generator().manual_seed(0)
    lags = recent + 1
    # Few different scores, so that most are tied; among them zeros of both signs.
    rotated = torch.randint(-1, 2, (lags, 2, queries, heads, dim), generator=generator).float()
    landmarks = torch.randint(-1, 2, (2, kv_heads, capacity, dim), generator=generator).float()
    landmarks[:, :, ::3] = -0.0
    ours = top_k_landmarks(rotated, landmarks, added=added, recent=recent, k=k)
    expected = sorted_ages(rotated, landmarks, added, blocks, recent, k)
    assert torch.equal(ours, expected.flip(-1))
    counted = top_k_landmarks(rotated, landmarks, added=torch.tensor(added), recent=recent, k=k)
    assert torch.equal(counted, ours)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("added", [9, 40])
@pytest.mark.parametrize("counted", [False, True])
def test_where_older_blocks_are_tied_the_newer_of_them_are_taken(queries, added, counted):
    """Their landmarks are the same up to rounding, so a sort of the scores themselves would take any of them."""
    recent, k, capacity = 3, 4, 20
    rotated = torch.randint(-1, 2, (recent + 1, 2, queries, 4, 8)).float()
    landmarks = torch.randint(-1, 2, (2, 2, capacity, 8)).float()
    older = [(added - age) % capacity for age in range(recent + 1, min(added, capacity) + 1)]
    landmarks[:, :, older] = landmarks[:, :, older[:1]].clone()
    expected = sorted_ages(rotated, landmarks, added, min(added, capacity), recent, k)
    landmarks[:, :, older[1:]] += 1e-3 * torch.rand(2, 2, len(older) - 1, 8)
    of_store = {"added": torch.tensor(added) if counted else added, "recent": recent, "k": k}
    assert torch.equal(top_k_landmarks(rotated, landmarks, **of_store, tied=True), expected.flip(-1))
    assert not torch.equal(top_k_landmarks(rotated, landmarks, **of_store), expected.flip(-1))


def test_more_tiles_than_are_merged_at_once():
    rotated, landmarks = torch.randn(1, 1, 1, 1, 8), torch.randn(1, 1, 9000, 8)
    ours = top_k_landmarks(rotated, landmarks, added=9000, recent=0, k=MOST_BLOCKS)
    expected = 9000 - (landmarks[0, 0] @ rotated.flatten()).topk(MOST_BLOCKS).indices
    assert torch.equal(ours.flatten(), expected.sort(descending=True).values)


def test_most_is_what_a_tile_holds():
    rotated, landmarks = torch.randn(1, 1, 1, 1, 8), torch.randn(1, 1, 100, 8)
    ours = top_k_landmarks(rotated, landmarks, added=100, recent=0, k=MOST_BLOCKS)
    expected = 100 - (landmarks[0, 0] @ rotated.flatten()).topk(MOST_BLOCKS).indices
    assert torch.equal(ours.flatten().sort().values, expected.sort().values)
