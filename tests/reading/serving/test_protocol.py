"""What clients of OpenAI's protocol may count on: fields, errors, lists, and that nothing is read twice."""

import errno
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch

from landmark.models.huggingface import LandmarkCache, wrap
from landmark.models.huggingface.chunked_forward import ChunkedForward
from landmark.reading import templates
from landmark.reading.serving import memories
from landmark.reading.serving.openai_responses import REFUSED_TOO, Asking
from landmark.reading.serving.requests import IGNORED, REFUSED, Chat, Completion
from landmark.reading.support import SAID
from tests.documents.files import pdf
from tests.models.huggingface.conftest import FREE, SETTINGS, make_model
from tests.reading.serving.conftest import KEYS, Server
from tests.reading.test_chats import CHATML, chat_tokenizer, said, user

pytestmark = pytest.mark.timeout(900)

HALVES = b'"stop": ["\\udfff"]', b'"model": "\\ud800"', b'"document": "\\ud800"', b'"prompt": "a\\ud800b"'
CHAT = {"model": "landmark", "messages": [{"role": "user", "content": "Who waits?"}], "max_tokens": 4}


BODIES = {"completions": ("prompt", Completion, {}), "chat/completions": ("messages", Chat, {})}
BODIES["responses"] = "input", Asking, REFUSED_TOO


