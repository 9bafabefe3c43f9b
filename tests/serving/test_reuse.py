"""What was read once is not read again, the ids are the tokenizer's, and what existing clients send is answered."""

import httpx
import openai
import pytest
import torch

from landmark.huggingface import wrap
from landmark.serving.answering import Sampling
from tests.huggingface.conftest import FREE, SETTINGS, make_model
from tests.serving.conftest import KEYS, Server
from tests.utils.test_chats import CHATML, chat_tokenizer, said, user

pytestmark = pytest.mark.timeout(900)


def make(beginning=None, template=CHATML, **settings):
    tokenizer, model = chat_tokenizer(template, beginning), make_model("gemma3")
    model.resize_token_embeddings(260, mean_resizing=False)
    return wrap(model, tokenizer, **{**SETTINGS, **settings}), tokenizer


@pytest.fixture
def server(tmp_path):
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


def test_a_client_that_sends_its_history_again_has_its_new_tokens_read_alone(server):
    chat, read = [user("A heron waits by the lake. " * 3)], 0
    new, whole = turn(server, chat)
    assert new == whole
    for text in ("Where?", "How long?"):
        read = whole + 4
        chat.append(user(text))
        new, whole = turn(server, chat)
        assert new == whole - read + 1, "the last token of an answer is read with the next turn"
    chat[2] = user("Why? ")
    del chat[3:]
    new, whole = turn(server, chat)
    assert new < 60, "an edited message forks where the chat went on"
    other = [user("A heron waits by the lake. " * 3 + "Who?")]
    assert turn(server, other)[0] <= turn(server, [user("x")])[1] + 40, "a document in a first message is read once"
    body = {"messages": [user("A heron waits by the lake. " * 3)], "max_tokens": 1}
    of_another = server.http(KEYS[1]).post("/chat/completions", json=body)
    assert of_another.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


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


def test_health_schemas_and_preflights_need_no_key(server):
    with httpx.Client(base_url=server.url.removesuffix("/v1")) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/docs").status_code == 200
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


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {2, 3}),
        ({"min_p": 0.5}, {3}),
        ({"top_p": 0.5}, {3}),
        ({"temperature": 0.0}, {3}),
        ({"temperature": 0.0, "repetition_penalty": 100.0}, {2}),
    ],
)
def test_tokens_are_drawn_as_the_settings_say(changes, drawn):
    sampling, scores = Sampling(1, **changes), torch.tensor([[-40.0, 0.5, 1.0, 2.0]])
    scores = sampling.warpers()(torch.tensor([[3]]), scores)
    possible = set(scores[0].isfinite().nonzero().flatten().tolist()) if sampling.draws else {int(scores.argmax())}
    assert possible == drawn
