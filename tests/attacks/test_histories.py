"""Requests in sequences drawn anew: no answer depends on the requests before it. Each one is compared with the model's
own, for which memories that have read nothing before read the texts: its logits, its tokens and its passages.
A failure names the seed: ATTACK_SEED=… draws the same again, ATTACK_HISTORIES=… draws more sequences."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
pytest.importorskip("fastapi", reason="the optional extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the optional extra `serve` is not installed")
pytest.importorskip("openai", reason="the client of OpenAI is not installed")

from landmark.cli import chat, question
from landmark.documents import Document, placed
from landmark.experiment.config import to_config
from landmark.models.huggingface import joined, wrap
from landmark.models.huggingface.landmark_cache import IDS, saved_windows
from landmark.models.huggingface.tiny import doubled
from landmark.reading import answering
from landmark.reading import session as sessions
from landmark.reading.answering import Answering, Gone
from landmark.reading.serving.memories import ServerSettings
from landmark.reading.serving.requests import Chat, Completion
from landmark.reading.serving.service import Progress, Service
from landmark.reading.sources import NULL, Found, find
from tests.attacks.test_generated import SEED, ending
from tests.configurations import compose_conf
from tests.models.huggingface.conftest import make_model, make_tokenizer
from tests.models.huggingface.test_kinds import model_of_kind
from tests.reading.serving.conftest import KEYS, LIMITS, Server

HISTORIES = int(os.environ.get("ATTACK_HISTORIES", 8))
BLOCK, TOKENS, STEPS = 5, 6, 9
MODELS = [("llama", 0), ("llama", 37), ("gemma3", 0), ("gemma3", 37), ("qwen3_next", 0)]
CLOSE = {"rtol": 0, "atol": 1e-9}
BIRDS = "A heron waits. Two owls sleep by the old mill. Nobody saw the crane in June. It rains. Swans come late. "
TEXTS = [BIRDS[:length] for length in (1, 3, 40, 43, 60, 75)]
TEXTS += [f"{BIRDS[:40]}Ten geese. "[:50], f"{BIRDS[:23]}Where? Here it is. "[:40], f"B{BIRDS[1:40]}", BIRDS[15:72]]
QUESTIONS = "?", "Who", "Who?", "Where do the owls sleep? ", "Where do the owls wait? ", f"{BIRDS[:20]}And? "


@pytest.fixture(scope="module", params=MODELS, ids=lambda each: f"{each[0]}-dense{each[1]}")
def model(request):
    """In float64, so that a difference is no rounding."""
    family, dense = request.param
    with doubled():
        own = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        made = model_of_kind(family, **own) if family == "qwen3_next" else make_model(family).double()
        if family == "qwen3_next":
            torch.manual_seed(0)
            made.resize_token_embeddings(257, mean_resizing=False)
        memory = {"k": 3, "window": 7, "dense": dense}
        yield wrap(made, make_tokenizer(), landmarks="none", block_size=BLOCK, local=4 * BLOCK, memory=memory)


@pytest.fixture
def recorded(monkeypatch):
    """The ids and the logits of each prompt that is answered."""
    found, now, steps, follow = [], threading.local(), Answering.steps, answering.lookup_loop

    def noted(self, texts, cache, *given):
        now.ids = tuple(texts[0])
        return steps(self, texts, cache, *given)

    def followed(logits, *given):
        found.append((now.ids, logits[0]))
        return follow(logits, *given)

    monkeypatch.setattr(Answering, "steps", noted)
    monkeypatch.setattr(answering, "lookup_loop", followed)
    return found


class Fresh:
    """The model's own answers, each from a memory of its own."""

    def __init__(self, model):
        self.model, self.tokenizer, self._found = model, make_tokenizer(), {}
        self.answering = Answering(model, self.tokenizer)

    def ids(self, text):
        return self.tokenizer(text)["input_ids"]

    @torch.no_grad()
    def _read(self, ids, cache):
        return self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1]

    def memory(self, ids, ends):
        """Of nothing; or of texts up to each end, read alone."""
        parts = [self.model.new_memory() for _ in ends]
        for (start, end), part in zip(pairwise((0, *ends)), parts, strict=True):
            self._read(ids[start:end], part)
        cache = joined(parts) if ends else self.model.new_memory()
        cache.marks = []
        cache.settle()
        cache.add_mark()
        return cache

    def answer(self, ids, ends):
        """Logits after the ids, and the tokens that are the most probable."""
        key = (tuple(ids), tuple(ends))
        if key not in self._found:
            cache, tokens = self.memory(ids, ends), []
            first = logits = self._read(ids[cache.get_seq_length() :], cache)
            for _ in range(TOKENS):
                tokens.append(int(logits.argmax()))
                logits = self._read(tokens[-1:], cache)
            self._found[key] = first, tokens
        return self._found[key]

    def passages(self, texts, prompt, null, ends, most, alone):
        """Those of documents with these texts, by name, of which the memory has read nothing but the documents."""
        read = [token for text in texts.values() for token in self.ids(text)]
        bounds = [0, *list(accumulate(map(len, texts.values())))[:-1]]
        own = placed(self.answering.chats.decode, read, bounds)
        documents = [(at, Document(name, text)) for name, (at, text) in zip(texts, own, strict=True)]
        cache = self.memory(read, ends)
        return find(self.answering, cache, documents, read, prompt, null, most, alone)


