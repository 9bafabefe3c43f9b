"""A stream's view with landmarks, its training windows, and the batches that Lightning gets."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from landmark.attention.layout import blocks_and_landmarks
from landmark.experiment.config.schema import CmtConfig, Config, DataConfig, ModelConfig, PositionsConfig, TrainConfig
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.data.random_numbers import CONTROLLED, JUMPS, REPEATS, STARTS, random_numbers
from landmark.experiment.data.windows import ControlledLandmarks, PositionalJumps, Repeats, TrainingWindows
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError

LANDMARK, EOT = 60000, 50000
raw_streams = st.lists(st.integers(0, 9) | st.just(EOT), min_size=8, max_size=80).map(
    lambda ids: np.array(ids, dtype=np.uint16)
)
block_sizes = st.integers(1, 12)
RAW = np.random.default_rng(0).integers(0, 9, 5000).astype(np.uint16)


def make(raw: np.ndarray, block_size: int | None, length: int = 5, batch_size: int = 4, seed: int = 0, **settings):
    settings |= {"batch_size": batch_size, "seed": seed, "landmark": LANDMARK, "eot": EOT}
    return TrainingWindows(raw, length=length, block_size=block_size, **settings)


@given(raw_streams, block_sizes | st.none(), st.integers(1, 20))
def test_every_window_against_the_written_out_stream(raw: np.ndarray, block_size: int | None, length: int):
    ends = [] if block_size is None else range(block_size, len(raw) + 1, block_size)
    view = np.insert(raw, ends, LANDMARK).tolist()
    assume(len(view) - length - 1 >= 1)
    windows = make(raw, block_size, length)
    assert windows.num_starts == len(view) - length - 1
    batch = windows.at(range(windows.num_starts))
    for start, tokens, targets in zip(range(windows.num_starts), batch.tokens.tolist(), batch.targets.tolist()):
        assert tokens == view[start : start + length]
        for offset, (token, target) in enumerate(zip(tokens, targets)):
            following = view[start + offset + 1]
            if following == LANDMARK:
                following = view[start + offset + 2]
            assert target == (NO_LOSS if token in (LANDMARK, EOT) else following)
    phases = None if block_size is None else [start % (block_size + 1) for start in range(windows.num_starts)]
    assert (None if batch.phase is None else batch.phase.tolist()) == phases
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)


@given(raw_streams, block_sizes, st.integers(0, 99))
def test_plain_windows_can_begin_where_those_with_landmarks_do(raw: np.ndarray, block_size: int, seed: int):
    numbers = np.arange(3 * len(raw), dtype=np.uint32)
    of_landmarks, plain = (make(numbers, *given, seed=seed) for given in ((block_size,), (None,)))
    same = make(numbers, None, seed=seed, cut_as=block_size)
    begins = [next(int(token) for token in window if token != LANDMARK) for window in of_landmarks.batch(5).tokens]
    assert same.batch(5).tokens[:, 0].tolist() == [min(first, plain.num_starts - 1) for first in begins]
    assert torch.equal(same.at([3]).tokens, plain.at([3]).tokens)


def test_ids_that_begin_a_text_take_the_places_of_the_first_tokens():
    b, c, d, e, f, g = range(1, 7)
    raw = np.array([0, b, c, d, e, f, g, 7, 8, 0, 0, 0], dtype=np.uint16)
    plain = make(raw, None, beginning=[20, 21]).at([1])
    assert plain.tokens.tolist() == [[20, 21, d, e, f]]
    assert plain.targets.tolist() == [[NO_LOSS, d, e, f, g]]
    split = make(raw, 3, beginning=[20, 21]).at([2, 3])  # from c on, and its landmark
    assert split.tokens.tolist() == [[20, LANDMARK, 21, e, f], [LANDMARK, 20, 21, f, LANDMARK]]
    assert split.targets.tolist() == [[NO_LOSS, NO_LOSS, e, f, g], [NO_LOSS, NO_LOSS, f, g, NO_LOSS]]


def test_starts_cover_the_view_uniformly_and_those_outside_are_refused():
    windows = make(np.arange(40, dtype=np.uint16), None, length=8, batch_size=31_000)
    counts = torch.bincount(windows.batch(3).tokens[:, 0], minlength=31)
    assert len(counts) == windows.num_starts == 31
    assert counts.min() > 850
    assert counts.max() < 1150
    make(np.zeros(7, dtype=np.uint16), None)
    with pytest.raises(UserError, match=r"train\.length=5 is too long for a split of 6 tokens"):
        make(np.zeros(6, dtype=np.uint16), None)
    with pytest.raises(ValueError, match="must start in"):
        make(RAW, None).at([len(RAW)])


JUMPS_OF_50 = PositionalJumps(30, 7, p_jump=50)


def jumps_of(seed, step, indices, jumps=JUMPS_OF_50, phase=0):
    return jumps.positions(torch.full((len(indices),), phase), seed, step, indices)


def windows_of(seed, step, indices, **settings):
    batch = make(RAW, 7, length=30, batch_size=8, seed=seed, **settings).batch(step, indices)
    return torch.stack([batch.tokens, batch.targets], 1)


DRAWN = {  # what is drawn for some windows of a step
    "windows": windows_of,
    "repeats": lambda *drawn: windows_of(*drawn, repeats=Repeats([0.8, 0.4], 2**40)),
    "controlled landmarks": ControlledLandmarks(2, 9).for_step,
    "jumps": jumps_of,
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_what_is_drawn_depends_on_seed_step_and_index_only(drawn):
    @given(st.integers(0, 2**32), st.integers(0, 2**40), st.integers(0, 8), st.integers(0, 8))
    def holds(seed: int, step: int, first: int, last: int):
        indices = range(first, max(first, last))
        whole, part = (DRAWN[drawn](seed, step, each) for each in (range(8), indices))
        assert torch.equal(part, whole[indices.start : indices.stop])

    holds()
    each = [DRAWN[drawn](seed, step, range(8)) for seed in (0, 1) for step in (0, 1)]
    assert all(not torch.equal(each[i], each[j]) for i in range(4) for j in range(i))
    more = make(RAW, 7, length=30, batch_size=20).batch(3).tokens[:8]  # nor on the size of the batch
    assert torch.equal(more, make(RAW, 7, length=30, batch_size=8).batch(3).tokens)


@pytest.mark.parametrize("phase", [0, 3, 7])
def test_positions_jump_uniformly_after_landmarks_only(phase):
    found = jumps_of(0, 0, range(2000), PositionalJumps(40, 7, p_jump=9), phase)
    assert found[:, 0].eq(0).all()
    steps = found.diff(dim=1)
    _, is_landmark = blocks_and_landmarks(torch.full((2000,), phase), 40, 7)
    after = is_landmark[:, :-1]
    assert steps[~after].eq(1).all()
    counts = steps[after].bincount()
    assert (len(counts), counts[0]) == (10, 0)
    assert (counts[1:] / counts.sum() - 1 / 9).abs().max() < 0.02


def test_random_numbers_differ_by_purpose_layer_and_window_and_are_the_same_for_each_share():
    controlled = ControlledLandmarks(layers=3, blocks=6).for_step(0, 0, range(2000))
    assert controlled.shape == (2000, 3, 6)
    assert (controlled.double().mean((0,)) - 0.5).abs().max() < 0.05
    agree = (controlled[:, 0] == controlled[:, 1]).double().mean()
    assert abs(agree - 0.5) < 0.05
    controlled, numbers = ControlledLandmarks(2, 6), np.array([5, 900, 17])
    whole = controlled.for_validation(numbers)
    assert torch.equal(torch.cat([controlled.for_validation(numbers[i : i + 1]) for i in range(3)]), whole)
    assert not torch.equal(whole[0], whole[1])
    streams = [random_numbers(0, 0, stream, range(50)).tolist() for stream in (STARTS, CONTROLLED, JUMPS, REPEATS)]
    assert len({number for stream in streams for number in stream}) == 200


def datamodule(kind="landmark", rank=0, devices=1, cmt=True, p_jump=5, repeats=None) -> WindowDataModule:
    corpus = SimpleNamespace(split=lambda name: RAW if name == "train" else RAW[:999])
    train = TrainConfig(steps=40, batch_size=6, length=30, validate_batches=3, precision="32-true")
    model = ModelConfig(kind=kind, block_size=7, num_layers=2)
    positions, cmt_config = PositionsConfig(p_jump=p_jump), CmtConfig(enabled=cmt and kind == "landmark")
    data = DataConfig(name="x", cache="", repeats=repeats)
    config = Config(seed=5, model=model, train=train, positions=positions, cmt=cmt_config, data=data)
    module = WindowDataModule(corpus, SimpleNamespace(landmark=LANDMARK, eot=EOT, beginning=[]), config)  # pyright: ignore
    module.trainer = SimpleNamespace(global_rank=rank, world_size=devices)  # pyright: ignore
    return module


def batches(module, count, start=0):
    module.start_step = start
    return list(itertools.islice(module.train_dataloader(), count))


def tokens_of(found):
    return torch.stack([torch.stack([batch.tokens, batch.targets]) for batch in found])


kinds = pytest.mark.parametrize("kind", ["transformer", "landmark", "transformer_xl"])


@kinds
def test_devices_and_a_resumed_training_have_the_same_windows(kind):
    settings = {"repeats": [1.0, 0.3]}
    whole = batches(datamodule(kind, **settings), 12)
    shares = [batches(datamodule(kind, rank, 3, **settings), 12) for rank in range(3)]
    for batch, *parts in zip(whole, *shares, strict=True):
        for name in ("tokens", "targets", *(("phase", "controlled", "positions") if kind == "landmark" else ())):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)), name
    assert torch.equal(whole[3].tokens, datamodule(kind, **settings).training.batch(3).tokens)
    resumed = batches(datamodule(kind, **settings), 5, start=7)
    assert torch.equal(tokens_of(resumed), tokens_of(whole[7:]))
    with pytest.raises(UserError, match="cannot be shared evenly by 4 devices"):
        batches(datamodule(kind, 0, 4), 1)


@kinds
def test_validation_is_fixed_and_shared_and_has_no_repeats_and_no_jumps(kind):
    found = list(datamodule(kind).val_dataloader())
    assert [len(batch.tokens) for batch in found] == [6, 6, 6]
    assert torch.equal(tokens_of(datamodule(kind, repeats=[1.0]).val_dataloader()), tokens_of(found))
    shares = [list(datamodule(kind, rank, 2).val_dataloader()) for rank in range(2)]
    assert all(torch.equal(torch.cat([a.tokens, b.tokens]), c.tokens) for a, b, c in zip(*shares, found, strict=True))
    assert {batch.positions for batch in found} == {None}
    drawn = {None if batch.controlled is None else tuple(batch.controlled.shape[:2]) for batch in found}
    assert drawn == {(6, 2) if kind == "landmark" else None}


def test_a_batch_has_what_its_model_needs_and_so_has_a_part_of_it():
    (plain,), (bare,) = (batches(datamodule(kind, cmt=False, p_jump=1), 1) for kind in ("transformer", "landmark"))
    assert LANDMARK not in plain.tokens
    assert (plain.phase, plain.controlled, plain.positions) == (None, None, None)
    assert bare.phase is not None
    assert (bare.controlled, bare.positions) == (None, None)
    (whole,) = batches(datamodule(), 1)
    part = replace(whole, weights=torch.ones(6, 30)).rows(slice(1, 3)).to("cpu")
    for name in ("tokens", "controlled", "positions"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[1:3])
    assert part.weights.shape == (2, 30)


# ---- repeats: which stretches are copied, how long and how often, and the windows that have them


PLACES = np.arange(3000)  # a token of its own at each place, so a copy shows its source
ALWAYS, NEVER = Repeats([1.0], 1), Repeats([0.0], 1)
seeds, steps = st.integers(0, 2**32), st.integers(0, 2**40)


def origins(repeats: Repeats, size: int, windows: int, seed: int = 0, step: int = 0) -> np.ndarray:
    return repeats.origins(np.full(windows, size), seed, step, range(windows))


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


@given(st.integers(1, 30) | st.none(), st.integers(40, 120), st.sampled_from([ALWAYS, NEVER]), seeds, steps)
def test_windows_are_those_of_the_stream_with_its_stretches_copied(block_size, length, repeats, seed, step):
    raw = PLACES.copy()
    raw[::7] = EOT
    found = make(raw, block_size, length, 6, seed, repeats=repeats).batch(step)
    stream = make(PLACES, block_size, length, 6, seed).batch(step)
    assert (found.phase is None) == (block_size is None)
    assert block_size is None or torch.equal(found.phase, stream.phase)
    is_text = (stream.tokens != LANDMARK).numpy()
    sizes = is_text.sum(1) + 1
    copied = repeats.origins(sizes, seed, step, range(6))
    for index, size in enumerate(sizes):
        first = stream.tokens[index].numpy()[is_text[index]][0]
        text = raw[first : first + size][copied[index, :size]]
        tokens, targets = np.full(length, LANDMARK), np.full(length, NO_LOSS)
        tokens[is_text[index]] = text[:-1]
        targets[is_text[index]] = np.where(text[:-1] == EOT, NO_LOSS, text[1:])
        np.testing.assert_array_equal(found.tokens[index], tokens)
        np.testing.assert_array_equal(found.targets[index], targets)
