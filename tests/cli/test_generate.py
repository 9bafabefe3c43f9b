"""`task=generate`: what stands on the screen is what the model generates, a book is read once and asked again."""

import io
import re
import sys

import pytest

from landmark.documents import saved_document
from landmark.experiment.data import load_tokenizer
from landmark.experiment.data.sources import read_text
from landmark.models.sampling import Sampling
from landmark.utils.errors import UserError
from landmark.utils.files import write_json
from tests.saved import saved_run
from tests.workplace import run_task

TOKENIZER = load_tokenizer("bytes")
BOOK, QUESTION = "It was the best of times, it was the worst of times. " * 9, "What was it? "


@pytest.fixture
def ask(tmp_path, capsys):
    """Runs the task; returns what was printed, and what was said of it."""
    model = saved_run(tmp_path / "run")
    (tmp_path / "book.txt").write_text(BOOK)

    def run(*overrides):
        common = ["task=generate", f"run={tmp_path / 'run'}", "tokenizer=bytes", "trainer=cpu", "generate.tokens=30"]
        run_task(*common, f"output={tmp_path / 'outputs'}", "eval.local=50", *overrides)
        printed = capsys.readouterr()
        run.said = printed.err.splitlines()
        return printed.out, printed.err.splitlines()[-1]

    run.model = model
    run.folder = tmp_path
    return run


def expected(model, *texts, sampling=None, **settings):
    """What follows the texts, each read in chunks of its own, until the end of a text."""
    memory = model.new_memory(**settings) if model.config.kind == "landmark" else None
    for text in texts[:-1]:
        model.generate([TOKENIZER.encode(text)], 0, local=50, memory=memory)
    last, stop = [TOKENIZER.encode(texts[-1])], [TOKENIZER.eot]
    (generated,) = model.generate(last, 30, local=50, memory=memory, sampling=sampling, stop=stop)
    return TOKENIZER.decode(generated) + "\n"


def test_a_prompt_is_gone_on_from_as_the_settings_say_until_a_stop_text(ask):
    said, statistics = ask("prompt=It was", "retrieval.k=2")
    assert said == expected(ask.model, "It was", k=2)
    assert len(set(said)) > 5
    assert statistics.startswith("6 tokens read in ")
    assert "30 generated" in statistics
    letter = next(letter for letter in said[5:] if letter.isalnum())
    for stop in (letter, re.findall("[A-Za-z]{2}", said)[-1]):
        ended, _ = ask("prompt=It was", "retrieval.k=2", f"generate.stop=[{stop}]")
        assert ended == said[: said.index(stop)] + "\n"
    settings = ["prompt=It was", "generate.temperature=1.2", "generate.top_k=9", "generate.top_p=0.8", "seed=3"]
    assert ask(*settings)[0] == expected(ask.model, "It was", sampling=Sampling(1.2, 9, 0.8, seed=3))


@pytest.mark.parametrize("tier", ["device", "cpu", "disk"])
def test_a_book_read_now_or_loaded_gives_the_same_answer(ask, tier):
    book, question = f"prompt_file={ask.folder / 'book.txt'}", f"prompt={QUESTION.strip()}"
    now, _ = ask(book, question, "retrieval.k=2")
    assert now == expected(ask.model, BOOK, QUESTION.strip(), k=2)
    memory, tier = ask.folder / "memory", f"memory.tier={tier}"
    nothing, statistics = ask(book, f"memory.save={memory}", tier, "retrieval.k=2")
    assert nothing == ""
    assert f"saved in {memory}; nothing was asked: memory.load={memory} prompt='…' asks" in ask.said
    assert ask(book, "generate.tokens=0")[0] == ""
    assert statistics.startswith(f"{len(BOOK)} tokens read")
    assert f"memory of {len(BOOK) // 20} blocks" in statistics
    for _ in range(2):
        later, statistics = ask(question, f"memory.load={memory}", "retrieval.k=2", tier)
        assert later == now
        assert statistics.startswith(f"{len(QUESTION.strip())} tokens read")
    both, _ = ask(book, question, f"memory.save={ask.folder / 'again'}", "retrieval.k=2")
    assert both == now


def test_a_file_alone_is_gone_on_from(ask, monkeypatch):
    """A mark of the order of bytes is no text."""
    book = f"prompt_file={ask.folder / 'book.txt'}"
    said, _ = ask(book)
    assert said == expected(ask.model, BOOK)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert ask("prompt_file=-")[0] == said
    (ask.folder / "book.txt").write_bytes(b"\xef\xbb\xbfIt was")
    assert ask(book)[0] == expected(ask.model, "It was")
    assert read_text(ask.folder / "book.txt") == "It was"
    (ask.folder / "book.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match="book.txt: is not text in UTF-16"):
        ask(book)


def test_files_are_read_one_after_the_other_and_the_memory_says_where_each_begins(ask):
    (ask.folder / "a.md").write_text("# It was\r\n\r\nthe best.\r\n")
    (ask.folder / "b.txt").write_text("It was the worst.\nOf times.", "utf-16")
    named = ",".join(str(ask.folder / name) for name in ("a.md", "b.txt"))
    text, kept = "a.md\n\n# It was\n\nthe best.\n\nb.txt\n\nIt was the worst.\nOf times.\n\n", ask.folder / "kept"
    said, _ = ask(f"prompt_file=[{named}]", f"memory.save={kept}", "prompt=It")
    assert said == expected(ask.model, text, "It")
    document = saved_document(kept, text)
    assert [document.place(text.index(word)) for word in ("best", "b.txt", "Of")] == [
        "a.md, line 3",
        "b.txt",
        "b.txt, line 2",
    ]
    ask("prompt=It", f"memory.load={kept}")
    with pytest.raises(UserError, match="only memories of a model of transformers are asked together"):
        ask("prompt=It", f"memory.load=[{kept},{kept}]")


def test_a_plain_transformer_reads_both_and_a_run_of_another_tokenizer_is_refused(ask):
    model = saved_run(ask.folder / "plain", "transformer")
    (ask.folder / "short.txt").write_text("It was ")
    plain, file = f"run={ask.folder / 'plain'}", f"prompt_file={ask.folder / 'short.txt'}"
    said, _ = ask(plain, file, "model=transformer", "eval.local=null", "prompt=the best")
    assert said == expected(model, "It was the best")
    with pytest.raises(UserError, match="only a landmark model has a memory to save"):
        ask(plain, file, "memory.save=x")
    write_json(ask.folder / "run" / "run.json", {"model": {}, "tokenizer": "f" * 64})
    with pytest.raises(UserError, match="was trained with another tokenizer .ffffffffff….* than tokenizer=bytes"):
        ask("prompt=hello")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompt=''"], "prompt 0 is empty"),
        (["prompt_file=/dev/zero"], r"prompt_file=/dev/zero: is a device, name a file \(- for standard input\)"),
    ],
)
def test_bad_input_is_refused(ask, overrides, said):
    with pytest.raises(UserError, match=said):
        ask(*overrides)