@pytest.fixture(scope="module")
def fresh(model):
    return Fresh(model)


def can_join(model):
    """Whether its memories can be asked together: the state of a hybrid model cannot follow another one."""
    return model.config.model_type != "qwen3_next"


class Leaving(Progress):
    """A client that leaves when so many parts of its prompt are read; None: it stays."""

    def __init__(self, parts):
        super().__init__("a prompt", threading.Event())
        self._parts = parts

    def __call__(self, read, tokens):
        if self._parts is not None:
            self._parts -= 1
            if self._parts < 0:
                self.gone.set()


def drawn(draw, documents, joins):
    """The body of a request about some documents of a client."""
    names = draw.sample(sorted(documents), draw.choice((0, 1, *[min(2, len(documents))] * 3, len(documents))))
    body = {"max_tokens": draw.randint(1, TOKENS), "temperature": 0.0}
    if names:
        body["documents"] = names
        body["sources"] = draw.choice((0, 0, 2))
        body["from_sources"] = draw.random() < 0.3
    if len(names) > 1 and joins:
        body["documents_read"] = draw.choice(("in_order", "apart", "apart"))
    if draw.random() < 0.3:
        said = [{"role": "user", "content": draw.choice(QUESTIONS)} for _ in range(draw.choice((1, 3)))]
        if len(said) == 3:
            said[1] = {"role": "assistant", "content": draw.choice(("Yes. ", "owls"))}
        return body | {"messages": said}
    return body | {"prompt": draw.choice(QUESTIONS)}


def expected(fresh, body, documents):
    """The ids of the prompt, its logits and tokens, and the passages, of a request."""
    texts, chats = {name: documents[name] for name in body.get("documents", ())}, fresh.answering.chats

    def prompt(text=None):
        if "prompt" in body:
            return fresh.ids(body["prompt"] if text is None else text)
        messages = [*body["messages"]]
        messages[-1] = messages[-1] if text is None else {"role": "user", "content": text}
        return chats.ids(messages, not texts)

    read = [token for text in texts.values() for token in fresh.ids(text)]
    ends = tuple(accumulate(map(len, texts.values()))) if body.get("documents_read") == "apart" else ()
    most, alone, found = body.get("sources"), body.get("from_sources", False), Found([])
    if most or alone:
        found = fresh.passages(texts, prompt(), prompt(NULL), ends, most, alone)
    if found.text:
        read, ends = fresh.ids(found.text), ()
    ids = [*read, *prompt()]
    return ids, *fresh.answer(ids, ends), found.sources


def compare(case, got, recorded, fresh, body, documents):
    """got: the text and the sources of an answer. recorded: its ids and logits, if it is known which they are."""
    ids, logits, tokens, passages = expected(fresh, body, documents)
    text = fresh.answering.chats.decode(tokens[: body["max_tokens"]])
    assert got[0].strip() == text.strip(), case
    assert [{**each, "share": 0} for each in got[1] or []] == [{**each._asdict(), "share": 0} for each in passages], (
        case
    )
    if recorded is not None:
        assert list(recorded[0]) == ids, case
        torch.testing.assert_close(recorded[1], logits, msg=lambda said: f"{case}: {said}", **CLOSE)


