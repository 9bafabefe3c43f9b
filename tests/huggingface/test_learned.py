"""Learned landmarks of pretrained models: mean keys at first, taught by the model's own attention."""

import copy
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from landmark.cli import main as app
from landmark.config import to_config
from landmark.huggingface import landmark_loss, load, unwrap, wrap
from landmark.huggingface.learned import MODULES
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.huggingface.conftest import CONFIGS, make_model

BLOCK, WINDOW = 5, 7
FEW = {"k": 3, "window": WINDOW}
FAMILIES = ("llama", "qwen2", "gemma3", "gpt_neox", "gemma2")  # gpt_neox turns a part of the channels


def make(name, tokenizer, landmarks="learned", memory=FEW, **settings):
    torch.manual_seed(1)
    model = make_model(name, "eager" if name == "gemma2" else "sdpa").double()
    plain = copy.deepcopy(model)
    return wrap(model, tokenizer, BLOCK, memory, landmarks=landmarks, **{"local": 17, **settings}), plain


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(0))


def read(model, ids, **settings):
    with torch.no_grad():
        return model(ids, past_key_values=model.new_memory(**settings)).logits


def scramble(model):
    """Landmarks that have learned something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in getattr(model, MODULES).parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
    return model


@pytest.mark.parametrize("mapping", ["true", "stingy"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_has_learned_nothing_is_the_mean_of_the_keys(name, mapping, ids, tokenizer):
    learned, _ = make(name, tokenizer, memory={**FEW, "mapping": mapping})
    means, _ = make(name, tokenizer, "none", {**FEW, "mapping": mapping, "rerank": None})
    found = read(learned, ids)
    torch.testing.assert_close(found, read(means, ids), rtol=0, atol=1e-12)
    assert (read(scramble(learned), ids) - found).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in CONFIGS if name in FAMILIES and name != "gemma2"])
def test_a_model_that_reads_every_block_is_the_model_itself(name, ids, tokenizer):
    wrapped, plain = make(name, tokenizer, memory={"k": 100, "window": WINDOW})
    with torch.no_grad():
        torch.testing.assert_close(read(scramble(wrapped), ids), plain(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_landmarks_are_the_same_wherever_a_block_is(name, ids, tokenizer):
    """Stingy positions of few blocks are true ones, and there keys are stored in another order and not yet turned."""
    model = scramble(make(name, tokenizer, memory={"k": 12, "window": WINDOW})[0])
    found, stingy = (read(model, ids[:, :70], mapping=mapping) for mapping in ("true", "stingy"))
    torch.testing.assert_close(found, stingy, rtol=0, atol=2e-4)  # the model's angles are float32
    few, stingy = (model.new_memory(k=12, mapping=mapping) for mapping in ("true", "stingy"))
    with torch.no_grad():
        for memory in (few, stingy):
            model(ids[:, :70], past_key_values=memory)
    for layer, state in few.memory.layers.items():
        of_model = state.store.summaries["learned"][:, :, : len(state.store)]
        other = stingy.memory.layers[layer].store.summaries["learned"][:, :, : len(state.store)]
        torch.testing.assert_close(of_model.norm(dim=-1), other.norm(dim=-1), rtol=1e-4, atol=1e-4)


def asked_by(plain, ids):
    """What attention gets in the layers of a plain model, of one text: queries (H, T, d), keys, and the scale."""
    from transformers import AttentionInterface

    asked = {}

    def attention(module, q, keys, values, mask, scaling, **_):
        asked[module.layer_idx] = q[0], keys[0], scaling
        groups = q.shape[1] // keys.shape[1]
        scores = (q @ keys.repeat_interleave(groups, 1).mT) * scaling
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return (scores.masked_fill(~causal, -math.inf).softmax(-1) @ values.repeat_interleave(groups, 1)).transpose(
            1, 2
        ), None

    AttentionInterface.register("by_hand", attention)
    plain.set_attn_implementation("by_hand")
    with torch.no_grad():
        plain(ids)
    return asked


def turned(x, places, plain):
    """The rotation by transformers of x (…, d) by places (…)."""
    angle = torch.as_tensor(places, dtype=torch.float64)[..., None] * plain.get_decoder().rotary_emb.inv_freq.double()
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def by_hand(model, plain, ids):
    """The loss of one text, query by query, of the queries and keys of the plain model's own attention."""
    asked = asked_by(plain, ids)
    total, local = 0.0, 17
    for layer, (q, keys, scaling) in asked.items():
        module = getattr(model, MODULES)[str(layer)]
        dim = q.shape[-1]
        order = torch.arange(dim).view(2, -1).T.flatten()  # of pairs side by side
        for query in range(ids.shape[1]):
            chunk = query // local * local
            stored = max(0, chunk - WINDOW) // BLOCK
            if stored < 2:
                continue
            for head in range(q.shape[0]):
                own = head * keys.shape[0] // q.shape[0]
                scores = (keys[own, : query + 1] @ q[head, query]) * scaling
                p = scores.softmax(-1)
                weights, said = [], []
                for block in range(1, stored):
                    at = slice(block * BLOCK, (block + 1) * BLOCK)
                    weights.append(float(p[at].sum()))
                    relative = turned(keys[own, at], -torch.full((BLOCK,), block * BLOCK), plain)[:, order]
                    u, maps, constant = (x[own].detach() for x in (module.queries, module.maps, module.constant))
                    mean = relative.mean(0)
                    landmark = mean + maps[0] @ mean + constant
                    for r in range(len(u)):
                        landmark = landmark + maps[r + 1] @ ((relative @ u[r]).softmax(0) @ relative)
                    back = turned(landmark[order.argsort()], torch.tensor(block * BLOCK), plain)
                    said.append(float(back @ q[head, query]) * scaling)
                z = float(scores.logsumexp(-1))
                p = np.array([1 - sum(weights), *weights])
                hat = np.array([p[0], *np.exp(np.array(said) + math.log(BLOCK) - z)])
                hat = hat / hat.sum()
                total += float((p * np.log(p / hat)).sum()) / q.shape[0]
    return total / len(asked) / ids.shape[1]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_loss_is_the_divergence_from_the_models_own_attention(name, ids, tokenizer):
    model, plain = make(name, tokenizer)
    scramble(model)
    expected = [by_hand(model, copy.deepcopy(plain), row[None]) for row in ids]
    found = landmark_loss(model, ids)
    assert float(found.detach()) == pytest.approx(sum(expected) / 2, rel=1e-5)  # the model's angles are float32


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_queries_begin_as_the_mean_of_the_models_own(name, ids, tokenizer):
    model, plain = make(name, tokenizer)
    landmark_loss(model, ids).backward()
    asked = [asked_by(plain, row[None, :17]) for row in ids]
    for layer, module in getattr(model, MODULES).items():
        of_texts = []
        for q, keys, scaling in (each[int(layer)] for each in asked):
            order = torch.arange(q.shape[-1]).view(2, -1).T.flatten()  # of pairs side by side
            own = turned(q, -torch.arange(17), plain)[..., order].mean(1) * scaling
            of_texts.append(own.unflatten(0, (len(keys), -1)))
        expected = torch.stack(of_texts).mean(0)
        torch.testing.assert_close(
            module.queries.detach(), expected, rtol=0, atol=1e-6
        )  # the model's angles are float32
        assert (module.maps.grad[:, 1:].flatten(2).norm(dim=-1) > 0).all()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    landmark_loss(model, ids.flip(1))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FAMILIES)
