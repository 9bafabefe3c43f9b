"""`task=chat`, and questions through a model's template: answers alone on standard output, nothing is read twice."""

import io
import re
import sys
import textwrap

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.cli import chat, question
from landmark.documents import Document, read_document, saved_document
from landmark.models.huggingface import LandmarkModel, wrap
from landmark.reading import session as sessions
from landmark.reading.answer import Delta
from landmark.reading.answering import Answering
from landmark.reading.session import CHAT
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from tests.documents.files import pdf
from tests.models.huggingface.conftest import make_model
from tests.reading.test_chats import CHATML, chat_tokenizer, said, user
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
    memory, tokenizer = ask.model.new_memory(k=2, window=9), ask.tokenizer
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

    def interrupted(self, ids, *given):
        said = 0
        for piece in answer(self, ids, *given):
            yield piece
            said += isinstance(piece, Delta)
            if said == 2 and len(ids) < 100:
                chat.signal.raise_signal(chat.signal.SIGINT)

    monkeypatch.setattr(Answering, "answer", interrupted)
    out, err = ask("task=chat", questions="Who?\nWhere does it stand, and what does it wait for there? Say it.\n")
    assert [len(line) for line in out.splitlines()] == [2, 5]
    assert "[stopped]" in err


def test_a_chat_says_what_it_is_takes_commands_and_shows_where_it_goes_on(ask):
    """Words behind a slash are commands, and nothing of the chat."""
    book, talk = f"prompt_file={ask.folder / 'book.txt'}", ask.folder / "talk"
    lines = "/help\nWho?\n/sorces\n/sources five\n/etc/passwd?\n /quit it?\n/quit\nNever asked?\n"
    out, err = ask("task=chat", book, f"memory.save={talk}", questions=lines)
    assert f"model: model\ntext: book.txt, {len(BOOK)} tokens\nAsk a question. /help lists the commands" in err
    assert "/quit       ends the chat" in err
    refused = [line.partition(":")[0] for line in err.splitlines() if ": is no command, /help lists them;" in line]
    assert refused == ["/sorces", "/sources five"]
    assert len(out.splitlines()) == 3
    asked = [each["content"] for each in read_json(talk / "chat.json")["messages"] if each["role"] == "user"]
    assert asked == ["Who?", "/etc/passwd?", "/quit it?"]
    err = ask("task=chat", f"memory.load={talk}", questions="")[1]
    answers = [line.strip() for line in out.splitlines()]
    assert f"text: book.txt, {len(BOOK)} tokens" in err
    assert f"> /etc/passwd?\n{answers[1]}\n> /quit it?\n{answers[2]}\n" in err
    assert "> Who?" not in err


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
    assert "/quit or Ctrl-D ends the chat\n" in err


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


def test_a_book_and_a_question_are_the_same_ids_by_every_way_to_ask(ask, monkeypatch):
    """The book as it is, then the question through the template. The page asks as clients of the server do."""
    testclient = pytest.importorskip("fastapi.testclient", reason="the optional extra `serve` is not installed")
    from landmark.reading.serving.app import make_app
    from landmark.reading.serving.memories import ServerSettings

    found, answer = list[list[int]](), Answering.answer

    def noted(self, ids, *given, **settings):
        found.append(list(ids))
        return answer(self, ids, *given, **settings)

    monkeypatch.setattr(Answering, "answer", noted)
    book, question = f"prompt_file={ask.folder / 'book.txt'}", "prompt=Who waits?"
    ask("task=generate", book, question)
    ask("task=chat", book, questions="Who waits?\n")
    ask("task=generate", book, f"memory.save={ask.folder / 'alone'}", "generate.tokens=0")
    for task in ["task=generate", question], ["task=chat"]:
        ask(*task, f"memory.load={ask.folder / 'alone'}", questions="Who waits?\n")
    app = make_app(ask.model, ask.tokenizer, ServerSettings(ask.folder / "server", ("key",), tokens=2))
    with testclient.TestClient(app, headers={"Authorization": "Bearer key"}) as http:
        assert http.put("/v1/documents/book", content=BOOK.encode()).status_code == 200
        for path, asked in {"chat/completions": "messages", "responses": "input"}.items():
            given = {"document": "book", asked: [user("Who waits?")]}
            assert http.post(f"/v1/{path}", json=given).status_code == 200
    template = ask.tokenizer.apply_chat_template([user("Who waits?")], add_generation_prompt=True, tokenize=False)
    expected = ask.tokenizer(BOOK + template)["input_ids"]
    assert found == [expected] * 6