def play(draw, model, fresh, recorded, folder):
    """One server, with one restart perhaps, and its requests."""
    limits = LIMITS | {"reuse": draw.choice((None, None, 1, 200_000))}
    service = Service(model, fresh.tokenizer, ServerSettings(folder, KEYS, **limits), "landmark")
    documents, said = {key: {} for key in KEYS}, []
    try:
        for step in range(STEPS + 3):
            key, kind = draw.choice(KEYS[:1] * 4 + KEYS) if step > 2 else KEYS[0], draw.random()
            own, leaves = documents[key], draw.choice([None] * 9 + [0, 1, 2])
            if step < 3 or kind < 0.2 or not own:
                name, text = "abc"[step] if step < 3 else draw.choice("abc"), draw.choice(TEXTS)
                said.append(f"{key} put {name}: {text!r}, leaves {leaves}")
                try:
                    service.add_document(key, name, Document(name, text), Leaving(leaves))
                    own[name] = text
                except Gone:
                    pass
            elif kind < 0.25:
                said.append("restart")
                service.memories.close()
                service = Service(model, fresh.tokenizer, ServerSettings(folder, KEYS, **limits), "landmark")
            else:
                body, ends = drawn(draw, own, can_join(model)), draw.choice((*[None] * 6, 1, 2))
                said.append(f"{key} asks {body}, leaves {leaves}, {ends}")
                case = f"{draw.seed}: {'; '.join(said)}"
                asked = (Chat if "messages" in body else Completion).model_validate(body)
                recorded.clear()
                response = service.complete(asked, key, Leaving(leaves))
                try:
                    for number, _ in enumerate(response.deltas, 1):
                        if number == ends:
                            response.deltas.close()
                            break
                    else:
                        got = response.answer.text, response.sources
                        compare(case, got, recorded[0], fresh, body, own)
                except Gone:
                    pass
    finally:
        service.memories.close()


