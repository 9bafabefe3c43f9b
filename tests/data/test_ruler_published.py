"""Our prompts of RULER against those of lm-evaluation-harness's generator, from the same random numbers."""

import random

import pytest

pytest.importorskip("wonderwords", reason="the optional extra `eval` is not installed")
pytest.importorskip("lm_eval", reason="the optional extra `eval` is not installed")

from landmark.data.ruler import TASKS
from landmark.data.ruler.material import KEYS, Material

ESSAY = [
    f"{word}{'.' if place % 9 == 8 else ''}" for place, word in enumerate(("alpha beta gamma delta " * 500).split())
]
NIAH = [name for name in TASKS if name.startswith("niah")]


@pytest.fixture(scope="module")
def published():
    """Modules of the harness. Its needles import nltk, and look for a file of nltk's that is not needed here."""
    nltk = pytest.importorskip("nltk")
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

    from landmark.data.ruler import Ruler

    ruler = object.__new__(Ruler)
    for text, answers in ((" 12 and AB.", ["12", "ab"]), (" 12.", ["12", "ab", "7"]), ("", ["x"])):
        assert ruler.score(text, " ".join(answers)) == string_match_all([text], [answers])
    assert len(KEYS) == len(set(KEYS)) == 42_280
    assert all(key.count("-") == 1 and key.islower() for key in KEYS)
