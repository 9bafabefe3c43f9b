"""/v1/responses, asked by the real client of OpenAI: the answers of chats in another form."""

import json
from functools import partial

import pytest

from landmark.reading.answer import Answer
from landmark.reading.chats import Chats
from landmark.reading.serving.openai_responses import Asking, Responded
from landmark.reading.serving.responses import Response
from landmark.utils.errors import UserError
from tests.reading.serving.conftest import greedily
from tests.reading.test_chats import CHATML, chat_tokenizer

pytestmark = pytest.mark.timeout(900)

HEAD = {"id": "chatcmpl-1", "created": 0, "model": "landmark"}
ASKED = {"model": "landmark", "temperature": 0, "max_output_tokens": 4}


def kinds_of(*items):
    """The types of a stream's events, without those of its pieces of text, and without its last one."""
    of_item = "output_item.added content_part.added {}_text.done content_part.done output_item.done"
    return ["created", "in_progress", *(kind for item in items for kind in of_item.format(item).split())]


def test_a_response_is_the_chats_answer_whole_and_streamed(server, model, tokenizer):
    create, told = server.client().responses.create, "system: Be brief.\nuser: Who waits?\nassistant:"
    first = create(**ASKED, instructions="Be brief.", input="Who waits?")
    assert first.output_text == greedily(model, tokenizer, told)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(told), 4)
    question = {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}
    talk = [{"role": "user", "content": "Who waits?"}, *first.output, question]
    *events, last = create(**ASKED, instructions="Be brief.", input=talk, stream=True)
    told += f"{'' if first.output_text[:1].isspace() else ' '}{first.output_text}\nuser: Where?\nassistant:"
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == greedily(model, tokenizer, told)
    assert [each.sequence_number for each in [*events, last]] == list(range(len(events) + 1))
    assert last.response.usage.input_tokens_details.cached_tokens > 0
    kinds = [each.type.removeprefix("response.") for each in events if "delta" not in each.type]
    assert kinds == kinds_of("output")
    assert events[-1].item == last.response.output[0]


def test_reasoning_is_an_item_of_its_own_before_the_text():
    chats, reasoning, text = Chats(chat_tokenizer(CHATML)), "Birds wait.", "A heron."
    answer, ids = (
        Answer(chats.decode, (), partial(chats.parts, opened=True)),
        chats.text_ids(f"{reasoning}</think>{text}"),
    )
    response = Response((answer.add(id) for id in [*ids, None]), answer, [9, 0], HEAD, True)
    events = [json.loads(each.partition("data: ")[2]) for each in whole(response).split("\n\n")[:-1]]
    done, deltas = events[-1]["response"], ["", ""]
    for each in events:
        if "delta" in each:
            deltas[each["output_index"]] += each["delta"]
    assert [each["content"][0]["text"] for each in done["output"]] == deltas == [reasoning, text]
    assert [each["item"] for each in events if each["type"].endswith("item.done")] == done["output"]
    kinds = [each["type"].removeprefix("response.") for each in events if "delta" not in each]
    assert kinds == [*kinds_of("reasoning", "output"), "completed"]
    counts = {"reasoning_tokens": len(f"{reasoning}</think>")}
    assert (done["usage"]["output_tokens"], done["usage"]["output_tokens_details"]) == (len(ids), counts)


def whole(response):
    return "".join(Responded(response, Asking.model_validate({"input": "Who?"})).events(True))


def test_an_error_in_a_stream_is_its_last_event():
    def fail():
        yield from ()
        raise UserError("no room")

    told = whole(Response(fail(), Answer(str), [9, 0], HEAD, True)).partition("event: error\ndata: ")[2]
    assert json.loads(told) == {
        "type": "error",
        "sequence_number": 2,
        "code": "server_error",
        "message": "no room",
        "param": None,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: is not supported here"),
        ({"text": {"format": {"type": "json_object"}}}, "text: is not supported here"),
        ({"tools": [{"type": "web_search"}]}, "tools: is not supported here"),
        ({"input": []}, "input: "),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.role: "),
        ({"max_output_tokens": 0}, "max_tokens: 0 is less than 1"),
        ({"document": "none", "input": "Who?"}, "document none: there is none"),
    ],
)
def test_what_would_change_an_answer_is_refused(http, given, said):
    found = http.post("/responses", json={"input": "Who?", **given})
    assert 400 <= found.status_code < 500
    assert said in found.json()["error"]["message"]
