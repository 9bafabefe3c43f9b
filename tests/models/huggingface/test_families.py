"""Every family: bit for bit itself without landmarks, the paper's equations with them; and its row in
docs/families.md."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from landmark.attention.layout import insert_landmarks
from landmark.memory.landmarks.memory import memory_of
from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.huggingface import LandmarkModel, attach, families, unwrap, wrap
from landmark.models.huggingface.attention import _eager
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import CONFIGS, EAGER, make_model, make_tokenizer, read, refused_models
from tests.models.huggingface.sweep import PAGE, kinds, row
from tests.models.huggingface.test_kinds import KINDS, model_of_kind

BLOCK = 5
PHASE: list[torch.Tensor] = []  # of the windows that `explicit` reads


def implementation(family: str) -> str:
    return "eager" if family in EAGER else "sdpa"


def explicit(original, module, q, k, v, mask, **given):
    """Attention by the paper's equations, each weight by itself. In layers with a window each token sees the text there
    that is near enough, and a landmark sees itself too."""
    kind = families.layer_types(module.owner())[module.layer_idx]
    if given.get("sliding_window") is not None or kind != "full_attention":
        seen = torch.zeros(len(q), 1, q.shape[2], q.shape[2], dtype=torch.bool)
        for sample, phase in enumerate(PHASE[0].tolist()):
            texts = [(phase + place) % (BLOCK + 1) != BLOCK for place in range(q.shape[2])]
            for i in range(q.shape[2]):
                for j in range(i + 1):
                    here, there = sum(texts[:i]), sum(texts[:j])
                    near = here // 12 == there // 12 if kind == "chunked_attention" else here - there < 12
                    seen[sample, 0, i, j] = (near and texts[j]) or i == j
        added = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        return original(module, q, k, v, added, **given)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores, sinks, cap = (q @ k.mT) * given["scaling"], given.get("s_aux"), given.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = torch.zeros_like(scores)
    for sample, phase in enumerate(PHASE[0].tolist()):
        place = phase + torch.arange(q.shape[2])
        block, is_landmark = place // (BLOCK + 1), place % (BLOCK + 1) == BLOCK
        for i in range(q.shape[2]):
            own = (block == block[i]) & ~is_landmark & (torch.arange(len(place)) <= i)
            gates = is_landmark & (block < block[i])
            row = scores[sample, :, i]
            outer = torch.cat([row[:, own], row[:, gates]], 1)
            if sinks is not None:
                outer = torch.cat([outer, sinks[:, None].to(outer.dtype)], 1)
            outer = outer.softmax(1)
            weights[sample, :, i, own] = outer[:, : int(own.sum())]
            for gate, number in zip(outer[:, int(own.sum()) :].T, block[gates].tolist()):
                inside = (block == number) & ~is_landmark
                weights[sample, :, i, inside] = gate[:, None] * row[:, inside].softmax(1)
    return (weights @ v).transpose(1, 2).contiguous(), None


for name, original in {"eager": _eager, "sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"]}.items():
    AttentionInterface.register(f"explicit_{name}", partial(explicit, original))
    AttentionMaskInterface.register(f"explicit_{name}", ALL_MASK_ATTENTION_FUNCTIONS[name])


def by_the_equations(wrapped, tokens, phase):
    """Logits of windows, from the model's own class of transformers with `explicit` attention."""
    plain = unwrap(copy.deepcopy(wrapped))
    for module in plain.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "owner", lambda: plain)
    plain.set_attn_implementation(f"explicit_{plain.config._attn_implementation}")
    PHASE[:] = [phase]
    is_text = tokens != wrapped.landmarks.token
    return plain(tokens, position_ids=is_text.cumsum(1) - is_text.long(), use_cache=False).logits


