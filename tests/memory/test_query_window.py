"""Tokens choose blocks together with those before them; plain loops are in test_memory.py."""

import itertools

import pytest
import torch

from landmark.memory import Memory
from landmark.memory.query_window import best_of_window
from landmark.utils.errors import UserError

WIDTH = 5


def text_with_a_block(seed=0):
    """Ten blocks, whose third has the landmark that the second token of the last chunk asks for; its tokens say 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, 10 * WIDTH + 4, 8, dtype=torch.float64, generator=generator)
    q[..., -2:], k[..., -2:] = 0.0, 0.0  # the slowest pair: nearly the same at every position
    q[:, :, -3, -2:] = 9.0
    k[:, :, 3 * WIDTH - 1, -2:] = 9.0
    v.zero_()
    v[:, :, 2 * WIDTH : 3 * WIDTH - 1] = 1.0
    return q, k, v


def read_last(memory, chunks=(4,)):
    q, k, v = text_with_a_block()
    outs, start = [], 0
    for size in (10 * WIDTH, *chunks):
        part = slice(start, start + size)
        outs.append(memory.attend(1, *(x[:, :, part] for x in (q, k, v))))
        memory.commit()
        start += size
    return torch.cat(outs[1:], 2)


def retrieved(chunks=(4,), **settings):
    """Whether the third block is among those that each token of the last chunk retrieves."""
    seen = []
    memory = Memory(4, k=1, observer=lambda found: found.ages.numel() and seen.append(found.ages[0, 0]), **settings)
    read_last(memory, chunks)
    return [bool((ages == 8).any()) for ages in torch.cat(seen)]


@pytest.mark.parametrize("chunks", [(4,), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("rerank", [None, 3])
def test_the_tokens_after_one_that_finds_a_block_retrieve_it_too(chunks, rerank):
    assert retrieved(chunks, query_window=1, rerank=rerank)[1]
    assert retrieved(chunks, query_window=2, rerank=rerank)[1:3] == [True, True]
    assert retrieved(chunks, query_window=3, rerank=rerank)[1:] == [True, True, True]
    assert not all(retrieved(chunks, query_window=1, rerank=rerank)[1:])


@pytest.mark.parametrize("before", [0, 1, 5])
def test_the_best_of_a_window_is_that_of_a_loop(before):
    scores = torch.randn(2, before + 6, 3)
    for window in (1, 2, 4, 9):
        best = best_of_window(scores, window, before)
        for sample, query in itertools.product(range(2), range(6)):
            end = before + query + 1
            expected = scores[sample, max(0, end - window) : end].max(0).values
            torch.testing.assert_close(best[sample, query], expected, atol=0, rtol=0)


def test_a_loaded_memory_chooses_with_the_tokens_before_it_was_saved(tmp_path):
    q, k, v = text_with_a_block()
    memory = Memory(4, k=1, query_window=3)
    expected = read_last(memory, (2, 2))[:, :, 2:]
    saved = Memory(4, k=1, query_window=3)
    read_last(saved, (2,))
    saved.save(tmp_path / "saved")
    loaded = Memory(4, k=1, query_window=3)
    loaded.load(tmp_path / "saved")
    last = tuple(x[:, :, -2:] for x in (q, k, v))
    torch.testing.assert_close(loaded.attend(1, *last), expected, atol=0, rtol=0)
    assert not torch.allclose(expected, read_last(Memory(4, k=1), (2, 2))[:, :, 2:])


def test_selected_samples_take_their_queries_with_them():
    q, k, v = torch.randn(3, 3, 2, 40, 8, dtype=torch.float64)
    chosen = torch.tensor([2, 2, 0])
    memory, other = Memory(4, k=2, query_window=4), Memory(4, k=2, query_window=4)
    for each, samples in ((memory, slice(None)), (other, chosen)):
        each.attend(1, *(x[samples, :, :36] for x in (q, k, v)))
        each.commit()
    last = tuple(x[chosen, :, 36:] for x in (q, k, v))
    out = memory.select(chosen).attend(1, *last)
    torch.testing.assert_close(out, other.attend(1, *last), atol=0, rtol=0)


def test_a_discarded_chunk_leaves_no_queries():
    memory, (q, k, v) = Memory(4, k=1, query_window=3), text_with_a_block()
    read_last(memory, (2,))
    memory.attend(1, *(torch.randn(1, 1, 2, 8, dtype=torch.float64) for _ in range(3)))
    memory.discard()
    out = memory.attend(1, *(x[:, :, -2:] for x in (q, k, v)))
    expected = read_last(Memory(4, k=1, query_window=3), (2, 2))[:, :, 2:]
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_window": 0}, "retrieval.query_window=0: must be 1 to model.block_size=3"),
        ({"query_window": 4}, "retrieval.query_window=4: must be 1 to model.block_size=3"),
        ({"query_window": 2.5}, "retrieval.query_window=2.5: must be a whole number"),
        ({"query_window": 2, "scorer": "recent"}, "retrieval.scorer=recent: with retrieval.query_window=2 blocks are"),
        ({"query_window": 2, "fan_out": 2}, "model.fan_out=2: with retrieval.query_window=2"),
        ({"query_window": 2, "index": "faiss"}, "memory.index=faiss: with retrieval.query_window=2"),
        ({"query_window": 2, "uneven": True}, r"uneven \(model.block_ends\)=True: with retrieval.query_window=2"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Memory(3, k=1, **settings)


def test_it_goes_without_a_context_miss_token():
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    with pytest.raises(ValueError, match="query_window: leave out the context miss token"):
        Memory(4, k=1, query_window=2).attend(1, q, k, v, cmt=torch.randn(1, 8))
