"""The Triton kernel that finds the best landmarks, interpreted, against a sort of all scores by score and recency."""

import pytest
import torch

from landmark.attention.fused.top_k_landmarks import MOST, top_k_landmarks


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
    ours = top_k_landmarks(rotated, landmarks, added=added, blocks=blocks, recent=recent, k=k)
    expected = sorted_ages(rotated, landmarks, added, blocks, recent, k)
    assert torch.equal(ours.sort(-1).values, expected)


def test_most_is_what_a_tile_holds():
    rotated, landmarks = torch.randn(1, 1, 1, 1, 8), torch.randn(1, 1, 100, 8)
    ours = top_k_landmarks(rotated, landmarks, added=100, blocks=100, recent=0, k=MOST)
    expected = 100 - (landmarks[0, 0] @ rotated.flatten()).topk(MOST).indices
    assert torch.equal(ours.flatten().sort().values, expected.sort().values)
