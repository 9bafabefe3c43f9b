"""Models in both directions: what a token sees, how a text is read, and what is refused."""

import hashlib
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from landmark.data.masked_tokens import MaskedTokens

from landmark.config import checks
from landmark.data.named_tokenizers import load_tokenizer
from landmark.data.stream import Stream
from landmark.evaluation import evaluate_masked
from landmark.experiment.checks import check
from landmark.experiment.identity import row_settings, run_settings
from landmark.models import DecoderConfig
from landmark.models.decoder import Block
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests import naive
from tests.models.test_decoder import LANDMARK, LOOKING_BACK, TINY, tiny
from tests.training.training_case import make_config

PLAIN, BOTH = replace(TINY, masked=True), replace(LANDMARK, masked=True)
TOKENIZER = load_tokenizer("bytes")


@pytest.mark.parametrize("config", [PLAIN, BOTH, replace(BOTH, local_blocks=1), replace(PLAIN, num_kv_heads=1)])
def test_a_token_sees_later_tokens(config):
    """Those of the last, incomplete block are not seen by other blocks of a landmark model: it has no landmark yet."""
    model, raw = tiny(config), torch.randint(0, 50, (1, 23))
    other = raw.clone()
    other[0, 17] = (other[0, 17] + 1) % 50
    changed = (model(raw) - model(other)).abs().amax(-1)[0] > 1e-9
    assert changed.all()
    other = raw.clone()
    other[0, 22] = (other[0, 22] + 1) % 50
    changed = (model(raw) - model(other)).abs().amax(-1)[0] > 1e-9
    to_all = config.kind == "transformer" or config.local_blocks > 0  # by the block beside it, in the second layer
    assert changed.tolist() == [to_all or place >= 20 for place in range(23)]


