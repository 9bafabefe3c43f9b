"""Windows with landmarks: each landmark must stand where the phase says."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from landmark.huggingface import LandmarkCollator, windows, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, make_tokenizer

BLOCK = 3


@pytest.fixture
def wrapped(tokenizer):
    return wrap(make_model("llama"), tokenizer, block_size=BLOCK, memory={"k": 2}, local=9)


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 256, (length,), generator=generator).tolist()} for length in (23, 5, 40)]


def test_raw_text_is_no_window(wrapped, documents):
    ids = torch.tensor([documents[0]["input_ids"]])
    with pytest.raises(UserError, match="window 0 has no landmark at token 3, where its phase and block_size=3 say"):
        wrapped(ids, labels=ids, phase=torch.tensor([0]))


@pytest.mark.parametrize("packed", [False, True])
def test_a_collator_of_another_block_size_is_noticed(wrapped, documents, packed):
    other = wrap(make_model("llama"), make_tokenizer(), block_size=BLOCK + 1)
    batch = LandmarkCollator(other, length=10, packed=packed)(documents)
    with pytest.raises(UserError, match=r"window \d has .* landmark at token \d"):
        wrapped(**batch)
    batch = LandmarkCollator(wrapped, length=10, packed=packed)(documents)
    wrapped(**batch)
    batch["phase"] = (batch["phase"] + 1) % (BLOCK + 1)
    with pytest.raises(UserError, match="window 0 has no landmark at token"):
        wrapped(**batch)


@pytest.mark.parametrize("phase", [torch.tensor([0.0]), torch.tensor([False]), [0], 0])
def test_a_phase_that_is_no_integer_tensor_is_refused(wrapped, phase):
    with pytest.raises(UserError, match="phase: must be a tensor of integers"):
        wrapped(torch.ones(1, 3, dtype=torch.int64), phase=phase)


def test_places_of_landmarks():
    assert windows.is_landmark(torch.tensor([0, 2]), 6, 2).long().tolist() == [[0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0]]
    packed = windows.is_landmark(torch.tensor([1, 0]), 6, 2, torch.tensor([0, 2, 6]))
    assert packed.long().tolist() == [[0, 1, 0, 0, 1, 0]]


def test_a_loss_without_landmarks_says_so(wrapped, documents):
    ids = torch.tensor([documents[0]["input_ids"]])
    with pytest.warns(UserWarning, match="labels without phase: this loss is of the model without landmarks"):
        wrapped(ids, labels=ids)


def test_a_tokenizer_with_a_hole_in_its_ids_is_refused():
    """The next id that it would give is that of its last token, whose embedding the landmark would overwrite."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number + (number >= 100) for number, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer, model = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=letters[0]), make_model("llama")
    before = model.get_input_embeddings().weight.clone()
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) == 256
    with pytest.raises(UserError, match="256 tokens with ids up to 256 and none with the id 100, so <landmark> would"):
        wrap(model, tokenizer)
    assert "<landmark>" not in tokenizer.get_vocab()
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert not hasattr(model, "landmarks")
