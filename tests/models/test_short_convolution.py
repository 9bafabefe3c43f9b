"""Short convolutions: against a loop over the normal tokens, in windows cut anywhere and in memories of all kinds."""

from dataclasses import replace

import pytest
import torch

from landmark.attention.layout import blocks_and_landmarks
from landmark.memory import Memory
from landmark.models import Decoder, DecoderConfig
from landmark.models.short_convolution import EarlierTokens, ShortConvolution
from landmark.utils.errors import UserError

TINY = DecoderConfig(
    "transformer",
    vocab_size=64,
    num_layers=3,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    key_offset=0.5,
    rotary_fraction=0.5,
    initialisation="fan_in",
    short_convolution=4,
)
LANDMARK = replace(TINY, kind="landmark", block_size=5, landmark_id=60, landmark_key="mean", landmark_bias=True)
XL = replace(TINY, kind="transformer_xl", window=6, cache=100)


def with_weights(config):
    """A model whose convolutions, which begin at zero, change what it computes."""
    torch.manual_seed(0)
    model = Decoder(config).double()
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            torch.nn.init.normal_(module.weight, std=0.5)
    return model


@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("block_size", [None, 3, 5])
def test_each_place_gets_the_normal_tokens_before_it(tokens, block_size):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 17, 3), torch.randn(tokens - 1, 3)
    phase, is_landmark, seen = torch.tensor([0, 1, 2, 3]), None, torch.zeros(4, 17, dtype=torch.bool)
    if block_size is not None:
        seen = blocks_and_landmarks(phase, 17, block_size)[1]
        is_landmark = blocks_and_landmarks(phase - tokens + 4 * (block_size + 1), 17 + tokens, block_size)[1]
    expected = x.clone()
    for text in range(4):
        before = []
        for place in range(17):
            for back, earlier in enumerate(before[:-tokens:-1]):
                expected[text, place] += weight[back] * x[text, earlier]
            before += [] if seen[text, place] else [place]
    torch.testing.assert_close(EarlierTokens(is_landmark, tokens).add(0, "mlp", x, weight), expected)


@pytest.mark.parametrize("config", [TINY, LANDMARK, XL], ids=["transformer", "landmark", "transformer_xl"])
@pytest.mark.parametrize("chunks", [[29], [1] * 29, [5, 5, 6, 1, 1, 11], [2, 3, 24]])
def test_a_text_is_read_in_chunks_as_in_one_window(config, chunks):
    model = with_weights(config)
    raw = torch.randint(0, 50, (2, 29))
    settings = {"k": 9} if config is LANDMARK else {}
    memory = model.unlimited_memory(29) if config is TINY else model.new_memory(**settings)
    read = torch.cat([model(part, memory=memory) for part in raw.split(chunks, 1)], 1)
    torch.testing.assert_close(read, model(raw), atol=1e-10, rtol=0)


def test_a_window_cut_anywhere_is_part_of_its_text():
    """Its first tokens have none before them; a token that is far enough from them has those of the whole text."""
    config = replace(LANDMARK, num_layers=1, key_offset=0.0, landmark_key="token", landmark_bias=False)
    model, width = with_weights(config), 6
    text = torch.randint(0, 50, (1, 4 * width))
    text[:, 5::width] = 60
    found = {}

    def attend(name):
        def of_layer(layer, q, k, v, **_):
            found[name] = k
            return v

        return of_layer

    for cut in range(width):
        model._window_attention = lambda *_, cut=cut: attend(cut)
        model.hidden(text[:, cut:], torch.tensor([cut]))
    for cut in range(1, width):
        torch.testing.assert_close(found[cut][:, :, 4:], found[0][:, :, cut + 4 :])


@pytest.mark.parametrize("config", [TINY, LANDMARK], ids=["transformer", "landmark"])
def test_a_new_model_is_the_one_without_convolutions(config):
    models = []
    for tokens in (1, 4):
        torch.manual_seed(0)
        models.append(Decoder(replace(config, short_convolution=tokens)))
    plain, model = models
    raw = torch.randint(0, 50, (2, 29))
    assert torch.equal(model(raw), plain(raw))
    more = model.num_parameters() - plain.num_parameters()
    assert more == 3 * 2 * 3 * 16  # layers, convolutions in each, tokens before, channels


def test_saved_and_selected_memories_go_on_with_the_last_tokens(tmp_path):
    model = with_weights(LANDMARK)
    raw = torch.randint(0, 50, (2, 29))
    for cut in (7, 10, 12):  # within a block, behind a landmark, and two tokens later
        memory, loaded = model.new_memory(k=9), model.new_memory(k=9)
        model(raw[:, :cut], memory=memory)
        memory.save(tmp_path / str(cut))
        loaded.load(tmp_path / str(cut))
        chosen = memory.select(torch.tensor([1, 1, 0]))
        expected = model(raw[:, cut:], memory=memory)
        assert torch.equal(model(raw[:, cut:], memory=loaded), expected)
        torch.testing.assert_close(model(raw[[1, 1, 0], cut:], memory=chosen), expected[[1, 1, 0]])


def test_a_chunk_that_is_forgotten_leaves_nothing():
    model = with_weights(replace(LANDMARK, key_offset=0.0))
    raw = torch.randint(0, 50, (1, 20))
    memory, expected = model.new_memory(k=9), model.new_memory(k=9)
    for one in (memory, expected):
        model(raw[:, :7], memory=one)
    model._read(torch.randint(0, 50, (1, 9)), memory, None)
    assert isinstance(memory, Memory)
    memory.discard()
    assert torch.equal(model(raw[:, 7:], memory=memory), model(raw[:, 7:], memory=expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_convolution": 0}, "must be at least 1"),
        ({"short_convolution": 7}, r"at most a block and its landmark, model.block_size \+ 1 = 6"),
        (
            {"block_ends": "lines", "least_block_size": 2, "end_ids": (1,), "document_end": 2},
            "goes without model.short_convolution=4, set model.short_convolution=null",
        ),
    ],
)
def test_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(LANDMARK, **change)
