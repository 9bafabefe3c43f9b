"""The server over a real port, asked by the real client of OpenAI and by 32 clients at once."""

import gc
import json
import logging
import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
import tokenizers
import torch
from fastapi.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from landmark.documents import document_of
from landmark.models.huggingface import LandmarkCache, PrefixCache, joined
from landmark.models.huggingface.chunked_forward import ChunkedForward
from landmark.reading import answering
from landmark.reading.answer import Decoding
from landmark.reading.answering import Answering, finished
from landmark.reading.serving.__main__ import KEY, _made_key, main
from landmark.reading.serving.app import make_app
from landmark.reading.serving.memories import ServerSettings
from landmark.reading.serving.service import Service
from landmark.utils.errors import UserError
from tests.documents.files import docx, zipped
from tests.forked import Started, free_port, wait_for
from tests.models.huggingface.conftest import FREE, make_tokenizer, save_model, wrapped_model
from tests.reading.serving.conftest import KEYS, Server, greedily

pytestmark = pytest.mark.timeout(900)  # for a busy machine


def test_completions_and_chats_are_the_models_own(server, model, tokenizer):
    """Streamed too; on request with the number of tokens in a last chunk without a choice, and in no other."""
    prompt, client = "The heron waits. " * 4, server.client()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who waits?"}]
    of_chat = greedily(model, tokenizer, "system: Be brief.\nuser: Who waits?\nassistant:")
    for create, asked, expected, text in (
        (client.completions.create, {"prompt": prompt}, greedily(model, tokenizer, prompt), lambda x: x.text),
        (client.chat.completions.create, {"messages": chat}, of_chat, lambda x: getattr(x, "delta", x).content),
    ):
        asked |= {"model": "landmark", "max_tokens": 4, "temperature": 0}
        found = create(**asked)
        (choice,) = found.choices
        assert (choice.text if "prompt" in asked else choice.message.content) == expected
        *parts, last = create(**asked, stream=True, stream_options={"include_usage": True})
        assert "".join(text(part.choices[0]) or "" for part in parts) == expected
        assert parts[-1].choices[0].finish_reason == choice.finish_reason in ("length", "stop")
        assert last.choices == []
        first, second = ((each.usage.prompt_tokens, each.usage.total_tokens) for each in (found, last))
        assert first == second
        assert all(part.usage is None and "usage" in part.model_fields_set for part in parts)
        assert all(part.choices for part in create(**asked, stream=True))
    expected = greedily(model, tokenizer, prompt)
    if len(expected) > 2:
        assert server.ask(prompt, stop=expected[1:3]).choices[0].text == expected[: expected.find(expected[1:3])]


def test_answers_are_as_the_model_recommends_and_wrong_keys_and_bodies_refused(server, model, monkeypatch):
    """Where it says nothing, greedy; another temperature than OpenAI's default of 1."""
    asked, create = {"model": "landmark", "prompt": "The heron", "max_tokens": 8}, server.client().completions.create
    greedy = create(**asked, temperature=0).choices[0].text
    assert {create(**asked, seed=seed).choices[0].text for seed in (1, 2, 3)} == {greedy}
    found = [create(**asked, seed=seed, temperature=1).choices[0].text for seed in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert len(set(found)) > 1
    for name, value in {"do_sample": True, "top_k": 4096}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert [create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2, 3, 4)] == found
    assert create(**asked, seed=2, temperature=0).choices[0].text == greedy
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        server.ask("Hello", "another-key")
    with pytest.raises(openai.APIStatusError, match="more than 4,000 bytes") as error:
        server.ask("x" * 5000)
    assert error.value.status_code == 413
    body = b'{"prompt": "a", "max_tokens": 1}'
    in_parts = {"content": iter([body[:9], body[9:]]), "headers": {"content-type": "application/json"}}
    assert server.http().post("/completions", **in_parts).status_code == 200
    large = server.http().post("/completions", content=iter([b"x" * 3000] * 2))
    assert large.status_code == 413, "a body of unknown length is counted"
    assert "more than 4,000 bytes: the server's --body" in large.json()["error"]["message"]
    put = [server.http().put("/documents/large", content=b"\x7fELF" * count) for count in (1250, 2250)]
    assert [each.status_code for each in put] == [400, 413], "a file has a limit of its own"
    assert "more than 8,000 bytes: the server's --file allows" in put[1].json()["error"]["message"]
    refused = httpx.post(f"{server.url}/completions", content=b"x" * 5000)
    assert refused.status_code == 401, "the body was read before the key"


