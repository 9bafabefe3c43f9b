"""Landmarks learned from tiny models of transformers: exact, resumable, and better than before."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.attention import Scoring, Sinks
from landmark.cli.command import Command
from landmark.cli.teaching import teach
from landmark.experiment.config import to_config
from landmark.memory.blocks.scorers.landmarks import Landmarks
from landmark.models.huggingface import use_landmarks, wrap
from landmark.models.huggingface.teaching import Asked, Teaching, TeachSettings, loss_of, window
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.models.huggingface.conftest import make_model, make_tokenizer

SIZE = 6
SETTINGS = TeachSettings(steps=30, length=96, vectors=2, queries=40, max_lr=0.02)
TEXT = np.random.default_rng(0).integers(0, 250, 4000)


def sharp(family):
    """A tiny model whose heads look at few tokens; a random one looks at all alike."""
    model = make_model(family).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "qkv" in name or "query_key_value" in name:
                weight.mul_(3)
    return wrap(model, make_tokenizer(), landmarks="none", block_size=SIZE)


def ids(step, settings=SETTINGS):
    return window(TEXT, step, settings, [7], lambda text: [ord(x) for x in text])


def test_the_loss_is_the_divergence_of_the_shares_of_attention():
    """Query by query, with sinks and a softcap."""
    heads, group, dim, length, size = 2, 2, 4, 17, 5
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, length, dim, generator=draw).double() for n in (heads * group, heads, heads))
    sinks, places = Sinks(torch.randn(heads * group, generator=draw).double()), torch.tensor([5, 9, 14, 16])
    own = {0: (heads, group, dim, torch.ones(2), torch.tensor([0.3]))}
    layer = Landmarks.new(size, 2, None, own).layers[0]
    asked = Asked(q[:, places], places, k, v, Scoring(softcap=2.0), sinks)
    summaries = layer.summarise(*(x[:, :15].unflatten(1, (3, size)) for x in (k, v)), 0)
    gates = layer.score(asked.queries.unflatten(0, (heads, group)), summaries, 2.0).flatten(0, 1)
    losses = []
    for head in range(heads * group):
        for number, place in enumerate(places.tolist()):
            scores = 2 * (k[head // group, : place + 1] @ q[head, place] / 2).tanh()
            before = place // size
            local = torch.cat([scores[before * size :], sinks.scores[head, None]]).logsumexp(0)
            true = [scores[at * size : (at + 1) * size].logsumexp(0) for at in range(before)]
            p, r = (
                torch.stack([local, *x]).softmax(0) for x in (true, [gates[head, number, at] for at in range(before)])
            )
            losses.append((p * (p / r).log()).sum())
    torch.testing.assert_close(loss_of(layer, asked, size), torch.stack(losses).mean(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "smollm3"])
def test_landmarks_learn_what_the_model_attends_to(family, tmp_path):
    model = sharp(family)
    teaching = Teaching(model, SETTINGS)
    before = None
    for step in range(SETTINGS.steps):
        teaching.learn(ids(step))
        before = before or teaching.validate(ids(1000))
    after = teaching.validate(ids(1000))
    assert sum(after.values()) < 0.95 * sum(before.values())
    teaching.done.save(file := tmp_path / "found.safetensors")
    text = torch.tensor([ids(2000)])
    use_landmarks(model, file, gates=True)
    settings = {"dense": 0, "window": 0, "k": 99, "first": 0}
    gated = model(text, past_key_values=model.new_memory(**settings)).logits
    means = model(text, past_key_values=model.new_memory(**settings, scorer="mean_key")).logits
    plain = model(text, past_key_values=model.new_memory(dense=99)).logits
    nearer = (gated - plain).square().mean() < (means - plain).square().mean()
    assert nearer
    other = sharp(family)
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    with pytest.raises(UserError, match="were learned from another model"):
        use_landmarks(other, file)


def test_a_teaching_that_was_stopped_goes_on_to_the_same_numbers(tmp_path):
    model, settings = sharp("llama"), TeachSettings(steps=6, length=60, vectors=3, queries=20)
    whole, begun = Teaching(model, settings), Teaching(model, settings)
    for step in range(6):
        whole.learn(ids(step, settings))
    for step in range(3):
        begun.learn(ids(step, settings))
    begun.save_state(state := tmp_path / "state")
    resumed = Teaching(model, settings)
    assert resumed.load_state(state)
    assert not Teaching(model, TeachSettings(steps=7, length=60, vectors=3)).load_state(state)
    while resumed.step < 6:
        resumed.learn(ids(resumed.step, settings))
    whole.done.save(expected := tmp_path / "whole")
    for number in range(3):  # files of safetensors with several texts differ by chance
        resumed.done.save(file := tmp_path / f"{number}")
        assert file.read_bytes() == expected.read_bytes()
    assert dict(Landmarks.load(file).taught) == dict(whole.done.taught)


def test_each_seed_needs_a_file_and_none_is_taught_twice(tmp_path):
    def refused(file, text):
        words = ["task=teach", "model=pretrained", f"model.name={tmp_path}", "model.block_size=6", "seeds=[0,1]"]
        words = [*words, f"model.landmarks={file}"]
        with pytest.raises(UserError, match=text):
            teach(Command.of(to_config(compose_conf(words)), words, compose_conf))

    refused(tmp_path / "one", r"is one file: name one with \$\{seed\} in it")
    for seed in (0, 1):
        (tmp_path / f"all-{seed}").touch()
    refused(tmp_path / "all-${seed}", "exists already")
    (tmp_path / ".all-1.teaching").touch()  # as one leaves it that was killed before its end
    refused(tmp_path / "all-${seed}", f"file={tmp_path}: holds no tokenizer")  # it goes on


def test_windows_repeat_spans_and_numbers():
    settings = TeachSettings(length=600, repeats=1.0)
    found = window(TEXT, 3, settings, [7], lambda text: [300 + int(x) for x in text[1:]])
    assert len(found) == 600
    assert found[0] == 7
    assert max(found) >= 300
    runs = [tuple(found[at : at + 4]) for at in range(596)]
    assert len(set(runs)) < 500
    assert found == window(TEXT, 3, settings, [7], lambda text: [300 + int(x) for x in text[1:]])
    text = window(TEXT, 3, TeachSettings(length=600, repeats=0.0), [7], lambda text: [len(text)])
    assert text[1:] in [TEXT[at : at + 599].tolist() for at in range(len(TEXT))]
