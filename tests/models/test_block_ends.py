"""Blocks that end where sentences and documents do: windows, chunks, single tokens and texts written by the model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from landmark.data.positional_jumps import PositionalJumps
from landmark.data.windows import TrainingWindows
from landmark.models import Decoder, DecoderConfig, load, save
from landmark.models.config import decoder_config
from landmark.utils.block_places import closed_blocks
from landmark.utils.errors import UserError

STOP, EOT, LANDMARK = 3, 50, 60
FIXED = DecoderConfig(
    "landmark", vocab_size=64, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, block_size=5, landmark_id=LANDMARK
)
RULE = {"block_ends": "sentences", "least_block_size": 2, "end_ids": (STOP, 4), "document_end": EOT}
CONFIG = replace(FIXED, **RULE)
RECIPE = {
    "key_offset": 0.5,
    "rotary_fraction": 0.5,
    "qk_norm": True,
    "initialisation": "fan_in",
    "landmark_key": "mean",
    "landmark_bias": True,
}


def tiny(config, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config).double()
    for name, parameter in model.named_parameters():  # the initialisation is too small to tell paths apart
        if parameter.ndim == 2:
            parameter.data *= 15
        elif "norm" not in name:
            parameter.data += torch.randn_like(parameter)
    return model


def text(count, seed=0):
    """Ids of which a third end sentences, and some documents: also several one after the other."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.choice([1, 2, STOP, 4, 7, 8, 9, EOT], count))[None]


@pytest.mark.parametrize("options", [{}, RECIPE, {**RECIPE, "landmark_key": "token"}, {**RECIPE, "num_kv_heads": 1}])
@pytest.mark.parametrize("chunks", [[31], [1, 1, 3, 5, 6, 1, 14], [1] * 31, [4] * 7 + [3], [10, 21]])
def test_chunks_that_retrieve_all_blocks_are_one_window(options, chunks):
    model = tiny(replace(CONFIG, **options))
    for seed in range(4):
        raw = text(31, seed)
        memory = model.new_memory(k=31)
        read = torch.cat([model(part, memory=memory) for part in raw.split(chunks, 1)], 1)
        torch.testing.assert_close(read, model(raw), atol=1e-10, rtol=0)


@pytest.mark.parametrize("settings", [{"granularity": "per_head"}, {"granularity": "per_token"}, {"mapping": "true"}])
def test_other_ways_to_retrieve_all_blocks(settings):
    model, raw = tiny(replace(CONFIG, **RECIPE)), text(31)
    memory = model.new_memory(k=31, **settings)
    read = torch.cat([model(part, memory=memory) for part in raw.split([9, 13, 9], 1)], 1)
    torch.testing.assert_close(read, model(raw), atol=1e-10, rtol=0)


@pytest.mark.parametrize("joint", [0.0, 0.5])
def test_blocks_that_all_end_early_are_shorter_blocks(joint):
    """Blocks that all have n tokens are the text of a model with ℓ = n: its means, keys before and biases, log n.
    Positions are off, as they count empty places too."""
    options = {**RECIPE, "rotary_fraction": 0.0, "joint_softmax": joint}
    raw = torch.tensor([[1, 2, STOP, 7, 8, 4, 9, 1, STOP, 2]])
    short = tiny(replace(FIXED, block_size=3, **options))
    uneven = tiny(replace(CONFIG, least_block_size=3, **options))
    for ours, theirs in zip(uneven.blocks, short.blocks, strict=True):
        ours.attention.landmark_bias.data = theirs.attention.landmark_bias.data + (1 - joint) * np.log(5 / 3)
    torch.testing.assert_close(uneven(raw), short(raw), atol=1e-10, rtol=0)


def test_texts_of_a_batch_do_not_touch_each_other():
    model = tiny(replace(CONFIG, **RECIPE))
    raw = torch.cat([text(23, seed) for seed in range(3)])
    torch.testing.assert_close(model(raw), torch.cat([model(each[None]) for each in raw]), atol=1e-10, rtol=0)