def test_a_client_is_answered_while_many_wait_for_the_model(model, tokenizer, tmp_path, monkeypatch):
    """More than the 40 threads that a server has by default."""
    waiting, go_on, read = threading.Semaphore(0), threading.Event(), Answering.read

    def slow(*given):
        waiting.release()
        assert go_on.wait(100)
        return read(*given)

    monkeypatch.setattr(Answering, "read", slow)
    with Server(model, tokenizer, tmp_path) as running, ThreadPoolExecutor(50) as pool:
        client = running.client()
        answers = [pool.submit(running.ask, "The heron waits. ") for _ in range(50)]
        try:
            assert all(waiting.acquire(timeout=100) for _ in answers)
            assert client.models.retrieve("landmark").id == "landmark"
        finally:
            go_on.set()
        assert len({each.result().choices[0].text for each in answers}) == 1


@pytest.mark.parametrize("kind", ["bytes", "words that begin with a space"])
def test_a_text_is_decoded_as_its_tokens_come(kind):
    """Letters of several bytes come whole, or at the very end as far as they go; spaces between words stay."""
    text = "Zwölf Reiher — 十二只苍鹭 🪶🪶, naïve. "
    tokenizer = make_tokenizer()
    if kind != "bytes":
        words = {f"▁{word}": number for number, word in enumerate(text.split())}
        pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "?": len(words)}, unk_token="?"))
        pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        pieces.decoder = tokenizers.decoders.Metaspace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    ids = tokenizer(text * 3)["input_ids"]
    for count in range(1, len(ids) + 1):
        tokens, seen = [], [""]
        decoding = Decoding(tokenizer.decode, tokens)
        for number, token in enumerate(ids[:count], 1):
            tokens.append(token)
            seen.append(decoding.text(whole=number == count))
            assert seen[-1].startswith(seen[-2])
            assert "\ufffd" not in seen[-1] or number == count
        assert seen[-1] == tokenizer.decode(tokens)


def test_bytes_that_are_no_letters_are_shown_as_they_come():
    tokenizer, tokens, seen = make_tokenizer(), [], ""
    broken = tokenizer("🪶")["input_ids"][1]  # a byte in the middle of a letter
    decoding = Decoding(tokenizer.decode, tokens)
    for number in range(1, 50):
        tokens.append(broken)
        seen = decoding.text(whole=False)
        assert len(seen) >= number - 3
    assert tokenizer.decode(tokens).startswith(seen)


def test_32_clients_at_once_are_answered_as_if_alone(server, model, tokenizer):
    begun = [f"{number} herons. " for number in range(32)]
    turns = [f"{first}Then {number * 7} came. " for number, first in enumerate(begun)]
    expected = [greedily(model, tokenizer, turn) for turn in turns]
    assert len(set(expected)) > 16

    def talk(number):
        server.ask(begun[number])
        if number % 2:
            return "".join(part.choices[0].text for part in server.ask(turns[number], stream=True))
        return server.ask(turns[number]).choices[0].text

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(talk, range(32))) == expected


def test_a_file_that_is_no_plain_text_is_a_document_or_refused_by_its_kind(tokenizer, tmp_path):
    with Server(wrapped_model("llama", **FREE), tokenizer, tmp_path) as running:
        put = [running.http().put("/documents/book", content=content) for content in (docx(), zipped({"a": "b"}), b"")]
    text = document_of(docx(), "book").text
    assert put[0].json() == {"id": "book", "object": "document", "tokens": len(tokenizer(text)["input_ids"])}
    assert [each.status_code for each in put] == [200, 400, 400]
    assert put[1].json()["error"]["message"].startswith("book: is ")
    assert "is empty" in put[2].json()["error"]["message"]