def test_landmarks_learn_and_the_model_stays(name, ids, tokenizer, tmp_path):
    model, plain = make(name, tokenizer)
    optimizer = torch.optim.Adam(getattr(model, MODULES).parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = landmark_loss(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is None for parameter in plain.parameters())
    for key, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight)

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path, dtype=torch.float64)
    found = read(model, ids)
    torch.testing.assert_close(read(again, ids), found, rtol=0, atol=1e-5)  # its angles are made anew
    memory = model.new_memory()
    with torch.no_grad():
        model(ids[:, :60], past_key_values=memory)
        memory.save(tmp_path / "memory")
        loaded = again.new_memory(tier="cpu")
        loaded.load(tmp_path / "memory")
        rest = again(ids[:, 60:], past_key_values=loaded).logits
        torch.testing.assert_close(rest, model(ids[:, 60:], past_key_values=memory).logits, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(unwrap(model)(ids).logits, plain(ids).logits)
    assert not hasattr(model, MODULES)


def test_generates_and_reads_padded_texts(ids, tokenizer):
    model = scramble(make("gemma3", tokenizer)[0])
    mask = torch.ones_like(ids)
    mask[0, :31] = 0
    both = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    alone = model.generate(ids[:1, 31:], max_new_tokens=12, do_sample=False)
    assert torch.equal(both[0, 90:], alone[0, 59:])


def test_a_copy_of_a_memory_that_begins_anew_changes_nothing_in_it(ids, tokenizer):
    """The copy's text goes beyond the positions of the training, and so is stored in another way."""
    model = scramble(make("llama", tokenizer)[0])
    model.config.max_position_embeddings = 80
    expected = read(model, ids[:, :75])
    memory = model.new_memory()
    with torch.no_grad():
        first = model(ids[:, :34], past_key_values=memory).logits
        copied = memory.select(torch.arange(2))
        copied.reset()
        copied.expect(90)
        rest = model(ids[:, 34:75], past_key_values=memory).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), expected, rtol=0, atol=1e-12)


