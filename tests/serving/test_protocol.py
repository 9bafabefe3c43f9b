"""What clients of OpenAI's protocol may count on: fields, numbers of answers, probabilities, errors, lists."""

import errno
import json
import logging
import time

import httpx
import openai
import pytest

from landmark.huggingface import LandmarkCache
from tests.serving.conftest import KEYS, Server

pytestmark = pytest.mark.timeout(900)

HALVES = b'"stop": ["\\udfff"]', b'"model": "\\ud800"', b'"document": "\\ud800"', b'"prompt": "a\\ud800b"'
CHAT = {"model": "landmark", "messages": [{"role": "user", "content": "Who waits?"}], "max_tokens": 4}


def test_fields_that_change_nothing_are_ignored_and_an_unknown_one_has_one_warning(http, caplog):
    """Those that existing clients send, null among them."""
    asked = {"messages": CHAT["messages"], "seed": 1}
    given = {
        **dict.fromkeys(("temperature", "top_p", "stop", "logprobs", "tools", "user", "audio"), None),
        **{"n": 1, "functions": [], "tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": {}},
        **{"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "max_tokens": -1},
        **{"metadata": {"a": "b"}, "mirostat": 0},
    }
    plain = http.post("/chat/completions", json=asked).json()
    with caplog.at_level(logging.WARNING):
        for tools in (None, []):
            found = http.post("/chat/completions", json={**asked, **given, "tools": tools})
            assert found.status_code == 200, found.text
            assert found.json()["choices"] == plain["choices"]
    assert caplog.text.count("the field mirostat of a request is not known here") == 1
    called = {"type": "function", "function": {"name": "look"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [called]},
        {"role": "tool", "content": "A heron.", "tool_call_id": "1", "name": "look"},
        {"role": "user", "content": "So?", "name": None},
    ]
    found = http.post("/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert found.status_code == 200, found.text


def test_documents_are_listed_replaced_and_deleted(server, http):
    document = http.put("/documents/same", content=b"Herons wait.").json()
    for text in ("A crow.", "Herons wait."):
        named = http.put("/documents/book", content=text.encode())
        assert named.json() == {"id": "book", "object": "document", "tokens": len(text)}
    listed = http.get("/documents").json()["data"]
    assert all(each in listed for each in (document, named.json()))
    asked = {"temperature": 0, "max_tokens": 4, "prompt": "Who? "}
    both = [http.post("/completions", json={**asked, "document": each}).json() for each in ("book", document["id"])]
    assert both[0]["choices"] == both[1]["choices"]
    assert http.put("/documents/book", content=b"\xff").status_code == 400
    assert server.http(KEYS[1]).get("/documents").json() == {"object": "list", "data": []}
    assert http.delete("/documents/book").json() == {"id": "book", "object": "document", "deleted": True}
    assert http.delete("/documents/book").status_code == 404
    assert "book" not in {each["id"] for each in http.get("/documents").json()["data"]}


TEXT, TALK = "completions", "chat/completions"
CANNOT = "is not supported here, and would change the answer"


def text(prompt="a", **given):
    return TEXT, {"prompt": prompt, **given}, 400


def talk(**given):
    return TALK, {**CHAT, **given}, 400


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("nothing", b"", 404, "Not Found"),
        ("models", b"", 405, "Method Not Allowed"),
        (TEXT, {"prompt": "a", "model": "gpt-4"}, 404, "there is no model gpt-4: this server has landmark"),
        (TALK, {**CHAT, "model": "gpt-4"}, 404, "there is no model gpt-4: this server has landmark"),
        (TEXT, b'{"prompt": "\xff"}', 400, ""),
        (TEXT, b'{"prompt": ' + b"[" * 1500 + b"]" * 1500 + b"}", 400, ""),
        (TEXT, b"{", 400, "the body is no JSON: "),
        *((TEXT, b'{"prompt": "a", %s}' % each, 400, "half a character") for each in HALVES),
        (TALK, b'{"messages": [{"role": "user", "content": "\\udc00"}]}', 400, "half a character"),
        (*text(""), "the prompt has no text"),
        (*text([]), "the prompt has no text"),
        (*text([1, 999]), "999 is no id"),
        (*text(["a", "b"]), "prompt"),
        (*text([257]), "257 is no id"),
        (*text(temperature=-1), "temperature"),
        (*text(n=2), f"n: {CANNOT}"),
        (*text(document="../../etc"), "a name has 1 to 64"),
        (*text(max_tokens=0), "max_tokens: 0 is less than 1"),
        (*text(seed=2**70), "seed"),
        (*text(stream_options={"include_usage": True}), "stream_options is for a streamed answer"),
        (*text(logit_bias={"5": 1}), f"logit_bias: {CANNOT}"),
        (*talk(tools=[{"type": "function"}]), f"tools: {CANNOT}"),
        (*talk(messages=[{"role": "narrator", "content": "Hello"}]), "messages.0.role"),
        (*talk(modalities=["audio"]), f"modalities: {CANNOT}"),
    ],
)
def test_refusals_have_openais_form_and_one_line(http, path, body, status, said):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = http.post(f"/{path}", content=content, headers={"content-type": "application/json"})
    assert found.status_code == status
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert "\n" not in error["message"]


def test_errors_of_the_servers_disk_are_its_own_and_name_no_path(server, http, monkeypatch):
    http.put("/documents/damaged", content=b"Herons wait.")
    save = LandmarkCache.save

    def full(self, folder, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    def broken(self, folder, *_, **__):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    for fails, status in ((full, 507), (broken, 500)):
        monkeypatch.setattr(LandmarkCache, "save", fails)
        found = http.put("/documents/new", content=b"Herons wait.")
        assert found.status_code == status
        assert found.json()["error"]["type"] == "server_error"
        assert str(server.folder) not in found.text
    monkeypatch.setattr(LandmarkCache, "save", save)
    next(server.folder.glob("*/damaged/1/windows.safetensors")).write_text("{")
    with pytest.raises(openai.InternalServerError, match="document damaged cannot be read") as error:
        server.ask("Where? ", extra_body={"document": "damaged"})
    assert error.value.status_code == 500
    assert str(server.folder) not in str(error.value)
    assert json.loads(http.delete("/documents/damaged").text)["deleted"]


@pytest.mark.parametrize("path", ["completions", "documents"])
def test_nothing_is_computed_for_a_client_that_has_left(model, tokenizer, tmp_path, monkeypatch, path):
    """Neither an answer that is not streamed, nor the reading of a text."""
    calls, forward = [], type(model).forward

    def slow(self, *given, **named):
        calls.append(1)
        time.sleep(0.05)
        return forward(self, *given, **named)

    monkeypatch.setattr(type(model), "forward", slow)
    asked = {"prompt": "A", "max_tokens": 1000, "temperature": 0}  # a drawn token might end it
    sent = {
        "completions": ("POST", "/completions", {"json": asked}),
        "documents": ("PUT", "/documents/long", {"content": b"A heron. " * 300}),
    }
    method, place, content = sent[path]
    with Server(model, tokenizer, tmp_path, tokens=100_000) as running:
        with pytest.raises(httpx.ReadTimeout):
            running.http().request(method, place, timeout=httpx.Timeout(60, read=0.5), **content)
        until, before = time.monotonic() + 30, 0
        while len(calls) != before:
            assert time.monotonic() < until, "it goes on"
            before = len(calls)
            time.sleep(0.5)
        assert running.ask("Again. ").choices
        assert len(running.http().get("/documents").json()["data"]) == 0
