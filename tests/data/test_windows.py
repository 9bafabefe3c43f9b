from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from landmark.config.schema import CmtConfig, Config, ModelConfig, PositionsConfig, TrainConfig
from landmark.data.datamodule import WindowDataModule
from landmark.data.random_numbers import CONTROLLED, JUMPS, REPEATS, STARTS, random_numbers
from landmark.data.windows import TrainingWindows, raw_position, viewed_length
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError

LANDMARK, EOT = 60000, 50000
raw_streams = st.lists(st.integers(0, 9) | st.just(EOT), min_size=8, max_size=80).map(
    lambda ids: np.array(ids, dtype=np.uint16)
)
block_sizes = st.integers(1, 12)


def inserted(raw: np.ndarray, block_size: int) -> list[int]:
    """The landmark-inserted stream, written out."""
    view = []
    for number, token in enumerate(raw.tolist(), start=1):
        view.append(token)
        if number % block_size == 0:
            view.append(LANDMARK)
    return view


def make(raw: np.ndarray, block_size: int | None, length: int = 5, batch_size: int = 4, seed: int = 0):
    return TrainingWindows(
        raw,
        length=length,
        batch_size=batch_size,
        seed=seed,
        block_size=block_size,
        landmark=LANDMARK,
        eot=EOT,
    )


@given(raw_streams, block_sizes, st.data())
def test_view_is_the_stream_with_landmarks_inserted(raw: np.ndarray, block_size: int, data: st.DataObject):
    view = inserted(raw, block_size)
    assert viewed_length(len(raw), block_size) == len(view)
    start = data.draw(st.integers(0, len(view)))
    stop = data.draw(st.integers(start, len(view)))
    raw_at, is_landmark = raw_position(np.arange(start, stop), block_size)
    found = [LANDMARK if here else int(raw[number]) for number, here in zip(raw_at, is_landmark, strict=True)]
    assert found == view[start:stop]


@given(raw_streams, block_sizes | st.none(), st.integers(1, 20))
def test_every_window_against_the_written_out_stream(raw: np.ndarray, block_size: int | None, length: int):
    view = raw.tolist() if block_size is None else inserted(raw, block_size)
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
    if block_size is None:
        assert batch.phase is None
    else:
        assert batch.phase is not None
        assert batch.phase.tolist() == [start % (block_size + 1) for start in range(windows.num_starts)]


def test_the_drawn_example():
    a, b, c, d, e, f, g, h, i = range(9)
    raw = np.array([a, b, c, d, e, EOT, f, g, h, i, 0], dtype=np.uint16)
    batch = make(raw, 3, length=9).at([1])
    assert batch.tokens.tolist() == [[b, c, LANDMARK, d, e, EOT, LANDMARK, f, g]]
    assert batch.targets.tolist() == [[c, d, NO_LOSS, e, EOT, NO_LOSS, NO_LOSS, g, h]]
    assert batch.phase is not None
    assert batch.phase.tolist() == [1]
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)


def test_ids_that_begin_a_text_take_the_places_of_the_first_tokens():
    b, c, d, e, f, g = range(1, 7)
    raw = np.array([0, b, c, d, e, f, g, 7, 8, 0, 0, 0], dtype=np.uint16)
    settings = {"length": 5, "batch_size": 1, "seed": 0, "landmark": LANDMARK, "eot": EOT}
    plain = TrainingWindows(raw, **settings, block_size=None, beginning=[20, 21]).at([1])
    assert plain.tokens.tolist() == [[20, 21, d, e, f]]
    assert plain.targets.tolist() == [[NO_LOSS, d, e, f, g]]
    split = TrainingWindows(raw, **settings, block_size=3, beginning=[20, 21]).at([2, 3])  # from c on, and its landmark
    assert split.tokens.tolist() == [[20, LANDMARK, 21, e, f], [LANDMARK, 20, 21, f, LANDMARK]]
    assert split.targets.tolist() == [[NO_LOSS, NO_LOSS, e, f, g], [NO_LOSS, NO_LOSS, f, g, NO_LOSS]]


RAW = np.random.default_rng(0).integers(0, 9, 5000).astype(np.uint16)


@given(st.integers(0, 2**32), st.integers(0, 2**40), st.integers(0, 8), st.integers(0, 8))
def test_a_window_depends_on_seed_step_and_index_only(seed: int, step: int, first: int, last: int):
    whole = make(RAW, 7, length=30, batch_size=8, seed=seed).batch(step)
    part = make(RAW, 7, length=30, batch_size=8, seed=seed).batch(step, range(first, max(first, last)))
    larger = make(RAW, 7, length=30, batch_size=20, seed=seed).batch(step)
    assert torch.equal(part.tokens, whole.tokens[first : max(first, last)])
    assert torch.equal(part.targets, whole.targets[first : max(first, last)])
    assert torch.equal(larger.tokens[:8], whole.tokens)


