"""Pass keys: their samples, their prompts and what counts as an answer."""

import re
from functools import partial

import numpy as np
import pytest
import torch

from landmark.experiment.data import SyntheticCorpus, load_tokenizer
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.data.passkey import FILLER, INTRODUCTION, LARGEST, Passkey
from landmark.experiment.data.ruler.samples import RulerSamples
from landmark.experiment.data.synthetic_windows import SyntheticWindows
from landmark.experiment.runs.jobs import Inputs
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from tests.experiment.data.test_ruler import CODE, ESSAYS
from tests.experiment.training.training_case import make_config, make_corpus

TOKENIZER = load_tokenizer("bytes")


def test_the_first_integer_is_the_answer_and_a_length_that_is_too_short_is_refused():
    texts = {" 417.": True, " is 417 or 5": True, " 4171": False, " 41 417": False, "": False, "0417": False}
    assert {text: Passkey().score(text, "417") for text in texts} == texts
    with pytest.raises(
        UserError, match=r"eval\.length=100: a passkey prompt and its answer need at least 2\d\d tokens"
    ):
        SyntheticCorpus(Passkey(), TOKENIZER).prompts("test", 100, 1)


@pytest.mark.parametrize(("data", "tokenizer"), [(Passkey(), TOKENIZER), (RulerSamples(ESSAYS), CODE)])
def test_windows_of_any_data(data, tokenizer):

    def made(split="train", seed=0, step=7, indices=None, length=320, block_size=15):
        settings = {"length": length, "batch_size": 6, "seed": seed, "block_size": block_size}
        return SyntheticWindows(SyntheticCorpus(data, tokenizer), split, **settings).batch(step, indices)

    marked, part, plain = made(), made(indices=range(2, 5)), made(length=300, block_size=None)
    others = [made(step=8), made(seed=1), made("validation")]
    assert all((marked.tokens != other.tokens).any(1).all() for other in others)
    assert (plain.phase, marked.phase.tolist()) == (None, [0] * 6)
    is_landmark = marked.tokens == tokenizer.landmark
    assert (is_landmark == (torch.arange(320) % 16 == 15)).all()
    assert (marked.targets[is_landmark] == NO_LOSS).all()
    for each in ("tokens", "targets", "weights"):
        assert torch.equal(getattr(part, each), getattr(marked, each)[2:5])
        assert torch.equal(getattr(marked, each)[~is_landmark], getattr(plain, each).flatten())
    assert ((plain.weights > 0) == (plain.targets != NO_LOSS)).all()
    assert plain.weights.sum(1).tolist() == pytest.approx((plain.targets != NO_LOSS).sum(1).tolist(), rel=1e-4)
    counted = plain.targets[:, :-1] != NO_LOSS
    assert torch.equal(plain.targets[:, :-1][counted], plain.tokens[:, 1:][counted])


def text_of(tokens):
    return TOKENIZER.decode([token for token in tokens if token != TOKENIZER.landmark])


def texts_of(tokens, tokenizer=TOKENIZER):
    """The texts of a window, [start, stop) of each; an end of text closes each but the last."""
    ends = np.flatnonzero(tokens == tokenizer.eot)
    return list(zip([0, *(ends + 1)], [*ends, len(tokens)], strict=True))


def test_answers_weigh_most_and_first_mentions_have_no_loss():
    settings = {"length": 300, "batch_size": 6, "seed": 0, "block_size": None}
    batch = SyntheticWindows(SyntheticCorpus(Passkey(), TOKENIZER), "train", **settings).batch(3)
    kinds, answered = set(), 0
    for tokens, weights in zip(batch.tokens.numpy(), batch.weights.numpy()):
        usual = np.median(weights[weights > 0])
        kinds.add(text_of(tokens).startswith(INTRODUCTION[:40]))
        for start, stop in texts_of(tokens):
            text, seen = text_of(tokens[start:stop]), set()
            for match in re.finditer(r" \d+", text[:-6]):
                of_key = weights[start + match.start() - 1 : start + match.end() - 1]
                expected = 10 * usual if match.group() in seen else 0
                assert of_key == pytest.approx(np.full(len(of_key), expected))
                answered += match.group() in seen
                seen.add(match.group())
    assert kinds == {True, False}, "half dense, half in the paper's words"
    assert answered > 10


