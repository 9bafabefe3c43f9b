"""Models with landmarks against their own layers and our memory, combined by hand."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from landmark.attention import Scoring, Window, landmark_attention
from landmark.attention.keys import Keys
from landmark.attention.layout import insert_landmarks
from landmark.huggingface import wrap
from landmark.huggingface.rotation import unrotate
from landmark.memory.settings import memory_of
from tests.huggingface.conftest import CONFIGS, make_model

BLOCK = 5


def own_frequencies(config):
    """By the definitions in the papers of the scalings, in float64."""
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequency = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if parameters["rope_type"] == "default":
        return frequency, 1.0
    factor = parameters["factor"]
    if parameters["rope_type"] == "linear":
        return frequency / factor, 1.0
    original = parameters["original_max_position_embeddings"]
    if parameters["rope_type"] == "llama3":
        turns = original * frequency / (2 * math.pi)
        smooth = ((turns - parameters["low_freq_factor"]) / 3.0).clamp(0, 1)
        return frequency / factor * (1 - smooth) + frequency * smooth, 1.0
    bounds = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp), 0.1 * math.log(factor) + 1


def side_by_side(x):
    """Element i beside i + d/2."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def project(attention, x):
    """Queries, keys, values (B, H, T, d), not rotated."""
    shape = (*x.shape[:2], -1, attention.head_dim)
    q, k, v = (getattr(attention, name)(x).view(shape).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj"))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, v


def half_split(x, positions, frequency):
    angle = positions[:, None] * frequency
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ByHand:
    """A model's own embeddings, norms, projections and perceptrons around a given attention."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.gemma3 = self.config.model_type == "gemma3_text"

    def hidden(self, tokens, attend):
        inner = self.model.model
        x = inner.embed_tokens(tokens)
        for number, layer in enumerate(inner.layers):
            attention = layer.self_attn
            out = attend(number, *project(attention, layer.input_layernorm(x)))
            out = attention.o_proj(out.transpose(1, 2).flatten(2))
            if self.gemma3:
                x = x + layer.post_attention_layernorm(out)
                x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
            else:
                x = x + out
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return inner.norm(x)

    def slides(self, number):
        return self.gemma3 and self.config.layer_types[number] == "sliding_attention"

    def scale(self):
        dim = self.model.model.layers[0].self_attn.head_dim
        return (self.config.query_pre_attn_scalar if self.gemma3 else dim) ** -0.5

    def sliding(self, q, k, v, first):
        """q of the last tokens; k, v of all so far, turned here."""
        config = self.config
        theta = config.rope_parameters["sliding_attention"]["rope_theta"]
        frequency = theta ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        at = torch.arange(k.shape[2], dtype=torch.float64)
        q, k = half_split(q, at[first:], frequency), half_split(k, at, frequency)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        distance = at[first:, None] - at
        seen = (distance >= 0) & (distance < config.sliding_window)
        scores = (q @ k.mT) * self.scale()
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def read_by_hand(model, ids, local, landmark, **settings):
    """Logits after every id, by our own memory."""
    by_hand = ByHand(model)
    frequency, stretch = own_frequencies(model.config)
    memory = memory_of(BLOCK, settings, keys=Keys(rope_base=frequency))
    slid = {}
    logits = []
    for chunk in ids.split(local, 1):
        tokens, own = insert_landmarks(chunk, memory.position, BLOCK, landmark)

        def attend(number, q, k, v):
            if by_hand.slides(number):
                first = slid[number][0].shape[2] if number in slid else 0
                if first:
                    k, v = torch.cat([slid[number][0], k], 2), torch.cat([slid[number][1], v], 2)
                slid[number] = k, v
                return by_hand.sliding(q, k, v, first)
            q = side_by_side(q) * (by_hand.scale() * math.sqrt(q.shape[-1]) * stretch**2)
            return memory.attend(number, q, side_by_side(k), v)

        hidden = by_hand.hidden(tokens, attend)
        memory.commit()
        logits.append(model.lm_head(hidden[:, own]))
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("family", "granularity"),
    [
        *((family, "per_token_and_head") for family in CONFIGS),
        *((family, granularity) for family in ("llama_yarn", "gemma3") for granularity in ("per_head", "per_token")),
    ],
)
@torch.no_grad()
def test_reading_with_a_memory_is_our_memory_on_the_same_weights(family, granularity, tokenizer):
    model = make_model(family)
    settings = {"k": 3, "granularity": granularity, "max_blocks": 9}
    wrapped = wrap(model, tokenizer, block_size=BLOCK, memory=settings, local=17).double()
    ids = torch.randint(0, 256, (2, 120), generator=torch.Generator().manual_seed(1))
    expected = read_by_hand(wrapped, ids, 17, wrapped.landmarks.token, **settings)
    found = wrapped(ids, past_key_values=(memory := wrapped.new_memory())).logits
    assert memory.stats["blocks_retrieved"] > 0
    # frequencies are float32 in the model, and so are the angles of its rotation (0 if no layer slides)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 if family == "gemma3" else 1e-5)


@torch.no_grad()
def test_a_chunk_after_the_other_is_the_text_at_once(family, tokenizer):
    """Fed a token at a time, in uneven chunks or whole, the logits are those of chunks as `local` cuts them."""
    model = make_model(family)
    wrapped = wrap(model, tokenizer, block_size=BLOCK, memory={"k": 100}, local=8).double()
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(2))
    whole = wrapped(ids, past_key_values=wrapped.new_memory()).logits
    memory = wrapped.new_memory()
    parts = [wrapped(part, past_key_values=memory).logits for part in ids.split(8, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert memory.get_seq_length() == 40
    kept = wrapped(ids, past_key_values=wrapped.new_memory(), logits_to_keep=11).logits
    torch.testing.assert_close(kept, whole[:, -11:])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_without_landmarks_the_model_is_unchanged_bit_for_bit(family, implementation, tokenizer):
    model = make_model(family, implementation)
    original = copy.deepcopy(model)
    wrapped = wrap(model, tokenizer, block_size=BLOCK)
    ids = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(3))
    before = original(ids, output_hidden_states=True)
    after = wrapped(ids, output_hidden_states=True)
    for a, b in zip(before.hidden_states, after.hidden_states, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(before.logits, after.logits[..., :257])
    cached, plain = (model(ids, use_cache=True).past_key_values for model in (wrapped, original))
    following = wrapped(ids[:, :3], past_key_values=cached).logits[..., :257]
    assert torch.equal(following, original(ids[:, :3], past_key_values=plain).logits)


@torch.no_grad()
def test_windows_are_the_papers_equations(family, tokenizer):
    """Cut mid-block, landmarks included: against explicit weights."""
    model = make_model(family)
    wrapped = wrap(model, tokenizer, block_size=BLOCK).double()
    phase, length = torch.tensor([0, 3]), 40
    tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(4))
    tokens[(phase[:, None] + torch.arange(length)) % (BLOCK + 1) == BLOCK] = wrapped.landmarks.token
    by_hand, (frequency, stretch) = ByHand(wrapped), own_frequencies(wrapped.config)
    at = torch.arange(length, dtype=torch.float64)

    def attend(number, q, k, v):
        if by_hand.slides(number):
            return by_hand.sliding(q, k, v, 0)
        q, k = (half_split(x, at, frequency) for x in (q, k))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scoring = Scoring(by_hand.scale() * stretch**2)
        return landmark_attention(q, k, v, Window(BLOCK, phase), scoring=scoring, backend="reference")[0]

    expected = wrapped.lm_head(by_hand.hidden(tokens, attend))
    torch.testing.assert_close(wrapped(tokens, phase=phase).logits, expected, rtol=0, atol=2e-4)


def test_unrotate_undoes_the_models_rotation():
    frequency = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    x, positions = torch.randn(2, 3, 30, 16), torch.randint(0, 500, (2, 30))
    angle = positions[:, None, :, None].float() * frequency
    a, b = x.chunk(2, -1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    torch.testing.assert_close(unrotate(turned, positions, frequency), side_by_side(x), rtol=0, atol=2e-6)
    for none in (torch.zeros(1, 30, dtype=torch.int64), None):
        assert torch.equal(unrotate(x, none, frequency), side_by_side(x))


def test_a_window_of_another_phase_is_another_loss(tokenizer, monkeypatch):
    """The test above would not notice a phase that is not used if windows of both gave the same."""
    wrapped = wrap(make_model("llama"), tokenizer, block_size=BLOCK)
    tokens = torch.randint(0, 256, (1, 30))
    monkeypatch.setattr("landmark.huggingface.model.check_windows", lambda *_, **__: None)
    a, b = (wrapped(tokens, phase=torch.tensor([phase])).logits for phase in (0, 3))
    assert not torch.allclose(F.softmax(a, -1), F.softmax(b, -1), atol=1e-3)