@pytest.mark.parametrize("landmark_key", ["token", "mean", "pooled"])
def test_backends_agree_with_their_gradients(landmark_key):
    keys = {**LOOKING_BACK, "landmark_key": landmark_key, "landmark_bias": True}
    tokens, phase = torch.randint(0, 50, (2, 23)), torch.tensor([2, 5])
    found = []
    for backend in ("reference", "blockwise"):
        model = tiny(replace(BOTH, **keys, backend=backend))
        ((loss, _),) = model.window_losses(WindowBatch(tokens, tokens, phase))
        loss.backward()
        found.append([loss, *(weight.grad for weight in model.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("top_k", [1, 2, None])
def test_a_layer_is_plain_loops(top_k):
    """One layer of a whole text, with the best blocks before and after a token's own."""
    model = tiny(replace(BOTH, num_layers=1))
    raw, seen = torch.randint(0, 50, (1, 20)), {}
    block = cast(Block, model.blocks[0])
    original = block.attention.out.forward
    block.attention.out.forward = lambda x: original(seen.setdefault("out", x))
    model(raw, top_k=top_k)
    tokens = torch.cat([part for four in raw.split(5, 1) for part in (four, torch.full((1, 1), 60))], 1)
    qkv = block.attention.qkv(block.attention_norm(model.embedding(tokens))).unflatten(-1, (-1, 8)).transpose(1, 2)
    q, k, v = (x[0].detach().numpy() for x in qkv.split(2, 1))
    q, k = (np.stack([[naive.rotate(x[h, i], i) for i in range(24)] for h in range(2)]) for x in (q, k))
    out = [naive.landmark_attention(q[h], k[h], v[h], 5, 0, top_k=top_k, bidirectional=True) for h in range(2)]
    np.testing.assert_allclose(seen["out"][0].detach(), np.concatenate(out, -1), atol=1e-10)


def test_a_masked_model_has_no_memory_and_continues_no_text():
    for config in (PLAIN, BOTH):
        model = tiny(config)
        for call in (model.new_memory, lambda each=model: each.unlimited_memory(9)):
            with pytest.raises(UserError, match="it has no memory and continues no text"):
                call()
        with pytest.raises(UserError, match="continues no text"):
            model.generate(torch.randint(0, 50, (1, 4)), 2)


@pytest.mark.parametrize(("kind", "k"), [("transformer", 4), ("landmark", 2), ("landmark", 100)])
def test_masked_perplexity_by_hand(kind, k, tmp_path):
    text = ("It was the best of times, it was the worst of times. " * 12).encode()
    ids = np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), np.array([256], np.uint16)])
    stream = Stream(tmp_path / "x.bin", ids, hashlib.sha256(ids.tobytes()).hexdigest(), 1, len(text), 144)
    config = make_config(kind)
    config.model.masked, config.retrieval.k = True, k
    config.eval.length, config.eval.tokens, config.eval.span, config.eval.batch_size = 60, 512, 256, 3
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "mlp_dim": 32,
        "masked": True,
    }
    landmarks: dict[str, Any] = {"landmark_id": 257, "block_size": 5} if kind == "landmark" else {}
    model = tiny(DecoderConfig(kind, **shape, **landmarks)).eval()
    found = evaluate_masked(model, stream, TOKENIZER, checks.resolve(config))
    masks, losses, places = MaskedTokens(TOKENIZER.mask, (257, 256)), [], []
    for span in (0, (len(ids) - 1) // 2):
        for start, skipped in [*((span + 60 * n, 0) for n in range(4)), (span + 196, 44)]:
            tokens = torch.from_numpy(ids[start : start + 60].astype(np.int64))[None]
            shown, hidden = masks.of_text(tokens, [start])
            logits = model(shown, **({"top_k": k} if kind == "landmark" else {}))[0]
            for place in hidden[0].nonzero()[:, 0].tolist():
                if place >= skipped:
                    losses.append(torch.nn.functional.cross_entropy(logits[place], tokens[0, place]).item())
                    places.append(start + place)
    assert len(set(places)) == len(places) == found["tokens"]
    assert found["nll"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert sum(n for n, _ in found["position_nll"]) == found["tokens"]
    assert found["keys_attended"] == (60 if kind == "transformer" or k == 100 else 15)


def test_hidden_tokens_alone_carry_a_loss():
    model, tokens = tiny(BOTH), torch.randint(0, 50, (1, 11))
    targets = torch.full_like(tokens, NO_LOSS)
    targets[0, 3] = tokens[0, 3]
    ((loss, count),) = model.window_losses(WindowBatch(tokens, targets, torch.zeros(1, dtype=torch.int64)))
    logits = model.head(model.hidden(tokens))[0, 3]
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, tokens[0, 3]).double(), check_dtype=False
    )
    assert int(count) == 1


def test_identities_tell_masked_models_apart():
    config, other = make_config("landmark"), make_config("landmark_mlm")
    runs = [run_settings(each, "t", "s")["model"] for each in (config, other)]
    assert runs[1] == runs[0] | {"masked": True}
    rows = [row_settings(each, "run", "s") for each in (config, other)]
    assert rows[1] == rows[0] | {"masked": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.model, "kind", "transformer_xl"), "model.masked=true: model=transformer_xl"),
        (lambda c: setattr(c.cmt, "enabled", True), "model.masked=true: cmt=on"),
        (lambda c: setattr(c.model, "backend", "triton"), "model.masked=true: the fused kernels"),
        (lambda c: setattr(c.data, "name", "passkey"), "model.masked=true: data=passkey"),
        (lambda c: setattr(c.eval, "local", 250), "leave out eval.local=250"),
        (lambda c: (setattr(c.train, "local", 20), setattr(c.train, "k", [2])), "train.local=20: a masked model"),
        (lambda c: setattr(c.memory, "blocks", 10), "memory.blocks=10: a masked model has no memory"),
        (lambda c: setattr(c.retrieval, "scorer", "recent"), "retrieval.scorer=recent: a masked model"),
        (lambda c: setattr(c.retrieval, "k", 0), "retrieval.k=0: must be at least 1"),
        (lambda c: setattr(c.eval, "probe", "copy"), "eval.probe: a masked model"),
        (lambda c: setattr(c, "task", "generate"), "task=generate: a masked model"),
    ],
)
def test_what_a_masked_model_cannot_do_is_refused(change, message):
    config = make_config("landmark_mlm")
    config.model.window = config.model.cache = 16
    change(config)
    with pytest.raises(UserError, match=message):
        check(config)