@pytest.mark.parametrize(("encoding", "errors"), [("utf-8", "strict"), ("ascii", "surrogateescape")])
def test_bytes_that_are_no_text_are_one_line_and_the_talk_is_saved(ask, monkeypatch, encoding, errors):
    """In locales of UTF-8 and of C, whose Python has half characters in place of odd bytes."""

    def typed(content):
        given = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors=errors)
        monkeypatch.setattr(io, "StringIO", lambda _: given)

    typed(b"caf\xe9?\nCaf\xc3\xa9?\n")
    out, err = ask("task=chat", f"memory.save={ask.folder / 'talk'}")
    assert [len(line) for line in out.splitlines()] == [5]
    assert err.count("question='caf\\udce9?': must be text in UTF-8\n") == 1
    chat = read_json(ask.folder / "talk" / CHAT, {"messages": list})["messages"]
    assert [each["content"] for each in chat] == ["Café?", out.strip()]
    typed(b"caf\xe9?")
    with pytest.raises(UserError, match="prompt_file=-: is not text in UTF-8"):
        ask("task=generate", "prompt_file=-")


def test_a_question_that_the_template_refuses_is_one_line_and_the_talk_goes_on(ask):
    template = "{% if messages[-1].content == 'No?' %}{{ raise_exception('rude') }}{% endif %}" + CHATML
    (ask.folder / "model" / "chat_template.jinja").write_text(template)
    out, err = ask("task=chat", f"memory.save={ask.folder / 'talk'}", questions="Who?\nNo?\nWhere?\n")
    assert len(out.splitlines()) == 2
    assert err.count("refuses them (rude)\n") == 1
    chat = read_json(ask.folder / "talk" / CHAT, {"messages": list})["messages"]
    assert [each["content"] for each in chat[::2]] == ["Who?", "Where?"]


