"""RULER's tasks: what their texts state, ask and leave room for; training windows of them; essays."""

import random
import re

import numpy as np
import pytest

from landmark.experiment.data import SyntheticCorpus, load_tokenizer
from landmark.experiment.data.ruler import TASKS, Ruler
from landmark.experiment.data.ruler.material import KEYS, NOISE, Essays, Material
from landmark.experiment.data.ruler.samples import _KINDS, RulerSamples
from landmark.experiment.data.synthetic_windows import MixedWindows, SyntheticWindows
from landmark.experiment.data.windows import TrainingWindows
from landmark.utils.constants import RULER_TASKS
from landmark.utils.errors import UserError

CODE = load_tokenizer("code")
BEGINNINGS = "The boat sees", "The boat hears", "The crow sees", "The crow hears"
SENTENCES = " ".join(f"{beginning} the {other} again." for beginning in BEGINNINGS for other in NOISE.split())
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
    essays = Essays(tokenizer.encode(SENTENCES), tokenizer)
    one, two = (corpus("niah_multiquery", tokenizer=tokenizer, essays=essays) for _ in range(2))
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


# ---- the prompts of lm-evaluation-harness's generator, from the same random numbers

EXTRA = "the optional extra `eval` is not installed"
ESSAY = [f"{word}{'.' * (at % 9 == 8)}" for at, word in enumerate(("alpha beta gamma delta " * 500).split())]
NIAH = [name for name in TASKS if name.startswith("niah")]


@pytest.fixture(scope="module")
def published():
    """Modules of the harness. Its needles import nltk, and look for a file of nltk's that is not needed here."""
    nltk, *_ = (pytest.importorskip(name, reason=EXTRA) for name in ("nltk", "wonderwords", "lm_eval"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_: False)
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    return {"niah": prepare_niah, "utils": niah_utils, "vt": vt_utils, "cwe": cwe_utils, "fwe": fwe_utils}


def sentences(text):
    """As nltk parts this essay; nltk's own file is a download."""
    return text.replace(". ", ".\n").split("\n")


@pytest.mark.parametrize("size", [30, 200])
@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize("name", NIAH)
def test_needles_sample_for_sample(published, monkeypatch, name, seed, size):
    niah, task = published["niah"], TASKS[name]
    monkeypatch.setattr(niah, "cached_sent_tokenize", sentences)
    random.seed(seed)
    haystack = {"noise": "repeat", "essay": "essay", "needles": "needle"}[task.haystack]
    expected, answers, query = niah.generate_input_output(
        size,
        ESSAY if haystack == "essay" else niah.get_haystack(haystack),
        type_haystack=haystack,
        num_needle_k=task.keys,
        type_needle_k="words" if task.words else "uuids",
        num_needle_v=task.values,
        type_needle_v="numbers" if task.numbers else "uuids",
        template=published["utils"].TEMPLATE,
        num_needle_q=task.queries,
    )
    sample = task.make(random.Random(seed), size, 4096, Material(niah.WORDS, [], ESSAY))
    assert sample.answers == tuple(answers)
    kind, verb = ("number" if task.numbers else "uuid"), "is"
    if task.values * task.queries > 1:
        kind, verb = f"{kind}s", "are"
    prefix = f"The special magic {kind} for {query} mentioned in the provided text {verb}"
    assert sample.text == f"{expected} {prefix}"
    assert all(part in expected for part in sample.evidence)


@pytest.mark.parametrize("lines", [3, 60])
@pytest.mark.parametrize("seed", [42, 7])
def test_variables_sample_for_sample(published, monkeypatch, seed, lines):
    """The harness draws the value from NumPy's numbers; here from the same ones as all else."""
    vt = published["vt"]
    monkeypatch.setattr(vt.np.random, "randint", lambda low, high: random.randrange(low, high))
    random.seed(seed)
    example, names = vt.generate_input_output(5, 1, 4, is_icl=True)
    text, answers = vt.generate_input_output(lines, 1, 4, is_icl=False)
    sample = TASKS["vt"].make(random.Random(seed), lines, 4096, Material([], [], []))
    assert sample.answers == tuple(answers)
    assert sample.text == f"{example} {' '.join(names)}\n\n{text.rstrip()}"


@pytest.mark.parametrize(("size", "length"), [(60, 4096), (40, 1024)])
def test_common_words_sample_for_sample(published, monkeypatch, size, length):
    cwe = published["cwe"]
    monkeypatch.setattr(cwe, "RNG", random)
    random.seed(42)
    example, text, answers = cwe.generate_input_output(size, length)
    sample = TASKS["cwe"].make(random.Random(42), size, length, Material([], cwe.WORDS, []))
    assert sample.answers == tuple(answers)
    assert sample.text == f"{example}\n{text}"


@pytest.mark.parametrize("words", [300, 2000])
def test_frequent_words_sample_for_sample(published, words):
    random.seed(42)

    class Letters:
        """A tokenizer of no tokens: the harness does not shorten the text."""

        input_ids = ()

        def __init__(self, text):
            pass

    text, answers, _ = published["fwe"].generate_input_output(4096, Letters, num_words=words, vocab_size=4096 // 50)
    sample = TASKS["fwe"].make(random.Random(42), words, 4096, Material([], [], []))
    assert sample.answers == tuple(answers)
    assert sample.text == text


def test_the_score_is_the_published_one_and_keys_are_adjective_noun(published):
    from lm_eval.tasks.ruler.common_utils import string_match_all

    ruler = object.__new__(Ruler)
    for text, answers in ((" 12 and AB.", ["12", "ab"]), (" 12.", ["12", "ab", "7"]), ("", ["x"])):
        assert ruler.score(text, " ".join(answers)) == string_match_all([text], [answers])
    assert len(KEYS) == len(set(KEYS)) == 42_280
    assert all(key.count("-") == 1 and key.islower() for key in KEYS)
