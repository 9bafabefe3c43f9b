"""Repeats: which stretches are copied, how long and how often, and the windows that have them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.data.windows import Repeats, TrainingWindows
from landmark.utils.constants import NO_LOSS

LANDMARK, EOT = 60000, 50000
RAW = np.arange(3000)  # a token of its own at each place, so a copy shows its source
ALWAYS = Repeats([1.0], 1)
seeds, steps = st.integers(0, 2**32), st.integers(0, 2**40)
block_sizes = st.integers(1, 30) | st.none()


def origins(repeats: Repeats, size: int, windows: int, seed: int = 0, step: int = 0) -> np.ndarray:
    return repeats.origins(np.full(windows, size), seed, step, range(windows))


def make(repeats, block_size, *, raw=RAW, length=90, seed=0):
    settings = {"length": length, "batch_size": 6, "seed": seed, "landmark": LANDMARK, "eot": EOT}
    return TrainingWindows(raw, **settings, block_size=block_size, repeats=repeats)


def runs(changed: np.ndarray) -> list[tuple[int, int]]:
    """First place and length of each run of changed tokens."""
    edges = np.flatnonzero(np.diff(np.pad(changed.astype(int), 1)))
    return [(int(first), int(stop - first)) for first, stop in edges.reshape(-1, 2)]


@given(st.integers(16, 300), seeds, steps)
def test_stretches_have_eight_tokens_or_more_and_are_in_the_text_before_them(size: int, seed: int, step: int):
    for found in origins(ALWAYS, size, 4, seed, step):
        changed = found != np.arange(size)
        assert all(found[place] in found[: place - 7] for place in np.flatnonzero(changed))
        lengths = [length for _, length in runs(changed)]
        assert 1 <= len(lengths) <= 3
        assert min(lengths) >= 8
        assert sum(lengths) <= min(3 * (size // 2), size - 8)


def test_length_is_log_uniform_and_places_are_uniform():
    """Of the windows with one stretch: all their copied tokens come from the same distance."""
    size, windows = 8192, 3000
    single, stretches = [], set()
    for each in origins(ALWAYS, size, windows):
        places = np.flatnonzero(each != np.arange(size))
        stretches.add(len(runs(each != np.arange(size))))
        distances = set((places - each[places]).tolist())
        if len(distances) == 1 and len(places) == places[-1] - places[0] + 1:
            single.append((len(places), int(each[places[0]]), int(places[0])))
    assert stretches == {1, 2, 3}
    assert len(single) / windows == pytest.approx(1 / 3, abs=0.03)
    length, source, target = np.array(single).T
    assert length.min() == 8
    assert 3000 < length.max() <= size // 2
    octaves = np.log(length / 8) / np.log(512)
    assert np.quantile(octaves, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.05)
    room = size - 2 * length
    assert np.mean(source / room) == pytest.approx(1 / 3, abs=0.03)
    assert np.mean((target - length) / room) == pytest.approx(2 / 3, abs=0.03)
    assert (target >= source + length).all()
    # In windows of 16 tokens one; in windows of 17 the source begins at token 0 or 1, and the copy at 8 or 9.
    assert (origins(ALWAYS, 16, 50) == [*range(8), *range(8)]).all()
    found = {tuple(each) for each in origins(ALWAYS, 17, 200).tolist()}
    first, second = (*range(8),), (*range(1, 9),)
    assert {(*first, *first, 16), (*first, 8, *first), (0, *second, *second)} <= found


def test_shares_follow_the_schedule():
    repeats = Repeats([1, 1, 0.5, 0.5, 0.2], 401)
    moments = [0, 50, 100, 150, 200, 300, 350, 400, 999]
    shares = [1, 1, 1, 0.75, 0.5, 0.5, 0.35, 0.2, 0.2]
    assert [repeats.share(step) for step in moments] == pytest.approx(shares)
    for step, share in zip(moments, shares):
        found = (origins(repeats, 40, 4000, step=step) != np.arange(40)).any(axis=1).mean()
        assert found == pytest.approx(share, abs=0.03)
    assert {Repeats([0.3], steps).share(step) for steps in (1, 2, 1000) for step in (0, 1, steps)} == {0.3}
    assert Repeats([0.7, 0.1], 1).share(0) == 0.7


@given(block_sizes, st.integers(40, 120), seeds, steps)
def test_windows_against_the_written_out_text(block_size: int | None, length: int, seed: int, step: int):
    raw = RAW.copy()
    raw[::7] = EOT
    windows = make(ALWAYS, block_size, raw=raw, length=length, seed=seed)
    found, starts = windows.batch(step), windows.starts(step).tolist()
    if block_size is None:
        assert found.phase is None
        places = [list(range(start, start + length)) for start in starts]
    else:
        view = []  # raw places, and -1 where a landmark is
        for number in range(len(raw)):
            view += [number, -1] if (number + 1) % block_size == 0 else [number]
        assert found.phase is not None
        assert found.phase.tolist() == [start % (block_size + 1) for start in starts]
        places = [view[start : start + length] for start in starts]
    normal = [[place for place in window if place >= 0] for window in places]
    sizes = np.array([len(window) + 1 for window in normal])
    copied = ALWAYS.origins(sizes, seed, step, range(6))
    for index, window in enumerate(places):
        first = normal[index][0]
        text = raw[first : first + sizes[index]][copied[index, : sizes[index]]].tolist()
        tokens = [LANDMARK if place < 0 else text[place - first] for place in window]
        targets = [
            NO_LOSS if token in (LANDMARK, EOT) else text[place - first + 1]
            for token, place in zip(tokens, window, strict=True)
        ]
        assert found.tokens[index].tolist() == tokens
        assert found.targets[index].tolist() == targets


@pytest.mark.parametrize("block_size", [None, 7])
def test_without_repeats_windows_are_those_of_the_stream(block_size: int | None):
    without, never, always = (make(repeats, block_size) for repeats in (None, Repeats([0.0], 1), ALWAYS))
    for step in range(5):
        stream = without.at(without.starts(step))
        for windows in (without, never):
            assert torch.equal(windows.batch(step).tokens, stream.tokens)
            assert torch.equal(windows.batch(step).targets, stream.targets)
        assert always.starts(step).tolist() == without.starts(step).tolist()
        assert not torch.equal(always.batch(step).tokens, stream.tokens)