@pytest.mark.parametrize("settings", [{}, FREE])
def test_a_document_is_read_once_and_outlives_the_server(settings, tokenizer, tmp_path):
    model = wrapped_model("gemma3", local=16, **settings)
    text, questions = "The report says that herons wait. " * 5, ("Who waits? ", "Who waits? ", "Where? ")
    expected = [greedily(model, tokenizer, question, text) for question in questions]
    with Server(model, tokenizer, tmp_path) as running:
        posted = running.http().put("/documents/report", content=text.encode()).json()
        assert posted == {"id": "report", "object": "document", "tokens": len(text)}
        found = [running.ask(question, extra_body={"document": posted["id"]}) for question in questions]
        with pytest.raises(openai.NotFoundError, match="there is none of this name"):
            running.ask(questions[0], KEYS[1], extra_body={"document": posted["id"]})
    with Server(model, tokenizer, tmp_path) as running:
        found += [running.ask(question, extra_body={"document": posted["id"]}) for question in questions]
        chat = [{"role": "user", "content": "Who? "}]
        asked = {"model": "landmark", "messages": chat, "temperature": 0, "max_tokens": 4}
        of_chat = running.client().chat.completions.create(**asked, extra_body={"document": posted["id"]})
    assert [each.choices[0].text for each in found] == expected * 2
    known = len(text) if not settings else len(text) // model.landmarks.block_size * model.landmarks.block_size
    assert all(each.usage.prompt_tokens_details.cached_tokens >= known for each in [*found, of_chat])
    assert of_chat.choices[0].message.content == greedily(model, tokenizer, "user: Who? \nassistant:", text)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_documents_are_asked_in_order_or_as_each_was_read_alone(family, tokenizer, tmp_path):
    model, names, question = wrapped_model(family, local=16, **FREE), ["a", "b"], "Who waits? "
    texts = "The report says that herons wait. " * 3, "A note: nobody came to the lake. " * 2
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    alone, whole = (
        [model.new_memory() for _ in texts],
        torch.cat([*ids, tokenizer(question, return_tensors="pt").input_ids], 1),
    )
    for text, memory in zip(ids, alone, strict=True):
        with torch.no_grad():
            model(text, past_key_values=memory, logits_to_keep=1)
    with torch.no_grad():
        together = model.generate(whole, past_key_values=joined(alone), max_new_tokens=4, do_sample=False)[
            0, whole.shape[1] :
        ]
    expected = {"in_order": greedily(model, tokenizer, question, "".join(texts)), "apart": tokenizer.decode(together)}
    with Server(model, tokenizer, tmp_path) as running:
        for name, text in zip(names, texts, strict=True):
            running.http().put(f"/documents/{name}", content=text.encode())
        for way in ("apart", "in_order") * 2:
            asked = {"prompt": question, "max_tokens": 4, "temperature": 0, "sources": 9}
            found = running.http().post("/completions", json=asked | {"documents": names, "documents_read": way}).json()
            assert found["choices"][0]["text"] == expected[way]
            assert found["documents_read"] == way
            assert {each["document"] for each in found["choices"][0]["sources"]} == {*names}
            for each in found["choices"][0]["sources"]:
                assert texts[names.index(each["document"])][each["start"] : each["end"]] == each["text"]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= sum(map(len, texts)) - 12
        for changed in (texts[0], texts[1] + texts[0]):  # its first document is that of a memory that is kept
            running.http().put("/documents/b", content=changed.encode())
            asked |= {"documents": names, "documents_read": "apart", "max_tokens": 8}
            answers = []
            for key in KEYS:  # nothing of the first one's is the second one's
                for name, text in zip(names, (texts[0], changed), strict=True):
                    running.http(key).put(f"/documents/{name}", content=text.encode())
                answers.append(running.http(key).post("/completions", json=asked).json()["choices"][0])
            assert answers[0] == answers[1]
        running.http().put("/documents/b", content=texts[1].encode())
        asked["documents_read"] = "apart"
        missing, both = (asked | each for each in ({"documents": ["a", "c"]}, {"documents": names, "document": "a"}))
        said = [running.http().post("/completions", json=each).json()["error"]["message"] for each in (missing, both)]
    assert said == ["document c: there is none of this name", "document and documents: name one, or several"]
    with Server(wrapped_model("llama", local=16), tokenizer, tmp_path / "landmarks") as running:
        for name in names:
            running.http().put(f"/documents/{name}", content=b"A heron waits. " * 3)
        given = {"prompt": question, "documents": names, "documents_read": "apart"}
        for _ in range(2):
            found = running.http().post("/completions", json=given)
            assert found.status_code == 400
            assert "only texts that are read without landmarks can be asked together" in found.text