def greedily(model, ids, count):
    """The most probable token that is not the landmark, one after the other."""
    memory, text = model.new_memory(), ids
    logits = model(ids, past_key_values=memory).logits
    for _ in range(count):
        logits[..., model.landmarks.token] = -torch.inf
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        logits = model(text[:, -1:], past_key_values=memory).logits
    return text


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_a_family(family, tmp_path):
    """In float64: (1) without landmarks the model itself, whose embedding has one mean row more; (2) windows, cut
    mid-block, by the equations; (3) a memory that retrieves everything, fed whole or in chunks, is one window; (4) it
    generates what is most probable; (5) it comes back from disk, and unwrapped it is the model of before."""
    model = make_model(family, implementation(family))
    original = copy.deepcopy(model).double()
    tokenizer = make_tokenizer()
    wrapped = wrap(model, tokenizer, block_size=BLOCK, memory={"k": 2}, local=8).double()
    assert wrapped is model
    assert isinstance(wrapped, LandmarkModel)
    assert isinstance(wrapped, type(original))
    embedding, before = (each.get_input_embeddings().weight for each in (wrapped, original))
    assert torch.equal(embedding[:257], before)
    torch.testing.assert_close(embedding[257], before.mean(0), rtol=0, atol=1e-6)  # it was float32
    assert tokenizer("a<landmark>b")["input_ids"][1] == wrapped.landmarks.token == 257
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    plain, without = (each(ids, use_cache=True, output_hidden_states=True) for each in (original, wrapped))
    assert all(torch.equal(*states) for states in zip(plain.hidden_states, without.hidden_states, strict=True))
    assert torch.equal(plain.logits, without.logits[..., :257])
    following = wrapped(ids[:, :3], past_key_values=without.past_key_values).logits[..., :257]
    expected = original(ids[:, :3], past_key_values=plain.past_key_values).logits
    torch.testing.assert_close(following, expected, rtol=0, atol=1e-12)  # the product has one column more

    phase = torch.tensor([0, 3])
    tokens = torch.randint(0, 256, (2, 23), generator=torch.Generator().manual_seed(2))
    tokens[(phase[:, None] + torch.arange(23)) % (BLOCK + 1) == BLOCK] = wrapped.landmarks.token
    found = wrapped(tokens, phase=phase).logits
    torch.testing.assert_close(found, by_the_equations(wrapped, tokens, phase), rtol=0, atol=1e-10)

    tokens, own = insert_landmarks(ids, 0, BLOCK, wrapped.landmarks.token)
    window = wrapped(tokens, phase=torch.zeros(2, dtype=torch.int64)).logits[:, own]
    for parts in (40, 13):
        memory = wrapped.new_memory(k=100)
        torch.testing.assert_close(read(wrapped, ids, memory, parts), window, rtol=0, atol=2e-4)
    assert memory.stats["blocks_retrieved"] > 0
    kept = wrapped(ids, past_key_values=wrapped.new_memory(k=100), logits_to_keep=11).logits
    torch.testing.assert_close(kept, window[:, -11:], rtol=0, atol=2e-4)
    assert not torch.allclose(read(wrapped, ids, wrapped.new_memory(k=1)), window, atol=1e-2)
    generated = wrapped.generate(ids, max_new_tokens=7, do_sample=False)
    assert torch.equal(generated, greedily(wrapped, ids, 7))

    wrapped.save_pretrained(tmp_path / "with")
    given = {"dtype": torch.float64, "experts_implementation": "eager"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "with", **given).eval()
    assert type(again) is type(wrapped)
    assert again.landmarks == wrapped.landmarks
    expected = read(wrapped, ids)
    torch.testing.assert_close(read(again, ids), expected, rtol=0, atol=1e-4)  # some constants lose bits
    settings, plain = wrapped.landmarks, unwrap(wrapped)
    assert (type(plain), type(plain.config)) == (type(original), type(original.config))
    assert plain.config._attn_implementation == implementation(family)
    assert torch.equal(plain(ids).logits[..., :257], original(ids).logits)
    with pytest.raises(UserError, match="has no landmarks to take off"):
        unwrap(plain)
    assert torch.equal(read(attach(plain, settings), ids), expected)