class Commands:
    """`task=generate` and `task=chat`, one after the other, on the memories that earlier ones have saved."""

    def __init__(self, draw, model, fresh, recorded, folder):
        self.draw, self.fresh, self.recorded, self.folder = draw, fresh, recorded, folder
        self.model, self.tokenizer = model, fresh.tokenizer
        self.saved, self.texts, self.said = {}, set(), []  # ids by folder; the folders of texts without a chat
        self.before, self.ends = [], ()  # ids before a question, and where those end that were read alone

    def play(self):
        for number in range(STEPS // 2):
            draw, task = self.draw, self.draw.choice(("generate", "generate", "chat"))
            loaded = [each for each in self.saved if draw.random() < 0.6]
            several = [each for each in loaded if each in self.texts]
            loaded = several[:3] if len(several) > 1 and can_join(self.model) else loaded[:1]
            text = None if loaded and draw.random() < 0.7 else draw.choice(TEXTS)
            save = None if len(loaded) > 1 or text is None else str(self.folder / f"{number}.memory")
            most = draw.choice((0, 0, 2))
            config = self.config(task, loaded, save, text)
            config.generate.sources, config.generate.from_sources = most, draw.random() < 0.3
            config.generate.template = draw.choice((None, {})) if task == "generate" else {}
            parts = [self.saved[each] for each in loaded]
            self.ends = tuple(accumulate(map(len, parts))) if len(parts) > 1 else ()
            self.before = [token for part in parts for token in part] + self.fresh.ids(text or "")
            self.said.append(f"{task} load {loaded}, {text!r}, save {save}, {config.generate}")
            (self.chat if task == "chat" else self.generate)(config)
            if save is not None:
                self.saved[save] = saved_windows(Path(save), ids_alone=True)[IDS][0].tolist()
                self.texts |= {save} if task == "generate" and self.texts.issuperset(loaded) else set()

    def config(self, task, loaded, save, text):
        memory = self.model.landmarks.memory
        settings = [f"retrieval.k={memory.k}", f"memory.window={memory.window}", f"memory.dense={memory.dense}"]
        base = ["model=pretrained", "model.name=x", f"model.block_size={BLOCK}", *settings, f"generate.tokens={TOKENS}"]
        made = to_config(compose_conf([f"task={task}", *base]))
        made.memory.load, made.memory.save = loaded or None, save
        made.prompt_file = None if text is None else Document("x", text)
        return made

    def generate(self, config):
        config.prompt = self.draw.choice(QUESTIONS)
        self.said.append(repr(config.prompt))
        session = question.session_of(self.model, self.tokenizer, config)
        pieces = question.answered(session, config, question.GenerationStatistics(), lambda *_: None)
        self.check("".join(text for _, text in pieces))

    def chat(self, config):
        session = question.session_of(self.model, self.tokenizer, config)
        talk, reuse = chat.Conversation(session, config), self.draw.choice((None, 1))
        session.answering.prefixes.most_bytes = reuse or session.answering.prefixes.most_bytes
        for _ in range(self.draw.randint(1, 3)):
            self.said.append(f"{self.draw.choice(QUESTIONS)!r}, reuse {reuse}")
            talk.answer(self.said[-1])
            self.check(session.messages[-1]["content"])
        if config.memory.save is not None:
            session.save(config.memory.save)

    def check(self, said):
        """What was said is the model's own, behind the texts or behind passages that were found."""
        case, ((ids, logits),) = f"{self.draw.seed}: {'; '.join(self.said)}", self.recorded
        is_behind = [*ids[: len(self.before)]] == self.before
        own, tokens = self.fresh.answer(ids, self.ends if is_behind else ())
        text = self.fresh.answering.chats.decode(tokens).partition("\nuser:")[0]
        assert said.strip() == text.strip(), case
        torch.testing.assert_close(logits, own, msg=lambda differs: f"{case}: {differs}", **CLOSE)
        self.recorded.clear()

    def find(self, answering, cache, documents, read, *given):
        """Instead of the function: the same, compared with what a new memory finds."""
        found = find(answering, cache, documents, read, *given)
        again = self.fresh.memory(read, self.ends)
        own = find(self.fresh.answering, again, documents, read, *given)
        assert [each._replace(share=0) for each in found.sources] == [each._replace(share=0) for each in own.sources], (
            f"{self.draw.seed}: {'; '.join(self.said)}"
        )
        return found


def ask(running, key, body):
    """The text and the passages of an answer over HTTP."""
    got = running.http(key).post("chat/completions" if "messages" in body else "completions", json=body).json()
    (choice,) = got["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice.get("sources")


class Drawn(random.Random):
    """Random numbers that say from which seed they come."""

    def __init__(self, seed):
        super().__init__(seed)
        self.seed = f"seed {SEED}, history {seed.rpartition(' ')[2]}"


def test_requests_of_a_server(model, fresh, recorded, tmp_path):
    for number in range(HISTORIES):
        draw = Drawn(f"{SEED} {number}")
        with ending(draw.seed):
            play(draw, model, fresh, recorded, tmp_path / str(number))


def test_clients_at_once(model, fresh, tmp_path):
    """Over HTTP, in threads; documents are replaced between two rounds."""
    if not can_join(model):
        pytest.skip("in threads, where `doubled` has no effect, hybrid layers round to float32")
    draw, documents = Drawn(f"{SEED} 0"), {key: {} for key in KEYS}
    with Server(model, fresh.tokenizer, tmp_path) as running, ThreadPoolExecutor(4) as threads:
        for _ in range(1 + HISTORIES // 8):
            for key in KEYS:
                for name in draw.sample("abc", 2):
                    documents[key][name] = draw.choice(TEXTS)
                    running.http(key).put(f"documents/{name}", content=documents[key][name].encode())
            asked = [draw.choice(KEYS) for _ in range(STEPS)]
            asked = [(running, key, drawn(draw, documents[key], can_join(model))) for key in asked]
            for (_, key, body), got in zip(asked, threads.map(lambda each: ask(*each), asked), strict=True):
                compare(f"{draw.seed}: {body}", got, None, fresh, body, documents[key])


def test_commands_on_saved_memories(model, fresh, recorded, tmp_path, monkeypatch):
    for number in range(HISTORIES):
        draw = Drawn(f"{SEED} {number}")
        commands = Commands(draw, model, fresh, recorded, tmp_path / str(number))
        monkeypatch.setattr(sessions, "find", commands.find)
        recorded.clear()
        with ending(draw.seed):
            commands.play()
