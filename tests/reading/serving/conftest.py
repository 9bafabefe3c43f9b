"""A server over a real port, its clients, and the model's own answers."""

import threading
import time

import httpx
import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
pytest.importorskip("fastapi", reason="the optional extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the optional extra `serve` is not installed")
pytest.importorskip("openai", reason="the client of OpenAI is not installed")

import openai
import uvicorn

from landmark.models.huggingface.chunked_forward import ChunkedForward
from landmark.reading.serving import app, progress
from landmark.reading.serving.app import make_app
from landmark.reading.serving.memories import ServerSettings
from tests.forked import free_port
from tests.models.huggingface.conftest import make_tokenizer, wrapped_model

KEYS = "first-key", "second-key"
LIMITS = {"body": 4000, "file": 8000, "documents": 40, "disk": 10 << 20, "tokens": 50}


@pytest.fixture(scope="session")
def model():
    return wrapped_model("gemma3", local=16)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


class Server:
    """uvicorn in a thread, on a free port."""

    def __init__(self, model, tokenizer, folder, **limits):
        settings = ServerSettings(folder, KEYS, **{**LIMITS, **limits})
        port = free_port()
        config = uvicorn.Config(make_app(model, tokenizer, settings), port=port, log_level="error")
        self.server, self.folder = uvicorn.Server(config), folder
        self.url = f"http://127.0.0.1:{port}/v1"
        self.clients = {}
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)

    def http(self, key=KEYS[0]):
        return httpx.Client(headers={"Authorization": f"Bearer {key}"}, base_url=self.url, timeout=60)

    def client(self, key=KEYS[0]):
        if key not in self.clients:
            self.clients[key] = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=800)
        return self.clients[key]

    def ask(self, prompt, key=KEYS[0], **given):
        given = {"temperature": 0, **given}
        return self.client(key).completions.create(model="landmark", prompt=prompt, max_tokens=4, **given)


@pytest.fixture(scope="module")
def server(model, tokenizer, tmp_path_factory):
    with Server(model, tokenizer, tmp_path_factory.mktemp("memories")) as running:
        yield running


@pytest.fixture
def http(server):
    return server.http()


@pytest.fixture
def slow(model, monkeypatch):
    """A model that takes 0.1 s for each part of a text."""
    pass_on = ChunkedForward._pass

    def wait(*given):
        time.sleep(0.1)
        return pass_on(*given)

    monkeypatch.setattr(ChunkedForward, "_pass", wait)
    monkeypatch.setattr(app, "SILENCE", 0.25)
    monkeypatch.setattr(progress, "SILENCE", 0.25)
    return model


@torch.no_grad()
def greedily(model, tokenizer, prompt, document=None):
    """The model's own answer to a prompt, after a document that is read before."""
    ids, memory = tokenizer(prompt, return_tensors="pt").input_ids, model.new_memory()
    if document is not None:
        before = tokenizer(document, return_tensors="pt").input_ids
        model(before, past_key_values=memory, logits_to_keep=1)
        ids = torch.cat([before, ids], 1)
    found = model.generate(ids, past_key_values=memory, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