@pytest.mark.parametrize("settings", [{}, FREE])
def test_a_document_in_memory_is_not_loaded_again(settings, tokenizer, tmp_path, monkeypatch):
    """Its last tokens are no whole block: they are read again with each question, of which nothing else is."""
    model, loaded, load = wrapped_model("gemma3", local=16, **settings), [], LandmarkCache.load
    monkeypatch.setattr(LandmarkCache, "load", lambda *given: loaded.append(load(*given)))
    with Server(model, tokenizer, tmp_path) as running:
        running.http().put("/documents/book", content=b"A heron waits. " * 5)
        for question in ("Who? ", "Where? ", "Who waits? "):
            running.ask(question, extra_body={"document": "book"})
        assert not loaded
    with Server(model, tokenizer, tmp_path) as running:
        for question in ("Who? ", "Where? "):
            running.ask(question, extra_body={"document": "book"})
    assert len(loaded) == 1


def test_documents_that_cannot_be_kept_are_refused_before_they_are_read(model, tokenizer, tmp_path, monkeypatch):
    with Server(model, tokenizer, tmp_path / "few", documents=2) as running:
        found = [running.http().put(f"/documents/{name}", content=b"Hello. ") for name in "abb"]
        assert [each.status_code for each in found] == [200, 200, 200]
        monkeypatch.setattr(Answering, "read", None)
        for name, status, said in (("c", 507, "this server keeps no more"), ("-c", 400, "a name has 1 to 64")):
            refused = running.http().put(f"/documents/{name}", content=b"Hello. ")
            assert refused.status_code == status
            assert said in refused.json()["error"]["message"]
    with Server(model, tokenizer, tmp_path / "small", disk=100_000) as running:
        refused = running.http().put("/documents/long", content=b"A heron. " * 400)
    assert refused.status_code == 507
    assert "there is no room for" in refused.json()["error"]["message"]


def test_a_path_that_is_nowhere_is_noticed_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["landmark.reading.serving", "/nowhere"])
    monkeypatch.setenv("LANDMARK_API_KEY", "a-key")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "model.name=/nowhere: there is no such folder or file\n"


def test_a_stream_that_is_not_read_to_its_end_holds_no_memory(model, tokenizer, tmp_path, monkeypatch):
    """Without the garbage collector."""
    made = []
    monkeypatch.setattr(answering, "PrefixCache", lambda *given: made.append(PrefixCache(*given)) or made[-1])
    gc.disable()
    try:
        with Server(model, tokenizer, tmp_path, tokens=100_000) as running:
            body = {"prompt": "Never read. ", "max_tokens": 100_000, "stream": True}
            with running.http().stream("POST", "/completions", json=body) as stream:
                events = stream.iter_bytes()  # httpx closes the stream when nothing holds this
                next(events)
                assert [kept.in_use for kept in made[0]._kept] == [True]
            wait_for(lambda: not made[0]._kept[0].in_use, 30)
    finally:
        gc.enable()