def test_what_cannot_be_is_refused(ids, tokenizer):
    model, _ = make("llama", tokenizer, "none")
    with pytest.raises(UserError, match="no landmarks that learn"):
        landmark_loss(model, ids)
    with pytest.raises(UserError, match="this model has learned none"):
        model.new_memory(scorer="learned")
    model, _ = make("llama", tokenizer)
    with pytest.raises(UserError, match="nothing to choose: give it 34 or more"):
        landmark_loss(model, ids[:, :17])
    with pytest.raises(UserError, match="was trained on"):
        landmark_loss(model, torch.zeros(1, 100_000, dtype=torch.int64))
    with pytest.raises(UserError, match="landmarks='all': must be one of token, none, learned"):
        wrap(make_model("llama"), tokenizer, landmarks="all")


def test_a_run_of_the_command_line_learns_and_is_asked(tokenizer, tmp_path, capsys):
    """As the model read it is trained, and how it is read needs no word, but can have one."""
    folder, output = tmp_path / "model", tmp_path / "outputs"
    make_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = ["model=pretrained_learned", f"model.name={folder}", "size=nano", "trainer=cpu", "logger=csv"]
    given += ["data=stdlib", "data.max_documents=6", "train.steps=3", "train.batch_size=2", "train.length=1200"]
    given += ["train.validate_every=3", "train.validate_batches=1", "train.log_every=1", f"output={output}"]

    def run(*words):
        app.run(to_config(compose_conf(words)), list(words))
        return capsys.readouterr().err

    run("task=train", *given)
    (trained,) = (output / "runs").iterdir()
    model, _ = load(trained)
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, _fresh(folder, name, x))]
    assert {name.partition(".")[0] for name in changed} == {MODULES}
    said = run(
        "task=generate", "run=latest", f"output={output}", "prompt=" + "a heron waits " * 90, "generate.tokens=5"
    )
    assert f"memory of {(90 * 14 - 1 + 4 - 512) // 32} blocks" in said
    with pytest.raises(UserError, match="retrieval.first=1: must be 0 to retrieval.k=0"):
        run("task=generate", "run=latest", f"output={output}", "prompt=a", "retrieval.k=0")
    with pytest.raises(UserError, match="nothing to choose"):
        run("task=train", *(word for word in given if not word.startswith("train.length")), "train.length=900")


def _fresh(folder, name, like):
    """A weight of the model that the training started from; of landmarks what nothing has learned."""
    weights = load_file(folder / "model.safetensors")
    return weights.get(name, torch.zeros_like(like))
