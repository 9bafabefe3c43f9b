"""`task=chat`, and questions through a model's template: answers alone on standard output, nothing is read twice."""

import io
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.cli import main as app
from landmark.cli import reading as task
from landmark.config import to_config
from landmark.huggingface import LandmarkModel, load
from landmark.serving.answering import Answering
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.huggingface.conftest import make_model
from tests.utils.test_chats import CHATML, chat_tokenizer, said, user

BOOK = "A heron stands in the water and waits. " * 20


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """Runs a task with a tiny model that has a template for chats; gives what was printed and what was said of it."""
    model, tokenizer = make_model("gemma3"), chat_tokenizer(CHATML)
    model.resize_token_embeddings(260, mean_resizing=False)
    letters = tokenizer("abcdefgh")["input_ids"]
    with torch.no_grad():
        model.get_output_embeddings().weight[letters] *= 100
    model.save_pretrained(tmp_path / "model"), tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(BOOK)

    def run(*overrides, questions="", kind="pretrained"):
        common = [f"model={kind}", f"model.name={tmp_path / 'model'}", "trainer=cpu", "generate.tokens=5"]
        blocks = ["retrieval.k=2", "memory.window=9"] if kind == "pretrained" else []
        given = [*common, f"output={tmp_path / 'outputs'}", "eval.local=50", *blocks, *overrides]
        monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
        app.run(to_config(compose_conf(given)), given, compose_conf)
        printed = capsys.readouterr()
        return printed.out, printed.err

    run.folder = tmp_path
    return run


@pytest.fixture
def counted(monkeypatch):
    """Tokens that models read, call by call."""
    calls, forward = [], LandmarkModel.forward

    def count(self, input_ids=None, **given):
        calls.append(input_ids.shape[1])
        return forward(self, input_ids, **given)

    monkeypatch.setattr(LandmarkModel, "forward", count)
    return calls


def test_a_chat_about_a_book_reads_it_once_and_goes_on_tomorrow(ask, counted):
    kept = ask.folder / "kept"
    out, _ = ask(
        "task=chat", f"prompt_file={ask.folder / 'book.txt'}", f"memory.save={kept}", questions="Who?\nWhere?\n\n"
    )
    answers = out.splitlines()
    assert [len(answer) for answer in answers] == [5, 5]
    assert sum(counted) < len(BOOK) + 300
    counted.clear()
    later, _ = ask("task=chat", f"memory.load={kept}", questions="When?\n")
    model, tokenizer = load(ask.folder / "model")
    memory = model.new_memory()
    assert sum(counted) < 300
    memory.load(kept)
    chat = [user("Who?"), said(answers[0]), user("Where?"), said(answers[1])]
    read = memory.ids[0].tolist()
    assert tokenizer.decode(read) == BOOK + tokenizer.apply_chat_template(chat, tokenize=False)[: -len("e<|im_end|>\n")]
    assert len(later) == 6


def test_an_answer_is_interrupted_and_the_chat_goes_on(ask, monkeypatch):
    answers = Answering.answers

    def interrupted(self, ids, cache, own, sampling, generator, gone):
        for number, piece in enumerate(answers(self, ids, cache, own, sampling, generator, gone)):
            yield piece
            if number == 1 and len(ids) < 100:
                task.signal.raise_signal(task.signal.SIGINT)

    monkeypatch.setattr(Answering, "answers", interrupted)
    out, err = ask("task=chat", questions="Who?\nWhere does it stand, and what does it wait for there? Say it.\n")
    assert [len(line) for line in out.splitlines()] == [2, 5]
    assert "[stopped]" in err


def test_a_question_goes_through_the_models_template(ask):
    """After a text it does too; with null it is text. The answer alone is on standard output."""
    model, tokenizer = load(ask.folder / "model")
    asked = tokenizer.apply_chat_template([user("Who?")], add_generation_prompt=True, tokenize=False)
    for prompt, given in (
        ("Who?", ["generate.template=null"]),
        (asked, []),
        (f"{asked}<think>\n", ["+generate.template.enable_thinking=true"]),
        (BOOK + asked, [f"prompt_file={ask.folder / 'book.txt'}"]),
    ):
        out, err = ask("task=generate", "prompt=Who?", *given)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        memory = model.new_memory(k=2, window=9)
        found = model.generate(ids, past_key_values=memory, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert out == tokenizer.decode(found) + "\n" or len(prompt) > len(BOOK)
        assert f"{ids.shape[1]} tokens read" in err


def test_a_text_is_read_without_an_answer(ask, counted):
    out, _ = ask(
        "task=generate",
        f"prompt_file={ask.folder / 'book.txt'}",
        "generate.tokens=0",
        f"memory.save={ask.folder / 'm'}",
    )
    assert out == ""
    assert sum(counted) == len(BOOK)


@pytest.mark.parametrize("name", ["task=generate", "task=chat"])
@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("prompt_file={}/no.txt", "there is no such file"),
        ("memory.load={}/nothing", "there is no such folder"),
        ("memory.save={}/model", "exists already"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_loaded(ask, name, given, wrong, monkeypatch):
    monkeypatch.setattr(task, "load_trained", None)
    book = [f"prompt_file={ask.folder / 'book.txt'}"] if "memory" in given else []
    with pytest.raises(UserError, match=wrong):
        ask(name, *book, given.format(ask.folder), *(["prompt=Who?"] if name == "task=generate" else []))


def test_a_model_that_reads_no_blocks_has_no_chat(ask):
    with pytest.raises(UserError, match="is for a model of transformers that reads blocks"):
        ask("task=chat", questions="Who?\n", kind="pretrained_base")