def test_steps_and_seeds_give_different_windows():
    batches = [make(RAW, 7, seed=seed).batch(step).tokens for seed in (0, 1) for step in (0, 1)]
    assert all(not torch.equal(batches[i], batches[j]) for i in range(4) for j in range(i))


def test_starts_cover_the_view_uniformly():
    raw = np.arange(40, dtype=np.uint16)
    windows = make(raw, None, length=8, batch_size=31_000)
    first = windows.batch(3).tokens[:, 0]
    counts = torch.bincount(first, minlength=31)
    assert len(counts) == windows.num_starts == 31
    assert counts.min() > 850
    assert counts.max() < 1150


def test_stream_too_short_and_settings_out_of_range_are_refused():
    make(np.zeros(7, dtype=np.uint16), None)
    with pytest.raises(UserError, match=r"train\.length=5 is too long for a split of 6 tokens"):
        make(np.zeros(6, dtype=np.uint16), None)
    with pytest.raises(UserError, match="must be at least 1"):
        make(RAW, 0)
    with pytest.raises(ValueError, match="must start in"):
        make(RAW, None).at([len(RAW)])


def test_streams_of_random_numbers_differ():
    streams = [random_numbers(0, 0, stream, range(50)).tolist() for stream in (STARTS, CONTROLLED, JUMPS, REPEATS)]
    assert len({number for stream in streams for number in stream}) == 200


def datamodule(
    rank: int = 0, devices: int = 1, kind: str = "landmark", batch_size: int = 6, cmt: bool = True, p_jump: int = 5
) -> WindowDataModule:
    corpus = SimpleNamespace(split=lambda name: RAW if name == "train" else RAW[:999])
    train = TrainConfig(steps=9, batch_size=batch_size, length=30, validate_batches=3, precision="32-true")
    model = ModelConfig(kind=kind, block_size=7, num_layers=2)
    positions, cmt_config = PositionsConfig(p_jump=p_jump), CmtConfig(enabled=cmt and kind == "landmark")
    config = Config(seed=5, model=model, train=train, positions=positions, cmt=cmt_config)
    module = WindowDataModule(corpus, SimpleNamespace(landmark=LANDMARK, eot=EOT, beginning=[]), config)  # pyright: ignore
    module.trainer = SimpleNamespace(global_rank=rank, world_size=devices)  # pyright: ignore
    return module


def test_training_goes_on_at_the_step_set_before_iterating():
    module = datamodule()
    loader = module.train_dataloader()
    module.start_step = 11
    for step, batch in zip(range(11, 14), loader):
        assert torch.equal(batch.tokens, module.training.batch(step).tokens)


def test_devices_share_each_batch():
    shares = [next(iter(datamodule(rank, 3).train_dataloader())) for rank in range(3)]
    whole = next(iter(datamodule().train_dataloader()))
    for name in ("tokens", "controlled", "positions"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(whole, name)), name
    with pytest.raises(UserError, match="cannot be shared evenly by 4 devices"):
        next(iter(datamodule(0, 4).train_dataloader()))


def test_validation_batches_are_fixed_and_shared():
    batches = [batch.tokens for batch in datamodule().val_dataloader()]
    assert [len(batch) for batch in batches] == [6, 6, 6]
    assert all(torch.equal(*pair) for pair in zip(batches, (b.tokens for b in datamodule().val_dataloader())))
    shares = [[batch.tokens for batch in datamodule(rank, 2).val_dataloader()] for rank in range(2)]
    assert all(torch.equal(torch.cat(pair), whole) for *pair, whole in zip(*shares, batches))


def test_plain_model_sees_no_landmarks():
    batch = next(iter(datamodule(kind="transformer").train_dataloader()))
    assert batch.phase is None
    assert batch.controlled is None
    assert batch.positions is None
    assert LANDMARK not in batch.tokens


def test_without_a_token_or_jumps_nothing_is_drawn():
    batch = next(iter(datamodule(cmt=False, p_jump=1).train_dataloader()))
    assert batch.phase is not None
    assert batch.controlled is None
    assert batch.positions is None


def test_validation_has_controlled_landmarks_and_no_jumps():
    batch = next(iter(datamodule().val_dataloader()))
    assert batch.controlled.shape[:2] == (6, 2)
    assert batch.positions is None


def test_part_of_a_batch_has_its_controlled_landmarks_and_positions():
    whole = next(iter(datamodule().train_dataloader()))
    part = whole.rows(slice(1, 3)).to("cpu")
    assert torch.equal(part.controlled, whole.controlled[1:3])
    assert torch.equal(part.positions, whole.positions[1:3])
    assert part.weights is None
    assert replace(part, weights=torch.ones(2, 30)).rows(slice(0, 1)).weights is not None