@pytest.mark.parametrize("path", BODIES)
def test_each_field_of_the_pages_table_is_used_refused_or_ignored_with_a_warning(http, caplog, path):
    """Also where it is null, or has a value that is false and changes the answer."""
    name, kind, refused = BODIES[path]
    plain = {name: "Who waits?" if name == "prompt" else CHAT["messages"], "temperature": 0}
    plain["max_output_tokens" if name == "input" else "max_tokens"] = 3

    def answer(found):
        assert found.status_code == 200, found.text
        return [
            *found.json().get("choices", ()),
            *(each["content"][0]["text"] for each in found.json().get("output", ())),
        ]

    page = {kind: set[str]() for kind in ("used", "refused", "ignored")}
    for line in Path("docs/python.md").read_text().split("### Fields of a request")[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (kind_of_field := cells[0].partition(",")[0]) in page:
            names = f"{cells[1]} {cells[2 + [*BODIES].index(path)]}"
            page[kind_of_field] = page[kind_of_field] | {*re.findall("`(.*?)`", names)}
    fields = {each.alias or name for name, each in kind.model_fields.items()}
    assert page["used"] == fields | ({"instructions", "max_tokens"} if name == "input" else set())
    assert page["refused"] == REFUSED.keys() | refused.keys()
    assert page["ignored"] == IGNORED
    expected, neutral = answer(http.post(path, json=plain)), {name: x[0] for name, x in REFUSED.items() if x}
    null = dict.fromkeys(page["refused"] | page["ignored"])
    neutral |= {name: x[0] for name, x in refused.items() if x}
    for given in (null, neutral, null | neutral):
        found = http.post(path, json=plain | given)
        assert answer(found) == expected
        assert "warnings" not in found.json()
    for each, values in (REFUSED | refused).items():
        for value in (0, False, "", 7, "high", "false"):
            if not any(type(value) is type(x) and value == x for x in values):
                found = http.post(path, json=plain | {each: value})
                assert found.status_code == 400, (each, value)
                assert f"{each}: {CANNOT}" in found.json()["error"]["message"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = http.post(path, json=plain | dict.fromkeys(IGNORED, "x") | {f"mirostat_{name}": 0})
            assert answer(found) == expected
    said = found.json()["warnings"]
    assert said == [f"{each}: has no effect here" for each in sorted((*IGNORED, f"mirostat_{name}"))]
    assert caplog.text.count(f"the field mirostat_{name} of a request is not known here") == 1


def test_messages_of_agents_are_read(http):
    called = {"type": "function", "function": {"name": "look"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [called]},
        {"role": "tool", "content": "A heron.", "tool_call_id": "1", "name": "look"},
        {"role": "user", "content": "So?", "name": None},
    ]
    found = http.post("/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert found.status_code == 200, found.text
    lost = "messages.1.tool_calls", "messages.2.name", "messages.2.tool_call_id"
    assert found.json()["warnings"] == [f"{each}: the model's template leaves it out" for each in lost]


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
        *((*text(max_tokens=count), "max_tokens: Input should be a valid integer") for count in (1e9, True)),
        (*text(seed=2**70), "seed"),
        (*text(sources=3), "sources are passages of a document: name one"),
        (*text(from_sources=True), "sources are passages of a document: name one"),
        (*text(sources=21, document="book"), "sources: Input should be less than or equal to 20"),
        (*text(stream_options={"include_usage": True}), "stream_options is for a streamed answer"),
        (*text(logit_bias={"5": 1}), f"logit_bias: {CANNOT}"),
        (*talk(tools=[{"type": "function"}]), f"tools: {CANNOT}"),
        *(
            (*talk(messages=[{"role": "user", **each}]), "messages.0: content: the message has no text")
            for each in (
                {},
                {"content": ""},
                {"content": []},
                {"contents": "Who?"},
                {"content": None},
                {"content": " "},
            )
        ),
        (*talk(messages=[{"role": "assistant"}]), "messages.0: content: the message has no text"),
        (*talk(messages=[{"role": "narrator", "content": "Hello"}]), "messages.0.role"),
        (*talk(modalities=["audio"]), f"modalities: {CANNOT}"),
        (*text([True, False]), "prompt"),
        (*text(max_tokens=1e9), "max_tokens: Input should be a valid integer"),
        *(
            (*text(**{name: value}), name)
            for name, values in {
                "repetition_penalty": (1e-300, 0, 101, "1"),
                "temperature": (2.1, True, 1e400),
                "top_p": (0, 1.5),
                "min_p": (1, -0.1),
                "top_k": (-2, 1.5, 2**63),
            }.items()
            for value in values
        ),
        *((*talk(chat_template_kwargs={each: 1}), f"no setting {each}") for each in ("chat_template", "messages")),
        (*talk(continue_final_message=True), "the last message is no assistant's"),
        (*talk(add_generation_prompt=False), "add_generation_prompt: must be true"),
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

    def broken(self, folder, *_, **__):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(LandmarkCache, "save", broken)
        found = http.put("/documents/new", content=b"Herons wait.")
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert str(server.folder) not in found.text
    next(server.folder.glob("*/damaged/1/windows.safetensors")).write_text("{")
    with pytest.raises(openai.InternalServerError, match="document damaged cannot be read") as error:
        server.ask("Where? ", extra_body={"document": "damaged"})
    assert error.value.status_code == 500
    assert str(server.folder) not in str(error.value)
    assert json.loads(http.delete("/documents/damaged").text)["deleted"]


def test_a_part_of_a_text_has_a_beginning_and_an_end_and_a_file_goes_to_the_disk(server, http, monkeypatch):
    """It waits there for its turn to be opened, not in memory."""
    http.put("/documents/part", content=b"Herons wait.")
    assert http.get("/documents/part/text?start=7&end=11").json()["text"] == "wait"
    for bounds in ("end=-1", "start=-1"):
        assert http.get(f"/documents/part/text?{bounds}").status_code == 400

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(server.folder))

    monkeypatch.setattr(memories, "TemporaryFile", full)
    found = http.put("/documents/large", content=b"Herons wait.")
    assert (found.status_code, found.json()["error"]["message"]) == (
        507,
        "the file: the server's disk is full; delete some documents",
    )


@pytest.mark.parametrize("path", ["completions", "documents"])
def test_nothing_is_computed_for_a_client_that_has_left(model, tokenizer, tmp_path, monkeypatch, path):
    """Neither an answer that is not streamed, nor the reading of a text."""
    calls, pass_on = [], ChunkedForward._pass

    def slow(*given):
        calls.append(1)
        time.sleep(0.05)
        return pass_on(*given)

    monkeypatch.setattr(ChunkedForward, "_pass", slow)
    asked = {"prompt": "A", "max_tokens": 1000, "temperature": 0}  # a drawn token might end it
    sent = "POST", "/completions", {"json": asked}
    method, place, content = (
        sent if path == "completions" else ("PUT", "/documents/long", {"content": b"A heron. " * 300})
    )
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


# ---- what was read once is not read again; the ids are the tokenizer's


def make(beginning=None, template=CHATML, **settings):
    tokenizer, model = chat_tokenizer(template, beginning), make_model("gemma3")
    model.resize_token_embeddings(260, mean_resizing=False)
    return wrap(model, tokenizer, **{**SETTINGS, **settings}), tokenizer


@pytest.fixture
def chats(tmp_path):
    model, tokenizer = make()
    letters = tokenizer("abcdefgh")["input_ids"]  # so that an answer has the same ids when it is sent back
    with torch.no_grad():
        model.get_output_embeddings().weight[letters] *= 100
    with Server(model, tokenizer, tmp_path, tokens=4) as running:
        yield running


def turn(server, chat, **given):
    """Asks, adds the answer to the chat, and returns the tokens that were new and those of the prompt."""
    found = server.http().post("/chat/completions", json={"messages": chat, "temperature": 0, **given}).json()
    chat.append(said(found["choices"][0]["message"]["content"]))
    usage = found["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("settings", [{}, FREE])
def test_a_completion_is_what_the_model_generates_of_the_tokenizers_ids(settings, tmp_path):
    """With the ids that begin a text, and names of special tokens as the tokenizer takes them."""
    model, tokenizer = make("<eot>", **settings)
    with Server(model, tokenizer, tmp_path) as running:
        for prompt in ("The capital of France is", "<|im_start|>user\nWho waits?<|im_end|>\n"):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            assert ids[0, 0] == tokenizer.convert_tokens_to_ids("<eot>")
            expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
            found = running.ask(prompt)
            assert found.choices[0].text == tokenizer.decode(expected)
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (ids.shape[1], len(expected))
            assert running.ask(ids[0].tolist()).choices == found.choices
        if model.landmarks.token is not None:
            assert running.ask("a <landmark>").usage.prompt_tokens == len("a <landmark>") + 1
        but = ", without 259" if model.landmarks.token else "$"
        with pytest.raises(openai.BadRequestError, match=f"999 is no id of a text: ids are from 0 to 259{but}"):
            running.ask([999])


def test_a_client_that_sends_its_history_again_has_its_new_tokens_read_alone(chats):
    chat, read = [user("A heron waits by the lake. " * 3)], 0
    new, whole = turn(chats, chat)
    assert new == whole
    for text in ("Where?", "How long?"):
        read = whole + 4
        chat.append(user(text))
        new, whole = turn(chats, chat)
        assert new == whole - read + 1, "the last token of an answer is read with the next turn"
    chat[2] = user("Why? ")
    del chat[3:]
    new, whole = turn(chats, chat)
    assert new < 60, "an edited message forks where the chat went on"
    other = [user("A heron waits by the lake. " * 3 + "Who?")]
    assert turn(chats, other)[0] <= turn(chats, [user("x")])[1] + 40, "a document in a first message is read once"
    body = {"messages": [user("A heron waits by the lake. " * 3)], "max_tokens": 1}
    of_another = chats.http(KEYS[1]).post("/chat/completions", json=body)
    assert of_another.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_last_message_is_gone_on_with(chats):
    """With vLLM's fields; its ids are those of the message that is sent."""
    begun = [user("Who?"), said("ab")]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0}
    found = chats.http().post("/chat/completions", json={"messages": begun, **goes_on}).json()
    whole = chats.ask(
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nab"
    )
    assert found["choices"][0]["message"]["content"] == whole.choices[0].text
    assert found["usage"]["prompt_tokens"] == whole.usage.prompt_tokens


def test_a_template_that_loops_ends_with_a_refusal_and_others_are_answered_meanwhile(tmp_path, monkeypatch):
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    model, tokenizer = make(template=endless)
    monkeypatch.setattr(templates, "SECONDS", 1.5)
    with Server(model, tokenizer, tmp_path) as running, ThreadPoolExecutor(1) as pool:
        refused = pool.submit(running.http().post, "/chat/completions", json=CHAT)
        assert running.ask("A heron").choices
        assert not refused.done()
        found = refused.result()
    assert found.status_code == 400
    assert "was not done with them in 1.5 s" in found.json()["error"]["message"]


def test_reasoning_is_apart_from_the_answer(tmp_path):
    model, tokenizer = make()
    with Server(model, tokenizer, tmp_path) as running:
        chat, thinks = running.client().chat.completions, {"chat_template_kwargs": {"enable_thinking": True}}
        asked = {"model": "landmark", "messages": [user("Who?")], "max_tokens": 9, "temperature": 0}
        plain, thought = chat.create(**asked), chat.create(**asked, extra_body=thinks)
        assert thought.usage.prompt_tokens == plain.usage.prompt_tokens + len("<think>\n")
        assert thought.choices[0].message.content == ""
        assert thought.choices[0].message.reasoning_content
        assert not hasattr(plain.choices[0].message, "reasoning_content")
        parts = [part.choices[0].delta for part in chat.create(**asked, extra_body=thinks, stream=True)]
        streamed = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
        assert streamed == thought.choices[0].message.reasoning_content


def test_an_answer_has_its_sources_beside_it_and_in_the_last_event(tmp_path):
    """Also after a restart, and of a PDF. A model with landmarks finds none, and says so before it answers."""
    pages = "Herons wait here.", "The zebra sleeps in Quito.", "Nobody else is there."
    model, tokenizer = make(block_size=24, landmarks="none", memory={"k": 3, "window": 7})
    asked = {"document": "book", "messages": [user("Who? "), said("ab"), user("Where sleeps the zebra?")], "sources": 2}
    asked |= {"max_tokens": 4, "temperature": 0}
    with Server(model, tokenizer, tmp_path / "kept") as running:
        put = running.http().put("/documents/book", content=pdf(*pages, "▣")).json()
        assert put["warnings"] == running.http().get("/documents").json()["data"][0]["warnings"]
    with Server(model, tokenizer, tmp_path / "kept") as running, running.http() as http:
        plain = http.post("/chat/completions", json={**asked, "sources": 0}).json()["choices"][0]
        whole = http.post("/chat/completions", json=asked).json()["choices"][0]
        streaming = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        events = http.post("/chat/completions", json=streaming).text.removesuffix("\n\n").split("\n\n")
        text = http.post(
            "/completions", json={"document": "book", "prompt": "The zebra sleeps in", "sources": 1}
        ).json()
        client = running.client().chat.completions
        of_client = client.create(model="", messages=asked["messages"], extra_body={"document": "book", "sources": 2})
        alone = http.post("/chat/completions", json={**asked, "sources": 1, "from_sources": True}).json()["choices"][0]
        http.put("/documents/alone", content="".join(f"{page}\n\n" for page in pages[:2]).encode())
        about = http.post("/chat/completions", json={**asked, "document": "alone", "sources": 0}).json()["choices"][0]
        warned = http.post("/chat/completions", json=asked).json()["warnings"]
    assert put["warnings"] == warned == ["book: page 4 has no text, but pictures: ocrmypdf adds the text of scans"]
    sources = whole.pop("sources")
    assert whole == plain
    assert events.pop() == "data: [DONE]"
    *_, finish, usage, last = (json.loads(event.removeprefix("data: ")) for event in events)
    assert last["choices"] == [{"index": 0, "finish_reason": None, "logprobs": None, "delta": {}, "sources": sources}]
    assert (finish["choices"][0]["finish_reason"], usage["choices"]) == ("length", [])
    read = "\n\n".join(pages)
    assert (sources[0]["text"], sources[0]["place"], sources[0]["document"]) == (pages[1], "page 2", "book")
    assert [read[each["start"] : each["end"]] for each in sources] == [each["text"] for each in sources]
    assert 1 >= sum(each["share"] for each in sources) >= sources[0]["share"] > 0
    assert text["choices"][0]["sources"][0]["text"] == pages[1]
    assert of_client.choices[0].sources == sources
    assert [(each["text"], each["kind"]) for each in alone.pop("sources")] == [
        (pages[1], "passage"),
        (pages[0], "head"),
    ]
    assert alone.pop("support")["level"] in SAID
    assert alone == about
    with Server(make()[0], tokenizer, tmp_path / "other") as running, running.http() as http:
        http.put("/documents/book", content=b"Herons wait.")
        refused = http.post("/chat/completions", json=asked)
        assert refused.status_code == 400
        assert "reads without landmarks" in refused.json()["error"]["message"]


def test_health_schemas_and_preflights_need_no_key(server):
    with httpx.Client(base_url=server.url.removesuffix("/v1")) as client:
        assert client.get("/health").json() == {"status": "ok"}
        docs = client.get("/docs")
        assert docs.headers["content-security-policy"] == client.get("/").headers["content-security-policy"]
        assert "<script" not in docs.text
        assert all(name in docs.text for name in ("POST /v1/responses", "repetition_penalty", "documents_read"))
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        assert {"document", "min_p"} <= set(schemas["Chat"]["properties"])
        asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization,content-type"
        allowed = client.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "*"
        assert client.get("/v1/models").status_code == 401
    client = server.client()
    assert [each.id for each in client.models.list()] == [client.models.retrieve("landmark").id] == ["landmark"]
    with pytest.raises(openai.NotFoundError, match="there is no model gpt/4: this server has landmark"):
        client.models.retrieve("gpt/4")
