"""Generated tokens are those of reading everything anew for each of them, on every tier and in every setting."""

import pytest
import torch

from landmark.memory import Memory
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.models import DecoderConfig
from landmark.models.sampling import Sampling
from landmark.utils.constants import MAPPINGS, TIERS
from landmark.utils.errors import UserError
from tests.pairs import all_pairs, name_of
from tests.saved import random_decoder

LANDMARK, VOCABULARY = 30, 32


def decoder(kind, cmt=False):
    shape = {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
    of_kind = {"landmark_id": LANDMARK, "block_size": 5, "window": 6, "cache": 9, "cmt": cmt}
    config = DecoderConfig.from_flat({"kind": kind, **shape, **of_kind})
    return random_decoder(config).double()


MODELS = {cmt: decoder("landmark", cmt) for cmt in (False, True)}


def prompts_of(*lengths):
    return [torch.randint(0, LANDMARK, (length,)) for length in lengths]


@torch.no_grad()
def anew(model, prompt, tokens, local, make_memory):
    """The most probable tokens after one prompt: for each of them a new memory reads it all, in the same chunks."""
    generated = []
    for _ in range(tokens):
        memory, logits = make_memory(), torch.empty(0)
        for chunk in [*prompt.split(local), *torch.tensor(generated, dtype=torch.int64).split(1)]:
            if len(chunk):
                logits = model(chunk[None], memory=memory)
        logits[..., LANDMARK] = -torch.inf
        generated.append(int(logits[0, -1].argmax()))
    return generated


CASES = all_pairs(
    {
        "lengths": [(17, 7, 7), (1,), (25, 12)],
        "local": [1, 5, 17],
        "tokens": [1, 7],
        "cutoff": [None, 0.0, 0.4],
        "k": [0, 1, 3],
        "max_blocks": [None, 3, 5],
        "granularity": GRANULARITIES,
        "mapping": MAPPINGS,
        "tier": TIERS,
        "cache": [1, 5],
    }
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_of_starting_over_with_the_same_chunks(case):
    torch.manual_seed(0)
    model, prompts = MODELS[case["cutoff"] is not None], prompts_of(*case["lengths"])
    names = "k", "max_blocks", "granularity", "mapping", "tier", "cache"
    settings = {name: case[name] for name in names} | ({"cutoff": case["cutoff"]} if case["cutoff"] else {})
    tokens, local, make_memory = case["tokens"], case["local"], lambda: model.new_memory(**settings)
    ours = model.generate(prompts, tokens, local=local, memory=make_memory)
    assert ours == [anew(model, prompt, tokens, local, make_memory) for prompt in prompts]


@pytest.mark.parametrize(("kind", "local"), [("transformer", 99), ("transformer_xl", 6)])
def test_other_models_equal_reading_all_at_once_or_in_windows(kind, local):
    model, prompts = decoder(kind), prompts_of(23, 23, 12)
    if kind == "transformer":
        expected = [anew(model, prompt, 8, local, lambda: model.unlimited_memory(99)) for prompt in prompts]
        text = torch.cat([prompts[0], torch.tensor(expected[0][:-1])])
        assert int(model(text[None])[0, -1, :LANDMARK].argmax()) == expected[0][-1]
    else:
        expected = [anew(model, prompt, 8, local, model.new_memory) for prompt in prompts]
    assert model.generate(prompts, 8) == expected


def test_stop_tokens_end_a_text_and_streaming_gives_the_same_tokens_as_they_come():
    torch.manual_seed(0)
    model, prompts = MODELS[False], prompts_of(30, 30, 17)
    whole = model.generate(prompts, 20)
    assert len({token for text in whole for token in text}) > 5, "the model does not always say the same"
    stop = [whole[0][4], whole[1][9]]
    ended, steps = model.generate(prompts, 20, stop=stop), list(model.stream(prompts, 20, stop=stop))
    for number, (text, all_of_it) in enumerate(zip(ended, whole, strict=True)):
        first = min((n for n, token in enumerate(all_of_it) if token in stop), default=20)
        assert text == all_of_it[:first]
        of_steps = [step[number] for step in steps]
        assert of_steps == text + [None] * (len(steps) - len(text))
    assert len(ended[0]) <= 4
    assert next(model.stream(prompts, 9)) == [text[0] for text in whole]


def test_draws_do_not_depend_on_the_other_prompts_and_have_the_frequencies_of_the_settings():
    torch.manual_seed(0)
    model, prompts = MODELS[False], prompts_of(30, 17, 30)
    settings = {"sampling": Sampling(temperature=1.5, seed=3)}
    together = model.generate(prompts, 12, **settings)
    assert together[:1] == model.generate(prompts[:1], 12, **settings)
    assert together[:2] == model.generate(prompts[:2], 12, **settings)
    assert together == model.generate(prompts, 12, **settings)
    assert together != model.generate(prompts, 12, sampling=Sampling(temperature=1.5, seed=4))
    same = model.generate([prompts[0], prompts[0]], 12, **settings)
    assert same[0] != same[1], "each prompt draws for itself"
    logits = [0.0, 2.0, 1.0, -1.0, 1.5]
    expected = (torch.tensor(logits) / 0.7).softmax(0)
    assert torch.allclose(frequencies(logits, Sampling(0.7)), expected, atol=0.03)
    best = torch.tensor([0, 1, 1, 0, 1]) * expected
    assert torch.allclose(frequencies(logits, Sampling(0.7, top_k=3)), best / best.sum(), atol=0.03)
    two = torch.tensor([0, 1, 0, 0, 1]) * expected
    just = float(expected[1]) + 1e-3
    assert torch.allclose(frequencies(logits, Sampling(0.7, top_p=just)), two / two.sum(), atol=0.03)
    assert frequencies(logits, Sampling(0.7, top_p=0.01))[1] == 1
    assert frequencies(logits, Sampling(0.0))[1] == 1


def frequencies(logits, sampling, count=2500):
    generator = sampling.generator(0)
    drawn = torch.tensor([sampling.draw(torch.tensor(logits), generator) for _ in range(count)])
    return torch.bincount(drawn, minlength=len(logits)) / count


def test_the_landmark_is_never_generated():
    """The model is sure that it comes next, and is not asked."""
    model, prompts = decoder("landmark"), prompts_of(3)
    with torch.no_grad():
        model.embedding.weight[LANDMARK] = 50 * model.hidden(prompts[0][None])[0, -1]
        logits = model(prompts[0][None])
        torch.testing.assert_close(model(prompts[0][None], last=True), logits[:, -1:])
        assert int(logits[0, -1].argmax()) == LANDMARK
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        assert LANDMARK not in model.generate(prompts, 20, sampling=sampling)[0]


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([], {}, "there is no prompt"),
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1, 2, LANDMARK, 3]], {}, "prompt 0 has the landmark's id 30 at 2: leave landmarks out"),
        ([[1], [5, VOCABULARY]], {}, "prompt 1 has id 32 at 1, outside the vocabulary of 32"),
        ([[1], [1, 2]], {"memory": Memory(5)}, "prompts of several lengths cannot continue one memory"),
        ([[1]], {"sampling": {"temperature": -1}}, "generate.temperature="),
        *(([[1]], {"sampling": {"top_p": p}}, "generate.top_p=") for p in (0.0, 1.5)),
    ],
)
def test_invalid_prompts_and_bad_sampling_are_refused(prompts, settings, said):
    def generate(sampling=None, **given):
        MODELS[False].generate(prompts, 3, sampling=Sampling(**(sampling or {})), **given)

    with pytest.raises(UserError, match=said):
        generate(**settings)