def test_an_answer_ends_and_is_drawn_as_the_models_generation_config_says(ask):
    """In `task=generate` as in the chat. One setting switches its sampling off, others change it."""
    asked = "task=generate", "prompt=Who?", "generate.tokens=20"
    config = ask.folder / "model" / "generation_config.json"
    saved, (greedy, _) = read_json(config), ask(*asked)
    letter = greedy[4]
    ends = [ask.tokenizer.eos_token_id, *ask.tokenizer(letter)["input_ids"]]
    write_json(config, {**saved, "eos_token_id": ends})
    until = greedy[: greedy.index(letter)] + "\n"
    assert ask(*asked)[0] == until
    assert ask("task=chat", "generate.tokens=20", questions="Who?\n")[0] == until
    write_json(config, {**saved, "do_sample": True, "temperature": 100.0, "top_k": 200})
    drawn = [ask(*asked, f"seed={seed}")[0] for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    of_chat = [ask("task=chat", "generate.tokens=20", f"seed={seed}", questions="Who?\n")[0] for seed in (1, 2, 3)]
    assert len(set(of_chat)) > 1
    for setting in ("defaults=greedy", "temperature=0", "top_k=1"):
        assert ask(*asked, f"generate.{setting}")[0] == greedy


@pytest.mark.parametrize("task", ["chat", "generate"])
def test_a_memory_is_continued_in_the_type_in_which_it_was_read(ask, monkeypatch, task):
    """And refused with another one, before the model is loaded."""
    kept = ask.folder / "kept"
    other = ask.folder / "other"
    for folder, dtype in ((kept, "bfloat16"), (other, "float32")):
        ask("task=generate", f"prompt_file={ask.folder / 'book.txt'}", f"memory.save={folder}", f"model.dtype={dtype}")
    loaded = f"task={task}", f"memory.load={kept}", *(["prompt=Who?"] if task == "generate" else [])
    answers = [ask(*loaded, *given, questions="Who?\n")[0] for given in ((), ("model.dtype=bfloat16",))]
    assert answers[0].strip()
    assert answers[0] == answers[1]
    monkeypatch.setattr("landmark.models.huggingface.wrapping.open_as_saved", None)
    with pytest.raises(UserError, match="was read in bfloat16, the model is float32: leave out model.dtype$"):
        ask(*loaded, "model.dtype=float32", questions="Who?\n")
    with pytest.raises(UserError, match=r"kept in bfloat16, \S*other in float32: memories .* read in one type$"):
        ask(loaded[0], f"memory.load=[{kept},{other}]", *loaded[2:], questions="Who?\n")


@pytest.mark.parametrize("has_units", [True, False])
def test_weights_saved_in_half_precision_are_read_so_where_the_processor_has_units(ask, monkeypatch, has_units):
    config = ask.folder / "model" / "config.json"
    write_json(config, {**read_json(config), "dtype": "bfloat16"})
    monkeypatch.setattr("landmark.cli.question.has_units", lambda device: has_units)
    kept = ask.folder / "kept"
    told = ask("task=generate", f"prompt_file={ask.folder / 'book.txt'}", f"memory.save={kept}")[1]
    assert ("model.dtype=float32 is exact, slower" in told) == has_units
    assert question._dtype_of_memory(kept) == ("bfloat16" if has_units else "float32")


def test_sources_are_passages_of_the_files_with_their_places(ask):
    """Of two files, of a saved memory of them, of a chat, and with another file behind it."""
    pages = "Herons wait here. " * 3, "The zebra sleeps in Quito.", "It is late. " * 9
    (ask.folder / "lake.pdf").write_bytes(pdf(*pages))
    (ask.folder / "late.txt").write_text("Nobody came.\n\nThe okapi eats in Lima.\n" + "Nobody came.\n" * 9)
    files = f"prompt_file=[{ask.folder / 'lake.pdf'},{ask.folder / 'book.txt'}]"
    common, kept = "model.block_size=24", ask.folder / "kept"
    named = r"\[1\] lake.pdf, page 2, characters (\d+) to (\d+) "
    question = "prompt=Where sleeps the zebra?"
    out, err = ask("task=generate", question, files, common, "generate.sources=2", f"memory.save={kept}")
    start, end = map(int, re.search(named, err).groups())
    text = read_document(ask.folder / "lake.pdf").text
    assert text[start:end] == "The zebra sleeps in Quito."
    assert "%)\n    The zebra sleeps in Quito.\n" in err
    loaded = f"memory.load={kept}"
    again, said_again = ask("task=generate", question, loaded, common, "generate.sources=1")
    assert again == out == ask("task=generate", question, loaded, common)[0]
    assert f"[1] lake.pdf, page 2, characters {start} to {end} " in said_again
    both = loaded, f"prompt_file={ask.folder / 'late.txt'}"
    _, err = ask("task=generate", "prompt=Where eats the okapi?", *both, common, "generate.sources=1")
    assert "[1] late.txt, line 3, characters 14 to 37 " in err
    talk = "/sources\nWhere sleeps the zebra?\n/sources 1\n/sources 99\nWho?\n"
    out, err = ask("task=chat", loaded, common, questions=talk)
    assert [len(answer) for answer in out.splitlines()] == [5, 5]
    assert "/sources: the passages behind an answer" in err
    assert err.count("] ") == 1
    assert re.search(named, err).groups() == (str(start), str(end))
    assert "/sources=99: must be at least 1 and at most 20" in err
    pair = [ask.folder / "1.memory", ask.folder / "2.memory"]
    for name, folder in zip(("lake.pdf", "late.txt"), pair, strict=True):
        ask("task=generate", f"prompt_file={ask.folder / name}", f"memory.save={folder}", common)
    together = f"memory.load=[{pair[0]},{pair[1]}]"
    texts = {"lake.pdf": text, "late.txt": read_document(ask.folder / "late.txt").text}
    asked = ask("task=generate", question, together, common, "generate.sources=20")[1]
    asked += ask("task=chat", together, common, questions="Where eats the okapi?\n/sources 20\n")[1]
    found = re.findall(r"^\[\d+\] ([^,]*), .*characters (\d+) to (\d+) .*\n((?:    .*\n|\n)*)", asked, re.M)
    assert {name for name, *_ in found} == texts.keys()
    for name, start, end, shown in found:
        assert texts[name][int(start) : int(end)] == textwrap.dedent(shown).rstrip("\n")
    for given, message in (
        ([together, "memory.save=x"], "each of the 2 memories is saved"),
        (["memory.load=[]"], "a list of"),
    ):
        with pytest.raises(UserError, match=message):
            ask("task=chat", *given, common)
    for kind, given in (("pretrained", []), ("pretrained_base", [files]), ("pretrained", [files, "generate.tokens=0"])):
        with pytest.raises(UserError, match="generate.sources=2: .*model=pretrained, and an answer about prompt_file"):
            ask("task=generate", "prompt=Who?", *given, "generate.sources=2", kind=kind)


def test_an_answer_from_its_sources_is_one_about_a_file_of_them_alone(ask):
    """In the order of the text. The memory of the text stays for the next question."""
    text = "\n\n".join(["Herons wait here. " * 9, "The zebra sleeps in Quito. ", "It is late. " * 9, "Nobody."])
    (ask.folder / "long.txt").write_text(text)
    common, question = ("model.block_size=24", "memory.dense=0"), "Where sleeps the zebra?"
    about = f"prompt_file={ask.folder / 'long.txt'}", "generate.sources=2", "generate.from_sources=true"
    answer, err = ask("task=generate", f"prompt={question}", *about, *common)
    shown = [(int(a), int(b)) for a, b in re.findall(r"^\[\d\] long.txt, .* (\d+) to (\d+) ", err, re.M)]
    assert len(shown) == 3
    assert shown[-1][0] == 0, "the beginning of the text is beside the passages"
    assert "(the beginning of the text)" in err
    (ask.folder / "alone.txt").write_text("".join(f"{text[start:end]}\n\n" for start, end in sorted(shown)))
    alone = f"prompt_file={ask.folder / 'alone.txt'}"
    assert answer == ask("task=generate", f"prompt={question}", alone, *common)[0]
    assert answer != ask("task=generate", f"prompt={question}", about[0], *common)[0]
    out, err = ask("task=chat", *about, *common, questions=f"{question}\nWho?\n/sources 1\n")
    assert out.splitlines()[0] == ask("task=chat", alone, *common, questions=f"{question}\n")[0].splitlines()[0]
    assert err.count("[1] long.txt, ") == 3
    err = ask("task=generate", f"prompt={question}", about[0], about[2], *common)[1]
    assert err.count("] long.txt, ") > 3, "three passages where no number is given, and the beginning"
    (ask.folder / "short.txt").write_text("Herons wait here.")
    short, answers = f"prompt_file={ask.folder / 'short.txt'}", []
    for more in ((about[2],), ()):
        answers.append(ask("task=generate", f"prompt={question}", short, *more, *common))
    assert answers[0][0] == answers[1][0]
    assert "no passage was found: the answer is made from the whole text short.txt" in answers[0][1]


def test_what_a_file_did_not_give_is_said_beside_each_answer(ask):
    """Also another day, of a saved memory, and in a chat."""
    (ask.folder / "lease.pdf").write_bytes(pdf("The rent is ten pounds. " * 4, "▣", "The landlord is Osgood. " * 4))
    said = "not in the text: lease.pdf: page 2 has no text, but pictures: ocrmypdf adds the text of scans\n"
    kept = ask.folder / "lease.memory"
    about = f"prompt_file={ask.folder / 'lease.pdf'}", f"memory.save={kept}"
    assert said in ask("task=generate", "prompt=Who?", *about)[1]
    assert said in ask("task=generate", "prompt=Who?", f"memory.load={kept}")[1]
    assert said in ask("task=chat", f"memory.load={kept}", questions="Who?\n")[1]


def test_sources_of_a_loaded_chat_are_found_in_a_memory_of_its_messages_alone(ask, monkeypatch):
    def spied(answering, cache, documents, read, prompt, *rest):
        seen.append((cache.ids[0].tolist(), [*read, *prompt]))
        return found(answering, cache, documents, read, prompt, *rest)

    seen, found = [], sessions.find
    monkeypatch.setattr(sessions, "find", spied)
    talk, about = ask.folder / "talk", f"prompt_file={ask.folder / 'book.txt'}"
    answer = ask("task=chat", about, "generate.tokens=200", questions="Who waits?\n")[0]
    stop = f"generate.stop=[{re.findall('[a-zA-Z]{2}', answer)[0]}]"  # its first token stays in the memory
    ask("task=chat", about, stop, "generate.tokens=200", f"memory.save={talk}", questions="Who waits?\n")
    again = f"memory.load={talk}", "generate.sources=2", "generate.from_sources=true"
    ask("task=chat", *again, questions="And who sleeps?\nWhere?\n")
    assert len(seen) == 2
    assert all(read == ids[: len(read)] for read, ids in seen)


def test_a_model_that_is_not_trained_yet_says_so(ask, books):
    with pytest.raises(UserError, match="has no trained model: train it with task=train"):
        ask("task=generate", f"data.path={books}", "prompt=Who?", kind="pretrained_landmark")
