"""RULER's tasks: what their texts state, ask and leave room for; training windows of them; essays."""

import re

import numpy as np
import pytest

from landmark.data import SyntheticCorpus, load_tokenizer
from landmark.data.ruler import TASKS, Ruler
from landmark.data.ruler.material import NOISE, Essays
from landmark.data.ruler.samples import _KINDS, RulerSamples
from landmark.data.synthetic_windows import MixedWindows, SyntheticWindows
from landmark.data.windows import TrainingWindows
from landmark.utils.constants import RULER_TASKS
from landmark.utils.errors import UserError

CODE = load_tokenizer("code")
SENTENCES = " ".join(
    f"The {noun} {verb} the {other} again."
    for noun in ("boat", "crow")
    for verb in ("sees", "hears")
    for other in NOISE.split()
)
STREAM = CODE.encode(f"{SENTENCES} {' '.join('w' + letter * 3 for letter in 'abcdefghijklmnopqrstuvwxyz')} " * 40)
ESSAYS = Essays(STREAM, CODE)
NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: ([0-9a-f-]+)\.")
ANSWER = re.compile(r"The special magic [a-z]+ for ([^.]+) mentioned in the provided text (?:is|are) ([^.]+)\.")


def corpus(task, generated=40, tokenizer=CODE, essays=ESSAYS):
    return SyntheticCorpus(Ruler(task, generated, essays), tokenizer)


@pytest.mark.parametrize("length", [2048, 9000])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_state_their_answers_and_leave_room_for_them(task, length):
    prompts = corpus(task).prompts("test", length, 3)
    texts = {CODE.decode(prompt.tokens) for prompt in prompts}
    assert len(texts) == 3
    for prompt in prompts:
        text, answers = CODE.decode(prompt.tokens), prompt.answer.split()
        assert 0.9 * length < len(prompt.tokens) <= length - 40
        context = text[: text.rindex("What" if task.startswith("niah") else "Question:")]
        assert all(answer in context for answer in answers)
        assert Ruler.score(object.__new__(Ruler), f" {prompt.answer}.", prompt.answer) == 1
        for first, stop in prompt.evidence:
            part = CODE.decode(prompt.tokens[first:stop])
            assert any(answer in part for answer in answers)
            assert stop - first < 100
        assert len(prompt.evidence) == (0 if task in ("cwe", "fwe") else len(answers))


@pytest.mark.parametrize("tokenizer", ["bytes", "code"])
def test_a_prompt_is_a_function_of_split_length_and_number(tokenizer):
    tokenizer = load_tokenizer(tokenizer)
    one, two = (
        corpus("niah_multiquery", tokenizer=tokenizer, essays=Essays(tokenizer.encode(SENTENCES), tokenizer))
        for _ in range(2)
    )
    two.prompts("test", 3000, 1)
    for a, b in zip(one.prompts("test", 2500, 3), two.prompts("test", 2500, 3), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
    assert one.prompts("test", 2500, 1)[0].answer != one.prompts("validation", 2500, 1)[0].answer


def test_essays_begin_again_after_their_end():
    words = CODE.decode(STREAM).split()
    assert ESSAYS.words(0, 5) == words[:5]
    assert ESSAYS.words(len(words) - 2, 5) == [*words[-2:], *words[:3]]
    assert ESSAYS.words(3 * len(words) + 1, 2) == words[1:3]
    long = Essays(CODE.encode("".join(f"word{number} " for number in range(20_000))), CODE)
    for count in (10, 4000, 9000, 20_000):  # words are not cut where the decoding pauses
        assert long.words(count - 2, 2) == [f"word{count - 2}", f"word{count - 1}"]
    with pytest.raises(UserError, match="no words"):
        Essays(np.array([CODE.eot] * 5), CODE)


@pytest.mark.parametrize("length", [300, 502])
def test_training_windows_answer_questions_that_they_state_for_each_key_once_in_the_order_of_the_text(length):
    samples, answered, keys = RulerSamples(ESSAYS, answer_weight=7.0), 0, 0
    for seed in range(60):
        window = samples.window(np.random.default_rng(seed), length, CODE)
        assert {len(window.tokens), len(window.targets), len(window.weights)} == {length}
        np.testing.assert_array_equal(window.tokens[1:], window.targets[:-1])
        text = CODE.decode(window.tokens)
        weighted = window.weights == 7
        starts = np.flatnonzero(weighted[1:] & ~weighted[:-1]) + 1
        for start in starts:
            stop = start + int(np.argmin(weighted[start:])) if not weighted[start:].all() else length
            for answer in re.findall(r"[\w-]{5,}", CODE.decode(window.targets[start:stop])):
                if stop < length:
                    assert text.count(answer) > 1 or "..." in text
                    answered += 1
        for found in NEEDLE.finditer(text):  # its key and its value are not predicted
            place = len(CODE.encode(text[: found.start(3)]))
            assert place >= length - 2 or not window.weights[place : place + 2].any()
        for part in text.split("Make sure to memorize it.")[1:]:
            stated = [(key, value) for _, key, value in NEEDLE.findall(part)]
            said = {key: values.split(", ") for key, values in ANSWER.findall(part)}
            assert len(said) == len(ANSWER.findall(part))
            for key in (key for key in said if " and " not in key and length > 400):  # a shorter window cuts answers
                assert said[key] == [value for its, value in stated if its == key]
                keys += 1
    assert answered > 60
    assert keys > 100 or length < 400


def test_every_task_has_a_published_number_of_tokens_and_one_kind_of_training_text():
    assert list(TASKS) == list(RULER_TASKS)
    assert sorted(name for kind in _KINDS for name in kind) == sorted(TASKS)
    assert sum(_KINDS.values()) == pytest.approx(1)
    with pytest.raises(UserError, match=r"eval\.length=100: a niah_multiquery prompt needs at least \d+ tokens"):
        corpus("niah_multiquery").prompts("test", 100, 1)
    with pytest.raises(UserError, match=r"data\.tasks: no task fits into a window of 50 tokens: raise train\.length"):
        RulerSamples(ESSAYS).window(np.random.default_rng(0), 50, CODE)


def test_a_share_of_the_windows_is_tasks_and_the_others_stay_as_they_were():
    settings = {"length": 306, "batch_size": 16, "seed": 3, "block_size": 50}
    text = TrainingWindows(STREAM, **settings, landmark=CODE.landmark, eot=CODE.eot)
    tasks = SyntheticWindows(SyntheticCorpus(RulerSamples(ESSAYS), CODE), "train", **settings)
    mixed, counts = MixedWindows(text, tasks, 0.3), []
    for step in range(6):
        batch, before = mixed.batch(step), text.batch(step)
        is_task = (batch.tokens != before.tokens).any(1)
        counts.append(int(is_task.sum()))
        assert (batch.phase[~is_task] == before.phase[~is_task]).all()
        assert (batch.targets[~is_task] == before.targets[~is_task]).all()
        assert (batch.weights[~is_task] == 1).all()
        assert (batch.phase[is_task] == 0).all()
        for part in (range(0, 8), range(8, 16)):  # devices share a batch
            assert (mixed.batch(step, part).tokens == batch.tokens[part.start : part.stop]).all()
    assert 0.15 < sum(counts) / 96 < 0.45
