"""Masked language modelling: the tokens that are hidden, what a token sees, how a text is measured, what is refused."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from landmark.experiment.config import checks
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.data.masked import SHARE, MaskedTokens, masked_tokens
from landmark.experiment.data.stream import Stream
from landmark.experiment.data.tokenizers import Tokenizer, load_tokenizer
from landmark.experiment.evaluation.rows import evaluate_masked
from landmark.experiment.runs.jobs import check
from landmark.models.config import DecoderConfig
from landmark.models.masked import landmark_attention_both_ways
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests import oracle
from tests.configurations import changed
from tests.experiment.data.test_windows import batches
from tests.experiment.training.training_case import MASKED, TOKENIZER, make_config, make_corpus
from tests.models.test_decoder import LANDMARK, LOOKING_BACK, TINY, tiny
from tests.pairs import all_pairs, name_of

PLAIN, BOTH = (replace(config, masked=True) for config in (TINY, LANDMARK))
MASK = masked_tokens(TOKENIZER).mask
SPECIAL = (TOKENIZER.landmark, TOKENIZER.eot)


OPTIONS = {"length": [1, 9, 24, 31], "block_size": [1, 4], "phase": [0, 1, 4], "alpha": [0.0, 0.5, 1.0]}
CASES = all_pairs(OPTIONS | {"top_k": [None, 1, 3]}, lambda case: case["phase"] <= case["block_size"])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_attention_both_ways_is_plain_loops(case):
    q = torch.randn(2, 2, case["length"], 4, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 1, case["length"], 4, dtype=torch.float64)
    phase, options = torch.tensor([case["phase"], 0]), {"alpha": case["alpha"], "top_k": case["top_k"]}
    out = landmark_attention_both_ways(q, k, v, case["block_size"], phase, **options)
    for b, h in itertools.product(range(2), range(2)):
        leaves = q[b, h].detach().numpy(), k[b, 0].numpy(), v[b, 0].numpy()
        expected, _ = oracle.window(*leaves, case["block_size"], int(phase[b]), **options, both_ways=True)
        np.testing.assert_allclose(out[b, h].detach(), expected, atol=1e-10)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_weights_of_normal_tokens_are_those_of_the_second_reproduction():
    """The matrix that its README works through: blocks of two tokens, every row of scores the same. Only its landmarks
    see their own block."""
    k = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    k[..., 0] = torch.tensor([1.0, 2, 3, 1, 2, 3]).log() * 6**0.5
    q = torch.zeros_like(k)
    q[..., 0] = 1
    weights = landmark_attention_both_ways(q, k, torch.eye(6, dtype=torch.float64)[None, None], 2)[0, 0]
    expected = torch.tensor([1, 2, 0, 1, 2, 0], dtype=torch.float64) / 6
    torch.testing.assert_close(weights[[0, 1, 3, 4]], expected.expand(4, -1))


@pytest.mark.parametrize("config", [PLAIN, BOTH, replace(PLAIN, num_kv_heads=1)], ids=["plain", "landmark", "shared"])
def test_a_token_sees_later_tokens(config):
    """Those of the last, incomplete block are not seen by other blocks of a landmark model: it has no landmark yet."""
    model, raw = tiny(config), torch.randint(0, 50, (1, 23))
    for place in (17, 22):
        other = raw.clone()
        other[0, place] = (other[0, place] + 1) % 50
        seen = (model(raw) - model(other)).abs().amax(-1)[0] > 1e-9
        assert seen.tolist() == [config.kind == "transformer" or place == 17 or at >= 20 for at in range(23)]


def test_hidden_tokens_alone_carry_a_loss_and_every_parameter_gets_a_gradient():
    model, tokens = tiny(changed(BOTH, **LOOKING_BACK, landmark_key="mean", landmark_bias=True)), torch.arange(24)[None]
    targets = torch.full_like(tokens, NO_LOSS)
    targets[0, 3] = tokens[0, 3]
    ((loss, count),) = model.window_losses(WindowBatch(tokens, targets, torch.zeros(1, dtype=torch.int64)))
    logits = model.head(model.hidden(tokens))[0, 3]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, tokens[0, 3]))
    assert int(count) == 1
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_masked_model_has_no_memory_and_continues_no_text():
    for model in map(tiny, (PLAIN, BOTH)):
        for call, *given in ((model.new_memory,), (model.unlimited_memory, 9), (model.generate, [[1]], 2)):
            with pytest.raises(UserError, match="it has no memory and continues no text"):
                call(*given)


def module_of(folder, kind=MASKED, rank=0, devices=1):
    module = WindowDataModule(make_corpus(folder), TOKENIZER, make_config(kind))
    module.trainer = type("Trainer", (), {"global_rank": rank, "world_size": devices})()  # pyright: ignore
    return module


def test_hidden_tokens_are_the_targets_the_same_for_every_device_and_validation(tmp_path):
    hidden = normal = 0
    for ours, plain in zip(batches(module_of(tmp_path), 60), batches(module_of(tmp_path, "landmark"), 60), strict=True):
        is_hidden = ours.tokens == MASK
        assert torch.equal(ours.targets, plain.tokens.masked_fill(~is_hidden, NO_LOSS))
        assert torch.equal(ours.tokens[~is_hidden], plain.tokens[~is_hidden])
        special = torch.isin(plain.tokens, torch.tensor(SPECIAL))
        assert not (is_hidden & special).any()
        hidden, normal = hidden + int(is_hidden.sum()), normal + int((~special).sum())
    assert hidden / normal == pytest.approx(SHARE, abs=4 * (SHARE * (1 - SHARE) / normal) ** 0.5)
    all_steps = batches(module_of(tmp_path), 3)
    parts = [batches(module_of(tmp_path, rank=rank, devices=2), 3) for rank in (0, 1)]
    for *shares, expected in zip(*parts, all_steps, strict=True):
        assert torch.equal(torch.cat([share.tokens for share in shares]), expected.tokens)
    assert not torch.equal(all_steps[0].tokens == MASK, all_steps[1].tokens == MASK)
    first, again = (list(module_of(tmp_path).val_dataloader()) for _ in range(2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert any((batch.tokens == MASK).any() for batch in first)


def test_a_text_has_the_same_hidden_tokens_in_stretches_of_any_length_and_the_mask_is_an_unused_id():
    masks, text = MaskedTokens(MASK, SPECIAL), torch.randint(0, 256, (1, 9000))
    text[0, ::50] = TOKENIZER.eot
    whole, hidden = masks.mask_text(text, [700])
    assert torch.equal(whole, text.masked_fill(hidden, MASK))
    assert not hidden[0, ::50].any()
    for start, length in ((0, 1), (3000, 700), (3395, 2), (8000, 1000)):
        part, _ = masks.mask_text(text[:, start : start + length], [700 + start])
        assert torch.equal(part, whole[:, start : start + length])
    for name in ("bytes", "code"):
        tokenizer = load_tokenizer(name)
        assert masked_tokens(tokenizer).mask not in (tokenizer.landmark, tokenizer.eot)
        assert tokenizer.decode([masked_tokens(tokenizer).mask]) == ""
    with pytest.raises(UserError, match="no unused id for the mask"):
        masked_tokens(Tokenizer("full", 5, 6, 7))


@pytest.mark.parametrize(("kind", "k"), [("transformer", 4), ("landmark", 2), ("landmark", 100)])
def test_masked_perplexity_by_hand(kind, k, tmp_path):
    text = ("It was the best of times, it was the worst of times. " * 12).encode()
    ids = np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), np.array([256], np.uint16)])
    stream = Stream(ids, "")
    config = make_config(kind)
    config.model.masked, config.retrieval.k = True, k
    config.eval.length, config.eval.tokens, config.eval.span, config.eval.batch_size = 60, 512, 256, 3
    shape: dict[str, Any] = {"vocab_size": 320, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
    shape |= {"kind": kind, "landmark_id": 257, "block_size": 5, "masked": True}
    model = tiny(DecoderConfig.from_flat(shape)).eval()
    found = evaluate_masked(model, stream, TOKENIZER, checks.resolve(config))
    masks, losses, places = MaskedTokens(MASK, (257, 256)), [], []
    for span in (0, (len(ids) - 1) // 2):
        for start, skipped in [*((span + 60 * n, 0) for n in range(4)), (span + 196, 44)]:
            tokens = torch.from_numpy(ids[start : start + 60].astype(np.int64))[None]
            shown, hidden = masks.mask_text(tokens, [start])
            logits = model(shown)[0]
            for place in hidden[0].nonzero()[:, 0].tolist():
                if place >= skipped:
                    losses.append(torch.nn.functional.cross_entropy(logits[place], tokens[0, place]).item())
                    places.append(start + place)
    assert len(set(places)) == len(places) == found["tokens"]
    assert found["nll"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert sum(n for n, _ in found["position_nll"]) == found["tokens"]
    assert found["keys_attended"] == (60 if kind == "transformer" or k == 100 else 15)


@pytest.mark.parametrize(
    ("group", "changes", "message"),
    [
        ("model", {"kind": "transformer_xl"}, "model.masked=true: model=transformer_xl"),
        ("model", {"backend": "triton"}, "model.masked=true: .*model.backend=triton"),
        ("data", {"name": "passkey"}, "model.masked=true: .*data=passkey"),
        ("retrieval", {"scorer": "recent"}, "retrieval.scorer"),
        ("retrieval", {"k": 0}, "retrieval.k=0: must be at least 1"),
        ("eval", {"task": "copy"}, "eval.task=copy: is for models with a memory"),
        ("eval", {"local": 9}, "eval.local=9: model.masked=true reads all of"),
        ("model", {"architecture": "mine.gated"}, "model.masked=True and model.architecture=mine.gated: choose one"),
        ("", {"task": "generate"}, "task=generate"),
    ],
)
def test_what_a_masked_model_cannot_do_is_refused(group, changes, message):
    config = make_config(MASKED)
    config.model.window = config.model.cache = 16
    for key, value in changes.items():
        setattr(getattr(config, group) if group else config, key, value)
    with pytest.raises(UserError, match=message):
        check(config)
