"""Which tokens masked language modelling hides: a function of seed, step and index, or of the place in a text."""

import itertools

import pytest
import torch

from landmark.data.datamodule import WindowDataModule
from landmark.data.masked_tokens import SHARE, MaskedTokens
from landmark.data.named_tokenizers import load_tokenizer
from landmark.data.tokenizer import Tokenizer
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from tests.training.training_case import MASKED, TOKENIZER, make_config, make_corpus

SPECIAL = (TOKENIZER.landmark, TOKENIZER.eot)


def module_of(folder, kind=MASKED, rank=0, devices=1):
    module = WindowDataModule(make_corpus(folder), TOKENIZER, make_config(kind))
    module.trainer = type("Trainer", (), {"global_rank": rank, "world_size": devices})()  # pyright: ignore
    return module


def batches(module, count, start=0):
    module.start_step = start
    return list(itertools.islice(module.train_dataloader(), count))


def test_hidden_tokens_are_the_targets_and_nothing_else_changes(tmp_path):
    hidden = normal = 0
    for ours, plain in zip(batches(module_of(tmp_path), 60), batches(module_of(tmp_path, "landmark"), 60)):
        is_hidden = ours.tokens == TOKENIZER.mask
        assert torch.equal(ours.targets, plain.tokens.masked_fill(~is_hidden, NO_LOSS))
        assert torch.equal(ours.tokens[~is_hidden], plain.tokens[~is_hidden])
        special = torch.isin(plain.tokens, torch.tensor(SPECIAL))
        assert not (is_hidden & special).any()
        hidden, normal = hidden + int(is_hidden.sum()), normal + int((~special).sum())
    assert hidden / normal == pytest.approx(SHARE, abs=4 * (SHARE * (1 - SHARE) / normal) ** 0.5)


def test_a_resumed_training_and_every_device_hide_the_same_tokens(tmp_path):
    all_steps = batches(module_of(tmp_path), 12)
    for ours, expected in zip(batches(module_of(tmp_path), 4, start=8), all_steps[8:], strict=True):
        assert torch.equal(ours.tokens, expected.tokens)
    parts = [batches(module_of(tmp_path, rank=rank, devices=2), 3) for rank in (0, 1)]
    for *shares, expected in zip(*parts, all_steps[:3], strict=True):
        assert torch.equal(torch.cat([share.tokens for share in shares]), expected.tokens)
    assert not torch.equal(all_steps[0].tokens == TOKENIZER.mask, all_steps[1].tokens == TOKENIZER.mask)


def test_validation_hides_the_same_tokens_each_time(tmp_path):
    first, again = (list(module_of(tmp_path).val_dataloader()) for _ in range(2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert any((batch.tokens == TOKENIZER.mask).any() for batch in first)


def test_a_text_has_the_same_hidden_tokens_in_stretches_of_any_length():
    masks, text = MaskedTokens(TOKENIZER.mask, SPECIAL), torch.randint(0, 256, (1, 9000))
    text[0, ::50] = TOKENIZER.eot
    whole, hidden = masks.of_text(text, [700])
    assert torch.equal(whole, text.masked_fill(hidden, TOKENIZER.mask))
    assert not hidden[0, ::50].any()
    for start, length in ((0, 1), (3000, 700), (3395, 2), (8000, 1000)):
        part, _ = masks.of_text(text[:, start : start + length], [700 + start])
        assert torch.equal(part, whole[:, start : start + length])


def test_the_mask_is_an_unused_id():
    for name in ("bytes", "code"):
        tokenizer = load_tokenizer(name)
        assert tokenizer.mask not in (tokenizer.landmark, tokenizer.eot)
        assert tokenizer.decode([tokenizer.mask]) == ""
    with pytest.raises(UserError, match="no unused id for the mask"):
        _ = Tokenizer("full", 5, 6, 7, {}).mask