def side_by_side(x):
    """Element i beside i + d/2."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def by_memory(memory, module, q, k, v, mask, scaling, **_):
    """Attention of a layer whose queries and keys are all at position 0, which turns nothing, through a memory."""
    q = side_by_side(q) * scaling * math.sqrt(q.shape[-1])
    return memory.attend(module.layer_idx, q, side_by_side(k), v).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("granularity", ["per_token_and_head", "per_head", "per_token"])
@torch.no_grad()
def test_few_blocks_are_those_of_our_memory_on_the_same_weights(granularity):
    """k = 3 of at most 9 blocks, at their stingy positions. That frequencies are the model's own shows above, where a
    memory holds everything."""
    settings = MemorySettings(k=3, granularity=granularity, max_blocks=9)
    wrapped = wrap(make_model("llama"), make_tokenizer(), block_size=BLOCK, memory=vars(settings), local=17).double()
    given = replace(wrapped.landmarks, landmark_positions=True)  # as in the paper
    plain, expected, memory = unwrap(copy.deepcopy(wrapped)), [], memory_of(BLOCK, settings)
    wrapped = attach(unwrap(wrapped), given)
    AttentionInterface.register("by_memory", partial(by_memory, memory))
    plain.set_attn_implementation("by_memory")
    ids = torch.randint(0, 256, (2, 120), generator=torch.Generator().manual_seed(1))
    for chunk in ids.split(17, 1):
        tokens, own = insert_landmarks(chunk, memory.position, BLOCK, wrapped.landmarks.token)
        expected.append(plain(tokens, position_ids=torch.zeros_like(tokens), use_cache=False).logits[:, own])
        memory.commit()
    found = wrapped(ids, past_key_values=(cache := wrapped.new_memory())).logits
    assert cache.stats["blocks_retrieved"] > 0
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-5)  # the model's frequencies are float32


def reason(model) -> str:
    with pytest.raises(UserError) as error:
        wrap(model, make_tokenizer())
    return str(error.value)


def particulars(model) -> str:
    """What the model's layers are like, from the functions that the wrapping uses."""
    config, said = families.text_config(model), []
    kinds = set(families.layer_types(model)) - {"full_attention"}
    if kinds:
        said.append(f"{' and '.join(sorted(kinds)).replace('_', ' ')} of {families.window_size(model)} stays as it is")
    if unrotated := sorted(families.unrotated_layers(model) & families.landmark_layers(model)):
        said.append(f"layers without positions ({', '.join(map(str, unrotated))})")
    turning, all_pairs = len(families.inverse_frequencies(model)), len(families.memory_frequencies(model))
    if 0 < turning < all_pairs:
        said.append(f"{turning} of {all_pairs} pairs of channels rotate")
    if any("sinks" in name for name, _ in model.named_parameters()):
        said.append("attention sinks")
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts")):
        said.append("experts")
    if config is not model.config:
        said.append("the part that reads text; images need the original model")
    if cap := families.softcap_of(model):
        said.append(f"scores have a cap (here {cap:g})")
    return "; ".join(said)


def rows() -> list[str]:
    """Of the page's first three tables."""
    found = {}
    for name in CONFIGS:
        model = make_model(name, implementation(name))
        found.setdefault(model.config.model_type, particulars(model))
    found = {f"`{family}`": told for family, told in found.items()}
    found |= {f"`{kind}`": kinds(model_of_kind(kind)) for kind in sorted(KINDS)}
    found |= {name: reason(model) for name, model in sorted(refused_models().items())}
    return [f"| {name} | {told} |" for name, told in found.items()]


def test_the_page_has_every_family():
    written = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows() if f"\n{row}\n" not in written] == []
    assert all(f"| `{family}` |" in written for family in families.FAMILIES)


@pytest.mark.parametrize("kind", ["arcee", "bamba", "cohere", "jamba", "kimi_linear"])
def test_the_page_has_what_the_sweep_finds(kind):
    assert f"\n{row(kind)}\n" in PAGE.read_text(encoding="utf-8"), "run: python -m tests.models.huggingface.sweep"
