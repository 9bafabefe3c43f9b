"""/v1/responses, asked by the real client of OpenAI: the answers of chats in another form."""

import itertools
import json
import re
from functools import partial

import pytest

from landmark.answering.answer import Answer
from landmark.answering.chats import Chats
from landmark.serving.openai_responses import Asking, Responded
from landmark.serving.responses import Response
from landmark.utils.errors import UserError
from tests.answering.test_chats import CHATML, chat_tokenizer
from tests.serving.conftest import greedily

pytestmark = pytest.mark.timeout(900)

HEAD = {"id": "chatcmpl-1", "created": 0, "model": "landmark"}
ASKING = Asking.model_validate({"input": "Who?"})
ASKED = {"model": "landmark", "temperature": 0, "max_output_tokens": 4}


def test_a_response_is_the_chats_answer_whole_and_streamed(server, model, tokenizer):
    create = server.client().responses.create
    first = create(**ASKED, instructions="Be brief.", input="Who waits?")
    prompt = "system: Be brief.\nuser: Who waits?\nassistant:"
    assert first.output_text == greedily(model, tokenizer, prompt)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(prompt), 4)
    question = {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}
    talk = [{"role": "user", "content": "Who waits?"}, *first.output, question]
    *events, last = create(**ASKED, instructions="Be brief.", input=talk, stream=True)
    told = [f"{prompt}{'' if first.output_text[:1].isspace() else ' '}{first.output_text}\nuser: Where?\nassistant:"]
    assert last.response.output_text == greedily(model, tokenizer, told[0])
    assert (
        "".join(each.delta for each in events if each.type == "response.output_text.delta") == last.response.output_text
    )
    assert [each.sequence_number for each in [*events, last]] == list(range(len(events) + 1))
    assert last.response.usage.input_tokens_details.cached_tokens > 0
    kinds = [each.type.removeprefix("response.") for each in events if "delta" not in each.type]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *opened, "output_text.done", *closed]
    assert events[-1].item == last.response.output[0]


def test_reasoning_is_an_item_of_its_own_before_the_text():
    chats = Chats(chat_tokenizer(CHATML))
    answer = Answer(chats.decode, (), partial(chats.parts, opened=True))
    ids = chats.text_ids("Birds wait.</think>A heron.")
    response = Response((answer.add(id) for id in [*ids, None]), answer, [9, 0], HEAD, True)
    events = [
        json.loads(each) for each in re.findall("^data: (.*)$", "".join(Responded(response, ASKING).events(True)), re.M)
    ]
    kinds = [kind for kind, _ in itertools.groupby(each["type"].removeprefix("response.") for each in events)]
    parts = [
        [
            "output_item.added",
            "content_part.added",
            f"{kind}_text.delta",
            f"{kind}_text.done",
            "content_part.done",
            "output_item.done",
        ]
        for kind in ("reasoning", "output")
    ]
    assert kinds == ["created", "in_progress", *parts[0], *parts[1], "completed"]
    deltas = {
        n: "".join(each["delta"] for each in events if "delta" in each and each["output_index"] == n) for n in (0, 1)
    }
    output = events[-1]["response"]["output"]
    assert [each["content"][0]["text"] for each in output] == list(deltas.values()) == ["Birds wait.", "A heron."]
    assert [each["item"] for each in events if each["type"].endswith("item.done")] == output
    counts = events[-1]["response"]["usage"]
    assert (counts["output_tokens"], counts["output_tokens_details"]["reasoning_tokens"]) == (
        len(ids),
        len("Birds wait.</think>"),
    )


def test_an_error_in_a_stream_is_its_last_event():
    def fail():
        yield from ()
        raise UserError("no room")

    response = Response(fail(), Answer(str), [9, 0], HEAD, True)
    *_, last = Responded(response, ASKING).events(True)
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2]) == {
        **{"type": "error", "sequence_number": 2, "code": "server_error", "message": "no room", "param": None}
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
