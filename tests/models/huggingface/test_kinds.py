"""Decoders that are read without training, one of each kind of layers, rotation and attention, in exact float64.

Each is made as `tiny_model` makes it. `sweep` tries all families of transformers; docs/families.md has the result.
"""

import copy

import pytest
import torch

from landmark.attention import Scoring
from landmark.documents import Document
from landmark.models.huggingface import PrefixCache, families, load, wrap
from landmark.models.huggingface.tiny import doubled, tiny_model
from landmark.models.huggingface.trial import check_reading
from landmark.models.huggingface.wrapping import try_model
from landmark.reading.answering import Answering
from landmark.reading.session import Session
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import CONFIGS, EAGER, make_model, make_tokenizer, read
from tests.models.huggingface.sweep import model_of

FULL, SLIDES, LINEAR = "full_attention", "sliding_attention", "linear_attention"
HYBRID = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
SLIDING = {"num_hidden_layers": 3, "layer_types": [SLIDES, FULL, FULL]}
SHARED = {"num_hidden_layers": 6, "layer_types": [SLIDES, FULL] * 3, "num_kv_shared_layers": 2}
FEW = {"num_hidden_layers": 2}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4, "factor": 1.0}  # which is not dynamic there
KINDS = {  # settings beside the family's own
    "cohere2": SLIDING,  # neighbouring channels rotate in layers with a window, the others have no positions
    "ernie4_5": FEW,  # neighbouring channels
    "exaone4": SLIDING,  # layers without positions
    "falcon_h1": FEW,  # full attention and a state in one layer
    "gemma3n_text": SHARED,  # keys of an earlier layer
    "gemma4": {"text_config": SHARED | {"attention_k_eq_v": True}},  # wider heads, keys that are values
    "gemma4_text": SHARED,
    "glm4": FEW,  # half of the channels, neighbouring
    "granite_swa": SLIDING,
    "granitemoehybrid": HYBRID,
    "hunyuan_v1_dense": FEW | {"rope_parameters": ALPHA},  # a norm behind the rotation
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "lfm3": {"num_hidden_layers": 4},
    "minimax_m2": FEW,  # part of the channels, experts
    "ministral3": FEW,  # queries scaled by position
    "nemotron_h": {},  # state, experts and attention are layers of their own
    "olmo_hybrid": HYBRID,
    "qwen3_5_text": HYBRID,  # a gate, a quarter of the channels
    "qwen3_5_moe_text": HYBRID,
    "qwen3_next": HYBRID,
    "seed_oss": FEW,
}
SETTINGS = {"landmarks": "none", "block_size": 4, "local": 16, "memory": {"k": 3, "window": 8, "dense": 0}}
LENGTH = 45


def model_of_kind(kind, **changes):
    return tiny_model(model_of(kind, **KINDS.get(kind, {}) | changes))


def wrapped_of(model, **settings):
    return wrap(copy.deepcopy(model), make_tokenizer(), **SETTINGS | settings)


def texts(count, length=LENGTH):
    return torch.randint(1, 64, (count, length), generator=torch.Generator().manual_seed(1))