def test_where_no_sentence_ends_it_is_the_model_of_fixed_blocks():
    raw = torch.randint(5, 40, (1, 29))
    fixed, uneven = tiny(replace(FIXED, **RECIPE)), tiny(replace(CONFIG, **RECIPE))
    torch.testing.assert_close(uneven(raw), fixed(raw), atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_training_window_has_the_losses_and_gradients_of_the_text(backend):
    """Windows that begin at a text's first token; the loss is that of the logits after each raw token."""
    raw = text(60, 3)
    stream = raw[0].numpy()
    model = tiny(replace(CONFIG, **RECIPE, backend=backend))
    length = 53
    windows = TrainingWindows(
        stream, length=length, batch_size=1, seed=0, block_size=5, landmark=LANDMARK, eot=EOT, ends=CONFIG.ends
    )
    batch = windows.at([0])
    assert batch.empty is not None
    assert batch.empty.any()
    assert (batch.tokens[batch.empty] == LANDMARK).all()
    ((loss, targets),) = model.window_losses(batch)
    seen = int((batch.tokens != LANDMARK).sum())
    logits = model(raw[:, :seen])
    losses = torch.nn.functional.cross_entropy(logits[0], raw[0, 1 : seen + 1], reduction="none")
    counted = raw[0, :seen] != EOT
    torch.testing.assert_close(loss, losses[counted].sum())
    assert int(targets) == int(counted.sum())
    expected = torch.autograd.grad(losses[counted].sum(), list(model.parameters()))
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_training_with_the_best_blocks_and_any_phase_on_both_backends():
    stream = text(200, 5)[0].numpy()
    windows = TrainingWindows(
        stream, length=40, batch_size=1, seed=0, block_size=5, landmark=LANDMARK, eot=EOT, ends=CONFIG.ends
    )
    batch = replace(windows.at(range(0, windows.num_starts, 7)), top_k=2)
    found = []
    for backend in ("reference", "blockwise"):
        model = tiny(replace(CONFIG, **RECIPE, backend=backend))
        ((loss, _),) = model.window_losses(batch)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_positions_may_jump_after_landmarks():
    """They count places: without a jump nothing changes, and jumps are computed alike on both backends."""
    stream = text(200, 6)[0].numpy()
    batch = TrainingWindows(
        stream, length=40, batch_size=1, seed=0, block_size=5, landmark=LANDMARK, eot=EOT, ends=CONFIG.ends
    ).at([3, 17, 30])
    assert batch.phase is not None
    found = []
    for backend in ("reference", "blockwise"):
        model = tiny(replace(CONFIG, **RECIPE, backend=backend))
        ((plain, _),) = model.window_losses(batch)
        ((same, _),) = model.window_losses(replace(batch, positions=torch.arange(40).expand(3, -1)))
        torch.testing.assert_close(same, plain, atol=1e-9, rtol=0)
        positions = PositionalJumps(40, 5, 50).positions(batch.phase, 0, 0, range(3))
        ((jumped, _),) = model.window_losses(replace(batch, positions=positions))
        assert not torch.isclose(jumped, plain)
        found.append(jumped)
    torch.testing.assert_close(found[1], found[0])


def test_the_fused_kernels_read_and_train_as_the_tiles_do():
    """In a window with its gradient, in chunks, and token by token, where a ring of blocks drops the oldest."""
    models = [tiny(replace(CONFIG, **RECIPE, backend=backend)).float() for backend in ("triton", "blockwise")]
    raw, found = text(40, 5), []
    for model in models:
        memory = model.new_memory(k=2, max_blocks=4)
        with torch.no_grad():
            read = torch.cat([model(part, memory=memory) for part in raw.split([17, 1, 1, 1, 20], 1)], 1)
        whole = model(raw)
        whole.logsumexp(-1).sum().backward()
        found.append([read, whole.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)


def test_generation_is_that_of_reading_anew():
    model = tiny(replace(CONFIG, **RECIPE))
    prompts = [text(17, 1)[0], text(17, 2)[0], text(9, 3)[0]]
    for prompt, written in zip(prompts, model.generate(prompts, 25, local=6), strict=True):
        ids = prompt.tolist()
        memory = model.new_memory()
        logits = torch.cat([model(part[None], memory=memory) for part in prompt.split(6)], 1)
        for token in written:
            scores = logits[0, -1].clone()
            scores[LANDMARK] = -torch.inf
            assert token == int(scores.argmax())
            ids.append(token)
            logits = model(torch.tensor([[token]]), memory=memory)
        whole = model.new_memory(k=100)
        torch.testing.assert_close(
            model(torch.tensor([ids]), memory=whole), model(torch.tensor([ids])), atol=1e-10, rtol=0
        )


def test_generation_with_all_blocks_is_the_model_without_memory():
    model, ids = tiny(replace(CONFIG, **RECIPE)), text(12, 7)[0].tolist()
    (written,) = model.generate([torch.tensor(ids)], 30, local=5, memory=model.new_memory(k=100))
    for token in written:
        scores = model(torch.tensor([ids]), last=True)[0, -1]
        scores[LANDMARK] = -torch.inf
        assert token == int(scores.argmax())
        ids.append(token)


@pytest.mark.parametrize("max_blocks", [None, 4])
@pytest.mark.parametrize("cut", [11, 13, 20])
def test_a_saved_memory_goes_on(cut, max_blocks, tmp_path):
    model, raw = tiny(replace(CONFIG, **RECIPE)), text(40, 1)
    memory, loaded = (model.new_memory(k=2, max_blocks=max_blocks) for _ in range(2))
    for part in raw[:, :cut].split(6, 1):
        model(part, memory=memory)
    memory.save(tmp_path / "memory")
    loaded.load(tmp_path / "memory")
    for part in raw[:, cut:].split(6, 1):
        torch.testing.assert_close(model(part, memory=loaded), model(part, memory=memory), atol=0, rtol=0)
    with pytest.raises(UserError, match="uneven blocks"):
        tiny(replace(FIXED, **RECIPE)).new_memory(k=2).load(tmp_path / "memory")


@pytest.mark.parametrize("scorer", ["landmark", "mean_key", "recent"])
def test_a_memory_that_drops_blocks_keeps_the_sizes_of_the_others(scorer):
    """It reads on as a memory of which the same blocks are retrieved, as they are the newest."""
    model, raw = tiny(replace(CONFIG, **RECIPE)), text(80, 2)
    few, all_ = model.new_memory(k=3, max_blocks=3, scorer=scorer), model.new_memory(k=3, scorer="recent")
    for part in raw.split(7, 1):
        torch.testing.assert_close(model(part, memory=few), model(part, memory=all_), atol=1e-10, rtol=0)
    (state, *_) = few.layers.values()
    assert CONFIG.ends is not None
    closed = closed_blocks(raw[0].numpy(), CONFIG.ends)
    sizes = np.diff(closed, prepend=0)
    assert state.store.sizes is not None
    assert sorted(state.store.sizes.tolist()) == sorted(sizes[-3:].tolist())
    assert few.stats["uneven_block_tokens"] == sizes[-3:].sum()


def test_a_copy_of_a_memory_goes_on():
    model, raw = tiny(replace(CONFIG, **RECIPE)), text(40, 4)
    memory = model.new_memory(k=2)
    for part in raw[:, :20].split(9, 1):
        model(part, memory=memory)
    copied = memory.select(torch.tensor([0]))
    torch.testing.assert_close(model(raw[:, 20:], memory=copied), model(raw[:, 20:], memory=memory), atol=1e-12, rtol=0)


def test_a_model_is_saved_with_its_rule(tmp_path):
    model = tiny(CONFIG).float()
    save(model, tmp_path)
    loaded = load(tmp_path, CONFIG)
    assert loaded.config == CONFIG
    raw = text(20)
    torch.testing.assert_close(loaded(raw), model(raw), atol=0, rtol=0)


def test_half_precision():
    model, raw = tiny(replace(CONFIG, **RECIPE)).float(), text(60, 5)
    exact = model(raw)
    with torch.autocast("cpu", torch.bfloat16):
        memory = model.new_memory(k=60)
        read = torch.cat([model(part, memory=memory) for part in raw.split(11, 1)], 1)
    assert read.isfinite().all()
    assert (read.argmax(-1) == exact.argmax(-1)).float().mean() > 0.7


def test_a_memory_reads_one_text():
    model = tiny(CONFIG)
    with pytest.raises(UserError, match="a memory reads one text, not 2 together"):
        model(text(9).expand(2, -1), memory=model.new_memory())
    with pytest.raises(UserError, match="prompts whose blocks end early cannot continue one memory"):
        model.generate([[1, 2], [2, 1]], 3, memory=model.new_memory())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ends": "pages"}, "model.block_ends=pages: must be one of fixed, sentences, lines"),
        ({"least_block_size": 6}, "model.least_block_size=6: must be from 1 to model.block_size=5"),
        ({"least_block_size": None}, "model.least_block_size=None: must be from 1"),
        ({"end_ids": ()}, "needs the ids at which blocks end"),
        ({"block_ends": "fixed"}, "model.least_block_size=2: is for model.block_ends=sentences or lines"),
        ({"kind": "transformer"}, "model=transformer has no landmarks"),
        ({"cmt": True}, "goes without cmt=on, set cmt=off"),
        ({"local_blocks": 1}, "goes without model.local_blocks=1, set model.local_blocks=0"),
        ({"fan_out": 4}, "goes without model.fan_out=4"),
        ({"masked": True}, "goes without model.masked=True"),
        ({**RECIPE, "landmark_key": "pooled"}, "goes without model.landmark_key=pooled"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tier": "cpu"}, "memory.tier=cpu: blocks that end early"),
        ({"scorer": "given"}, "retrieval.scorer=given: is for blocks of one size"),
    ],
)
def test_a_memory_refuses(settings, message):
    with pytest.raises(UserError, match=message):
        tiny(CONFIG).new_memory(**settings)


def test_half_a_block_is_the_least_unless_it_is_set():
    class Ids:
        vocab_size, landmark, eot = 64, LANDMARK, EOT
        sentence_ends, line_ends = (STOP,), (7,)

    from landmark.config.schema import ModelConfig

    shape = {"num_layers": 1, "num_heads": 1, "head_dim": 8, "mlp_dim": 8}
    model = ModelConfig("landmark", **shape, block_size=5, block_ends="sentences")
    assert decoder_config(model, Ids()).ends == replace(CONFIG, end_ids=(STOP,)).ends  # pyright: ignore[reportArgumentType]
    lines = replace(model, block_ends="lines", least_block_size=4)
    assert decoder_config(lines, Ids()).end_ids == (7,)  # pyright: ignore[reportArgumentType]
    Ids.sentence_ends = ()
    with pytest.raises(UserError, match="model.block_ends=sentences: none of the tokenizer's ids ends one"):
        decoder_config(model, Ids())  # pyright: ignore[reportArgumentType]