def events(response):
    """The events and comments of a stream, as they come."""
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def test_a_stream_shows_signs_of_life_while_a_text_is_read(slow, tokenizer, tmp_path, caplog):
    """Its headers come before anything is read; the log and the upload of a document say how far it is."""
    text, tokens = "A heron waits. " * 16, 240
    with caplog.at_level(logging.INFO), Server(slow, tokenizer, tmp_path) as running:
        asked = {"json": {"prompt": text, "max_tokens": 2, "stream": True}}
        with running.http().stream("POST", "/completions", **asked) as found:
            assert found.headers["content-type"].startswith("text/event-stream")
            first, *rest = events(found)
        assert first.startswith(":")
        assert any(each.endswith(f"of {tokens} tokens read") for each in [first, *rest])
        assert [json.loads(each)["choices"][0]["finish_reason"] for each in rest if each.startswith("{")][
            -1
        ] == "length"
        assert rest[-1] == "[DONE]"
        put = {"content": text.encode()[::-1], "params": {"stream": "true"}}
        with running.http().stream("PUT", "/documents/book", **put) as found:
            *progress, document, end = events(found)
        assert json.loads(document) == {"id": "book", "object": "document", "tokens": tokens}
        assert end == "[DONE]"
        read = [json.loads(each) for each in progress]
        assert all(each["object"] == "document.progress" for each in read)
        assert any(0 < each["read"] < each["tokens"] == tokens for each in read)
        with running.http().stream("PUT", "/documents/-", **put) as found:
            assert "a name has 1 to 64" in next(events(found))
    assert re.search(rf"document book: \d+ of {tokens} tokens read", caplog.text)


def test_a_running_answer_goes_before_books_that_are_read(tokenizer, tmp_path, monkeypatch):
    """Of two books, one piece is read between two tokens of an answer, and small ones alone. The books are then the
    same. Pieces last until the next token is asked for.
    """
    model, passes, asked = wrapped_model("gemma3", local=64, **FREE), [], threading.Event()
    pass_on, books = ChunkedForward._pass, {"heron": "A heron waits. " * 60, "crow": "A crow goes. " * 60}

    def note(self, parts, *given):
        passes.append((parts[0].ids.shape[1], turns._is_long))
        if len(passes) == 4:
            assert asked.wait(100)
        if len(passes) >= 4 and turns._is_long:
            wait_for(lambda: turns.are_wanted or (answered.done() and not turns.answers))
        return pass_on(self, parts, *given)

    def ask(running, book):
        return running.ask("Who? ", extra_body={"document": book}).choices[0].text

    body = {"prompt": "A crow. ", "max_tokens": 12, "temperature": 0}
    with Server(model, tokenizer, tmp_path / "alone") as running:
        for name, text in books.items():
            running.http().put(f"/documents/{name}", content=text.encode())
        expected = [ask(running, book) for book in books]
        answer = running.http().post("/completions", json=body).json()["choices"][0]["text"]
    with Server(model, tokenizer, tmp_path / "shared") as running, ThreadPoolExecutor(3) as pool:
        turns = running.server.config.app.state.service.answering.turns
        monkeypatch.setattr(ChunkedForward, "_pass", note)
        monkeypatch.setattr(answering, "PAUSE", 1e-9)  # pieces of one block
        put = [pool.submit(running.http().put, f"/documents/{name}", content=books[name].encode()) for name in books]
        wait_for(lambda: len(passes) == 4)
        answered = pool.submit(running.http(KEYS[1]).post, "/completions", json=body)
        asked.set()
        assert answered.result().json()["choices"][0]["text"] == answer
        assert all(each.result().status_code == 200 for each in put)
        assert [ask(running, book) for book in books] == expected
    assert passes[:4] == [(64, True)] * 4
    tokens = [at for at, (size, is_long) in enumerate(passes) if (size, is_long) == (1, False)][:11]
    assert [passes[at][1] for at in range(tokens[0], tokens[-1] + 1)] == [False, True] * 10 + [False]
    assert {passes[at][0] for at in range(tokens[0], tokens[-1]) if passes[at][1]} == {model.landmarks.block_size}
    assert 64 in [size for size, _ in passes[tokens[-1] :]]


def test_a_text_is_read_while_its_client_is_away(slow, tokenizer, tmp_path):
    """One after the other; a reading can be stopped, and one that fails says why until it is dismissed."""
    with Server(slow, tokenizer, tmp_path, documents=2) as running:
        http, text = running.http(), b"A heron waits. " * 16

        def put(name):
            found = http.put(f"/documents/{name}?wait=false", content=text)
            assert (found.status_code, found.json()["object"]) == (202, "document.reading")

        def readings(key=KEYS[0]):
            return {each.pop("id"): each for each in running.http(key).get("/readings").json()["data"]}

        for name in ("one", "two"):
            put(name)
        wait_for(lambda: readings().get("one", {}).get("read"))
        assert readings()["two"]["read"] == 0
        assert readings(KEYS[1]) == {}
        assert http.delete("/readings/two").json()["deleted"] is True
        assert http.delete("/readings/two").status_code == 404
        wait_for(lambda: readings() == {})
        assert [each["id"] for each in http.get("/documents").json()["data"]] == ["one"]
        for name in ("three", "four"):
            put(name)
        wait_for(lambda: "error" in readings().get("four", {}))
        assert "this server keeps no more" in readings()["four"]["error"]
        http.delete("/readings/four")
        assert readings() == {}
        put("one")  # the server does not wait for its end