@pytest.mark.parametrize("name", ["bytes", "code"])
def test_windows_are_full_and_only_their_first_text_is_a_prompt(name):
    tokenizer = load_tokenizer(name)
    prompts, labelled, fillers = 0, set(), []
    for seed in range(60):
        tokens = Passkey().window(np.random.default_rng(seed), 500, tokenizer).tokens
        assert len(tokens) == 500
        texts = [tokenizer.decode(tokens[start:stop]) for start, stop in texts_of(tokens, tokenizer)]
        assert all(texts[:-1]), "no text but the last may be cut, and nothing is padded"
        assert not any(text.startswith(INTRODUCTION[:10]) for text in texts[1:])
        if texts[0].startswith(INTRODUCTION):
            prompts += 1
            said = r"The pass key((?: [A-Z])?) is (\d+)\. Remember it\. \2 is the pass key\1\."
            stated = dict(re.findall(said, texts[0]))
            asked = re.findall(r"What is the pass key((?: [A-Z])?)\? The pass key\1 is (\d+)\.", texts[0])
            assert dict(asked) == stated
            assert len(asked) == len(stated)
            assert texts[0].endswith(f"{asked[-1][1]}.")
            labelled.add(len(stated))
            fillers.append(len(texts[0]) - len(INTRODUCTION))
    assert 20 < prompts < 40
    assert labelled == ({1, 2, 3} if name == "bytes" else {1, 2, 3, 4}), "four do not fit into 500 bytes"
    assert max(fillers) > 2 * min(fillers)


@pytest.mark.parametrize("length", [300, 512, 3000])
def test_prompts_are_the_papers_and_as_long_as_asked(length):
    prompts = SyntheticCorpus(Passkey(generated=10), TOKENIZER).prompts("test", length, 20)
    places = []
    for prompt in prompts:
        text = TOKENIZER.decode(prompt.tokens)
        assert len(prompt.tokens) == length - 10  # with its answer, as RULER's
        assert text.startswith(INTRODUCTION)
        assert text.endswith(" What is the pass key? The pass key is")
        info = f"The pass key is {prompt.answer}. Remember it. {prompt.answer} is the pass key."
        assert text.count(info) == 1
        assert 1 <= int(prompt.answer) <= LARGEST
        rest = text.removeprefix(INTRODUCTION).removesuffix(" What is the pass key? The pass key is")
        before, after = rest.split(info)
        for filler in (before.rstrip(), after.strip()):
            assert (FILLER * 50).startswith(filler)
        places.append(len(before) / max(1, len(before) + len(after)))
    assert len({prompt.answer for prompt in prompts}) > 15
    if length == 3000:
        assert min(places) < 0.3
        assert max(places) > 0.7


def test_several_needles_have_labels_one_is_asked_for_and_the_identity_follows_what_decides_prompts():
    for prompt in SyntheticCorpus(Passkey(needles=4), TOKENIZER).prompts("validation", 900, 5):
        text = TOKENIZER.decode(prompt.tokens)
        stated = dict(re.findall(r"The pass key ([A-Z]) is (\d+)\. Remember", text))
        asked = re.search(r"What is the pass key ([A-Z])\? The pass key \1 is$", text)
        assert len(stated) == 4
        assert stated[asked.group(1)] == prompt.answer

    def hashes(**settings):
        corpus = SyntheticCorpus(Passkey(**settings), TOKENIZER)
        return corpus.split("train").sha256, corpus.split("test").sha256

    train, test = hashes()
    assert hashes(needles=3) == (train, hashes(needles=3)[1])
    assert hashes(needles=3)[1] != test
    assert hashes(dense=0.2)[0] != train
    assert hashes(dense=0.2)[1] == test


def test_a_share_of_the_windows_of_a_text_is_pass_keys_which_are_asked_of_a_model_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr("landmark.experiment.data.datamodule.Passkey", partial(Passkey, dense=0.0))
    config = make_config("landmark")
    config.data.passkeys, config.train.length = 0.5, 306
    windows = WindowDataModule(make_corpus(tmp_path), TOKENIZER, config).training
    texts = [text_of(row) for step in range(16) for row in windows.batch(step).tokens.numpy()]
    asked = [text for text in texts if text.startswith(INTRODUCTION[:40])]
    assert 0.3 < len(asked) / len(texts) < 0.7
    assert all("The pass key" in text for text in asked)
    config, corpus = make_config("landmark"), make_corpus(tmp_path)
    monkeypatch.setattr(Inputs, "tokenizer", lambda *_: TOKENIZER)
    monkeypatch.setattr(Inputs, "corpus", lambda *_: corpus)
    assert Inputs().evaluated(config) is corpus
    config.eval.task, config.eval.generated, config.data.needles = "passkey", 10, 3
    (prompt,) = Inputs().evaluated(config).prompts("test", 900, 1)
    (same,) = SyntheticCorpus(Passkey(needles=3, generated=10), TOKENIZER).prompts("test", 900, 1)
    assert prompt.answer == same.answer
    assert (prompt.tokens == same.tokens).all()