def last(model, ids, memory=None):
    """Logits behind a text, whose other tokens choose together."""
    return model(ids, past_key_values=memory or model.new_memory(), logits_to_keep=1).logits[:, -1]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_listed_family_passes_the_trial(name, tmp_path):
    """All blocks are the model itself, few the model under a mask of the keys that a plain loop chooses. A session of
    it reads, saves and loads a text, and answers.
    """
    with doubled():
        plain = make_model(name, "eager" if name in EAGER else "sdpa").double()
        wrapped = wrapped_of(plain)
        check_reading(plain, wrapped)
        sessions = [Session(Answering(wrapped, make_tokenizer())) for _ in range(2)]
        sessions[0].read(Document("birds", "A heron waits in the water. " * 2))
        sessions[0].save(tmp_path / "memory")
        sessions[1].load(tmp_path / "memory")
        answers = {each.answer("Who waits?", 4) for each in sessions}
        assert len(answers) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind(kind, tmp_path):
    """(1) As the trial has it; (2) texts of a padded batch as each alone; (3) cut anywhere, going on behind an answer,
    and forked, as one text; (4) saved and loaded; (5) a folder of the model."""
    with doubled():
        plain = model_of_kind(kind)
        wrapped = wrapped_of(plain)
        assert wrapped.config.model_type in families.READ
        check_reading(plain, wrapped)

        ids = texts(2)
        mask = torch.ones_like(ids)
        mask[0, :10] = 0
        both = last_of_batch(wrapped, ids, mask)
        expected = last(wrapped, ids[1:])
        same(both[1:], expected)
        same(both[:1], last(wrapped, ids[:1, 10:]))

        prefixes, text = PrefixCache(wrapped), ids[1:, :40]
        answered = prefixes.generate(text, max_new_tokens=5, do_sample=False)
        for parted in (ids[1:], torch.cat([ids[1:, :22], ids[:1, :9]], 1), torch.cat([answered, ids[:1, :3]], 1)):
            with prefixes.using(parted[0].tolist()) as cache:
                assert cache.get_seq_length() > 0
                same(last(wrapped, parted[:, cache.get_seq_length() :], cache), last(wrapped, parted))

        last(wrapped, text, memory := wrapped.new_memory())
        memory.save(tmp_path / "memory")
        (loaded := wrapped.new_memory()).load(tmp_path / "memory")
        for each in (loaded, memory):
            same(last(wrapped, ids[1:, 40:], each), expected)

        wrapped.save_pretrained(tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
        again, _ = load(tmp_path / "model", dtype=torch.float64)
        assert type(again) is type(wrapped)
        again.double().set_experts_implementation("eager")
        torch.testing.assert_close(last(again, ids[1:]), expected, rtol=0, atol=1e-4)  # frequencies are float32


def last_of_batch(model, ids, mask):
    return model(ids, attention_mask=mask, past_key_values=model.new_memory(), logits_to_keep=1).logits[:, -1]


ONE = {"num_hidden_layers": 1, "num_key_value_heads": 1}
ROTATIONS = {
    **dict.fromkeys(("llama", "glm4", "cohere", "ernie4_5", "minimax_m2"), ONE),
    "hunyuan_v1_dense": ONE | {"rope_parameters": ALPHA},
    "qwen3_5_text": ONE | {"layer_types": [FULL]},
    "gemma4_text": ONE | {"layer_types": [FULL], "attention_k_eq_v": True, "num_global_key_value_heads": 1},
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_blocks_are_moved_as_the_model_would_rotate_them(kind):
    """Beyond the trained positions: in a model of one layer, whose keys depend on a token and its position alone, the
    last token reads what it would read in a text of the chosen blocks at their new positions and the window."""
    with doubled():
        plain, ids, told = tiny_model(model_of(kind, **ROTATIONS[kind])), texts(1, 90), []
        wrapped = wrapped_of(plain, memory={"k": 3, "window": 8, "dense": 0, "mapping": "stingy"})
        memory = wrapped.new_memory(observer=told.append)
        found = read(wrapped, ids, memory)[:, -1]
        far = (89 // 4 * 4 - 8) // 4
        chosen = sorted({told[-1].store.added - age for age in told[-1].ages[..., -1, :].flatten().tolist()})
        assert len(chosen) == 3
        places, positions = [], []
        for nearness, block in zip((3, 2, 1), chosen, strict=True):
            lag = nearness + (far - block > 3)
            places += range(block * 4, block * 4 + 4)
            positions += range((far - lag) * 4, (far - lag) * 4 + 4)
        places, positions = [*places, *range(far * 4, 90)], [*positions, *range(far * 4, 90)]
        given = {"position_ids": torch.tensor([positions]), "attention_mask": torch.ones(1, len(places))}
        expected = plain(ids[:, places], use_cache=False, **given).logits[:, -1]
        same(found, expected)
        true = wrapped.new_memory(mapping="true")
        assert (read(wrapped, ids, true)[:, -1] - found).abs().max() > 1e-3


REFUSED = {
    "deepseek_v3": "latent attention",
    "diffllama": "reads all blocks differs",
    "gpt2": "its decoder has no `layers`",
    "jamba": "with transformers' own cache, a tiny model that is cut in two differs",
    "mamba2": "no layer has full attention",
    "minimax_m3_vl_text": "minimax_m3_sparse choose what they read",
    "nanochat": "rotate keys in no way",
    "opt": "longer than the positions of its settings",
    "stablelm": "its layers hand on no arguments to their attention",
    "xglm": "does not go through transformers' interface",
}


def test_a_decoder_that_is_not_listed_is_tried(caplog):
    model = model_of_kind("arcee", num_hidden_layers=2)
    wrapped = wrapped_of(model)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("landmark")]
    assert "arcee: not one of the listed families; a tiny model of it was tried" in said
    with doubled():
        check_reading(model, wrapped)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_decoder_that_would_be_read_wrongly_is_refused(kind):
    with pytest.raises(UserError, match=REFUSED[kind]) as error:
        wrap(model_of(kind), make_tokenizer(), landmarks="none")
    assert str(error.value).startswith(f"{kind}: ")
    assert "\n" not in str(error.value)


def test_a_wrong_scale_is_noticed(monkeypatch):
    monkeypatch.setattr("landmark.models.huggingface.attention.Scoring", lambda scale, cap: Scoring(1.1 * scale, cap))
    with pytest.raises(UserError, match="arcee: a tiny model of it that reads all blocks differs from what it must be"):
        try_model(model_of("arcee", num_hidden_layers=2))
