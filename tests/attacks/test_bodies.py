"""200 requests to a server, with bodies and methods drawn anew: each gets an answer, or one line that says why not."""

import json
import random

import httpx
import pytest

from tests.attacks.test_generated import COUNT, SEED, ending
from tests.reading.serving.conftest import KEYS, Server, model, tokenizer  # noqa: F401 (fixtures)

TEXTS = (
    "a crow",
    "",
    "\x00",
    "\ud800",
    "é" * 300,
    "<landmark>",
    "<eot>",
    "{{ 7 * 7 }}",
    "${x}",
    "../../etc/passwd",
    "\x1b[2J",
)
NUMBERS = (0, -1, 1, 2, 1e-300, 1e300, 10**30, -0.0, 0.5, float("nan"), float("inf"), 2**63, True)
VALUES = (
    *TEXTS,
    *NUMBERS,
    None,
    [],
    {},
    [None],
    [[1]],
    ["a", 3],
    {"a": {"b": []}},
    [{"role": "user"}],
    [3, 5, 9],
    [True],
)
NAMES = """model max_tokens max_completion_tokens temperature top_p top_k min_p repetition_penalty stop seed stream
    stream_options document documents n logprobs tools echo input chat_template_kwargs continue_final_message prompt
    messages response_format sources from_sources documents_read instructions"""
ASKED = "chat/completions", "completions", "responses"
PATHS = (*ASKED, "documents/a", "documents", "models", "models/landmark", "nothing")
WHOLE = {
    "messages": [{"role": "user", "content": "Who sees it?"}],
    "prompt": "the boat",
    "input": "the boat",
    "max_tokens": 3,
}


@pytest.fixture(scope="module")
def attacked(model, tokenizer, tmp_path_factory):  # noqa: F811
    with Server(model, tokenizer, tmp_path_factory.mktemp("attacked")) as running:
        yield running


def drawn_body(draw: random.Random) -> bytes:
    """A whole body with a few fields that are others, at any depth; sometimes no JSON, or not all of it."""
    body = dict(WHOLE)
    for _ in range(draw.randrange(4)):
        body[draw.choice(NAMES.split())] = draw.choice(VALUES)
    if draw.random() < 0.3:
        message = {draw.choice(("role", "content", "name", "tool_calls")): draw.choice(VALUES)}
        body["messages"] = [{"role": draw.choice(("user", "assistant", "system", "x")), "content": "a"} | message]
    content = json.dumps(body, ensure_ascii=draw.random() < 0.9).encode("utf-8", "surrogatepass")
    return draw.choice([content] * 9 + [content[: draw.randrange(len(content))], b"[" * 50_000, b"", b"\xff\xfe", b"3"])


def test_bad_bodies(attacked):
    draw = random.Random(SEED)
    with httpx.Client(base_url=attacked.url, timeout=60) as client:
        for _ in range(COUNT):
            method, path = draw.choice((*["POST"] * 8, "PUT", "GET", "DELETE")), draw.choice(PATHS)
            path = draw.choice(ASKED) if method == "POST" else path
            name = draw.choice((*["Bearer " + KEYS[0]] * 9, "Bearer", "Bearer x", ""))
            content, case = drawn_body(draw), f"{method} {path} {name}; seed {SEED}"
            headers = {"Authorization": name, "Content-Type": draw.choice(("application/json", "text/plain", "x"))}
            with ending(case):
                got = client.request(method, path, content=content, headers=headers)
            case = f"{case}: {content[:300]} -> {got.status_code} {got.text[:300]}"
            assert got.status_code < 500, case
            assert "Traceback" not in got.text, case
            assert str(attacked.folder) not in got.text, case
            if got.status_code >= 400:
                error = got.json()["error"]
                assert error["message"], case
                assert "\n" not in error["message"], case
    with attacked.http() as client:  # it still answers
        assert client.post("completions", json={"prompt": "the boat", "max_tokens": 3}).status_code == 200
