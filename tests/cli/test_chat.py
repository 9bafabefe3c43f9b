"""`task=chat`, and questions through a model's template: answers alone on standard output, nothing is read twice."""

import io
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.cli import reading as task
from landmark.documents import Document, saved_document
from landmark.huggingface import LandmarkModel, wrap
from landmark.serving.answering import Answering
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model
from tests.utils.test_chats import CHATML, chat_tokenizer, said, user
from tests.workplace import run_task

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
        blocks = "retrieval.k=2 memory.window=9 model.block_size=6" if kind == "pretrained" else ""
        given = [*common, f"output={tmp_path / 'outputs'}", "eval.local=50", *blocks.split(), *overrides]
        monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
        run_task(*given)
        printed = capsys.readouterr()
        return printed.out, printed.err

    run.folder, run.tokenizer = tmp_path, tokenizer
    run.model = wrap(model, tokenizer, block_size=6, landmarks="none")
    return run


def test_a_chat_about_a_book_reads_it_once_goes_on_tomorrow_and_needs_blocks(ask, monkeypatch):
    kept, counted, forward = ask.folder / "kept", [], LandmarkModel.forward

    def count(self, input_ids=None, **given):
        counted.append(input_ids.shape[1])
        return forward(self, input_ids, **given)

    monkeypatch.setattr(LandmarkModel, "forward", count)
    book = f"prompt_file={ask.folder / 'book.txt'}"
    out, _ = ask("task=chat", book, f"memory.save={kept}", questions="Who?\nWhere?\n\n")
    answers = out.splitlines()
    assert [len(answer) for answer in answers] == [5, 5]
    assert sum(counted) < len(BOOK) + 300
    counted.clear()
    later, _ = ask("task=chat", f"memory.load={kept}", questions="When?\n")
    memory, tokenizer = ask.model.new_memory(), ask.tokenizer
    assert sum(counted) < 300
    memory.load(kept)
    chat = [user("Who?"), said(answers[0]), user("Where?"), said(answers[1])]
    read = memory.ids[0].tolist()
    assert tokenizer.decode(read) == BOOK + tokenizer.apply_chat_template(chat, tokenize=False)[: -len("e<|im_end|>\n")]
    assert len(later) == 6
    assert saved_document(kept, tokenizer.decode(read)) == Document("book.txt", BOOK)
    with pytest.raises(UserError, match="is for a model of transformers that reads blocks"):
        ask("task=chat", questions="Who?\n", kind="pretrained_base")


def test_an_answer_is_interrupted_and_the_chat_goes_on(ask, monkeypatch):
    answer = Answering.answer

    def interrupted(self, ids, cache, own, sampling, generator, gone):
        for number, piece in enumerate(answer(self, ids, cache, own, sampling, generator, gone)):
            yield piece
            if number == 1 and len(ids) < 100:
                task.signal.raise_signal(task.signal.SIGINT)

    monkeypatch.setattr(Answering, "answer", interrupted)
    out, err = ask("task=chat", questions="Who?\nWhere does it stand, and what does it wait for there? Say it.\n")
    assert [len(line) for line in out.splitlines()] == [2, 5]
    assert "[stopped]" in err


class Terminal(io.StringIO):
    """Ctrl-C is typed before the first question is whole."""

    typed = False

    def isatty(self):
        return True

    def readline(self, *given):
        if not self.typed:
            self.typed = True
            raise KeyboardInterrupt
        return super().readline(*given)


def test_an_interrupt_between_answers_does_not_end_the_chat(ask, monkeypatch):
    monkeypatch.setattr(io, "StringIO", Terminal)
    out, err = ask("task=chat", questions="Who?\n")
    assert len(out) == 6, "the prompt is no part of the answers"
    assert err.count("> ") == 3


def test_a_question_goes_through_the_models_template(ask):
    """After a text it does too; with null it is text. Reasoning is no part of the answer."""
    model, tokenizer = ask.model, ask.tokenizer
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
        said = tokenizer.decode(found)
        if prompt.endswith("<think>\n"):
            assert (out, err[: len(said)]) == ("\n", said)
        else:
            assert out == said + "\n" or len(prompt) > len(BOOK)
        assert f"{ids.shape[1]} tokens read" in err