def test_how_far_a_text_is_read_is_said_within_a_piece(model, tokenizer, tmp_path):
    """After each layer, and the whole text is one piece."""
    said, service = [], Service(model, tokenizer, ServerSettings(tmp_path, KEYS), "heron")
    service.memories.close()
    ids = torch.tensor([service.answering.ids("A heron.")])
    reading = service.answering.read(ids, model.new_memory(), within=lambda *read: said.append(read))
    finished(reading)
    assert len(said) == model.config.num_hidden_layers
    assert {tokens for _, tokens in said} == {ids.shape[1]}
    assert [0, *(read for read, _ in said)] == sorted({0, *(read for read, _ in said)})
    finished(service.answering.read(ids, model.new_memory()))
    assert len(said) == model.config.num_hidden_layers


def test_ctrl_c_ends_running_answers(model, tokenizer, tmp_path):
    """Of the command itself, which then ends without a traceback. It was given no key: it has made one, and printed it
    in an address of this machine; the next server has it too.
    """
    folder, port = save_model(tmp_path / "model", model, tokenizer), free_port()
    words = ["-m", "landmark.reading.serving", str(folder), f"--port={port}", "--tokens=1000000", "--dtype=float32"]
    file, url = tmp_path / "memories" / KEY, f"http://127.0.0.1:{port}"
    server = Started(words, tmp_path, {**os.environ, "LANDMARK_API_KEY": ""})
    with ThreadPoolExecutor(1) as pool:
        wait_for(lambda: answers(f"{url}/health") or not server.process.is_alive())
        key = file.read_text()
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "A", "max_tokens": 1_000_000, "temperature": 0}
        given = {"headers": headers, "timeout": 100}
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body, **given)
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, **given) as streamed:
            events_ = events(streamed)
            next(events_)
            os.kill(server.process.pid, signal.SIGINT)
            *_, error, end = events_
        assert json.loads(error)["error"]["message"] == "the server stops"
        assert end == "[DONE]"
        assert (whole.result().status_code, whole.result().json()["error"]["type"]) == (503, "server_error")
    done = server.wait()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"open {url}/#key={key}\n" in done.stderr
    assert len(key) > 30
    assert file.stat().st_mode & 0o777 == 0o600
    assert _made_key(file.parent, "localhost") == key
    with pytest.raises(UserError, match="LANDMARK_API_KEY is not set: .*--host=0.0.0.0 needs one"):
        _made_key(file.parent, "0.0.0.0")


def answers(url):
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200


def test_the_model_has_the_name_with_which_the_server_was_started(model, tokenizer, tmp_path):
    names = "somebody/heron-1b", "heron-1b", "", None
    settings = ServerSettings(tmp_path, KEYS)
    with TestClient(make_app(model, tokenizer, settings, names[0])) as client:
        client.headers["Authorization"] = f"Bearer {KEYS[0]}"
        for name in names:
            found = client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1, "model": name})
            assert found.json()["model"] == "heron-1b"
        assert client.get(f"/v1/models/{names[0]}").json()["id"] == "heron-1b"
        assert client.post("/v1/completions", json={"prompt": "A", "model": "heron"}).status_code == 404


def test_help_shows_every_limit_with_its_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["landmark.reading.serving", "--help"])
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    defaults = {"dtype": "auto", "tokens": 4096, "body": 16 << 20, "file": 256 << 20, "defaults": "model"}
    for name, default in defaults.items():
        assert re.search(rf"--{name} [^-]*\(default: {default}\)", said)
