"""Every way to read a text takes the passes that its memory says, and no token more. A renamed argument that was
swallowed had cost passes and changed numbers, which no other test saw.
"""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.documents import Document
from landmark.experiment.evaluation.measurement import segment_losses
from landmark.models.huggingface import wrap
from landmark.models.huggingface.chunked_forward import ChunkedForward
from landmark.models.pretrained import Pretrained
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering
from landmark.reading.session import Prompt, Session
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import make_model, make_tokenizer

BLOCK, LOCAL, LENGTH, NEW = 8, 32, 203, 5


@pytest.fixture
def model():
    memory = {"k": 3, "window": 16, "dense": 40}
    return wrap(make_model("llama"), make_tokenizer(), landmarks="none", block_size=BLOCK, local=LOCAL, memory=memory)


@pytest.fixture
def passes(monkeypatch):
    """The tokens of each pass of the model, and whether they choose blocks together."""
    found, pass_on = [], ChunkedForward._pass

    def counted(self, parts, *given):
        found.append((parts[0].ids.shape[1], parts[0].prefill))
        return pass_on(self, parts, *given)

    monkeypatch.setattr(ChunkedForward, "_pass", counted)
    return found


def pieces(model, length, kept=1):
    """As the memory alone cuts a text, of which the last tokens get logits."""
    memory = model.new_memory().memory
    return [(stop - start, prefill) for start, stop, prefill in memory.pieces(length, kept, lambda: LOCAL, "cpu")]


@torch.no_grad()
def forward(model, text):
    model(text, past_key_values=model.new_memory(), logits_to_keep=1)
    return pieces(model, LENGTH)


@torch.no_grad()
def all_logits(model, text):
    segment_losses(Pretrained(model), torch.cat([text, text[:, :1]], 1), LOCAL, model.new_memory())
    return pieces(model, LENGTH, LENGTH)


def stream(model, text):
    Pretrained(model).generate([text[0]], NEW)
    return pieces(model, LENGTH) + [(1, False)] * (NEW - 1)


def generate(model, text):
    model.generate(text, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return pieces(model, LENGTH) + [(1, False)] * (NEW - 1)


def answering(model, text):
    steps = Answering(model, make_tokenizer()).steps(text.tolist(), model.new_memory(), Sampling(), NEW)
    assert len([step for step in steps if isinstance(step, list)]) == NEW
    return pieces(model, LENGTH) + [(1, False)] * (NEW - 1)


def session(model, text):
    begun = Session(Answering(model, make_tokenizer()))
    list(begun.ask(begun.exchange(Prompt(text=text[0].tolist())), tokens=NEW))
    return pieces(model, LENGTH) + [(1, False)] * (NEW - 1)


@torch.no_grad()
def log_likelihood(model, text):
    """As the harness reads it: the last ten tokens get logits."""
    for _ in Pretrained(model).read_text(text, model.new_memory(), kept=10):
        pass
    return pieces(model, LENGTH, 10)


@pytest.mark.parametrize("way", [forward, all_logits, stream, generate, answering, session, log_likelihood])
def test_each_way_to_read_takes_the_passes_of_the_memory(model, passes, way):
    text = torch.randint(3, 250, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    assert way(model, text) == passes
    assert sum(tokens for tokens, _ in passes) == LENGTH + NEW - 1 or way in (forward, all_logits, log_likelihood)


@torch.no_grad()
def test_the_logits_behind_a_prefill_are_those_of_one_call_wherever_it_ends(model):
    """What `known=True` had changed: log-likelihoods behind 641 tokens, while 640, 650 and 672 agreed."""
    text = torch.randint(3, 250, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    for kept in (1, 2, 9, 40):
        *_, (_, logits) = Pretrained(model).read_text(text, model.new_memory(), kept=kept)
        whole = model(text, past_key_values=model.new_memory(), logits_to_keep=kept).logits
        torch.testing.assert_close(logits[:, -1], whole[:, -1])


@torch.no_grad()
def test_an_argument_that_the_model_does_not_have_is_refused(model):
    text = torch.ones(1, 4, dtype=torch.int64)
    for given in ({"past_key_values": model.new_memory()}, {}):
        with pytest.raises(UserError, match="known: the model's forward has no such argument"):
            model(text, known=True, **given)


def test_a_model_with_its_own_cache_answers_and_reads_nothing_twice(monkeypatch):
    """`model=pretrained_base`: the book, the question and four tokens of the answer, each once."""
    plain, read = make_model("llama").eval(), []
    asked = Session(Answering(plain, make_tokenizer()))
    monkeypatch.setattr(plain, "forward", partial(counted, plain.forward, read))
    asked.read(Document("book", "A heron waits. " * 40))
    answer = asked.answer("Who waits?", tokens=NEW)
    assert sum(read) == len(asked.ids) + len(Prompt.question("Who waits?").ids(asked.answering, False)) + NEW - 1
    ids = torch.tensor([[*asked.ids, *Prompt.question("Who waits?").ids(asked.answering, False)]])
    own = plain.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    assert answer == asked.chats.decode(own.tolist())


def counted(forward, read, input_ids, **given):
    read.append(input_ids.shape[1])
    return forward(input_ids, **given)


@pytest.mark.parametrize("dense", [1000, 115])
def test_guesses_of_an_answer_are_read_together_and_leave_its_tokens_and_memory_as_they_are(passes, dense):
    """Where all keys are read; the text outgrows the smaller number while the answer is made."""
    memory, made = {"k": 3, "window": 16, "dense": dense}, make_model("llama").double()
    model = wrap(made, make_tokenizer(), landmarks="none", block_size=BLOCK, local=LOCAL, memory=memory)
    piece = torch.randint(3, 250, (1, 15), generator=torch.Generator().manual_seed(6))
    text, answering = torch.cat([piece] * 6 + [piece[:, :7]], 1), Answering(model, make_tokenizer())
    answering.ends = set()
    caches, found = [], []
    for temperature in (0, 1):  # drawn from the one most probable token: the same, and not guessed
        caches.append(cache := model.new_memory())
        cache.marks = []
        steps = answering.steps(text.tolist(), cache, Sampling(temperature=temperature, top_k=1), 30)
        found.append([step for step in steps if isinstance(step, list)])
    guessing, plain = caches
    assert found[0] == found[1]
    assert torch.equal(guessing.ids, plain.ids)
    together = sum(tokens - 1 for tokens, prefill in passes if not prefill and 1 < tokens <= 4)
    wrong = sum(tokens for tokens, _ in passes) - 2 * (text.shape[1] + 29)
    assert 0 < wrong <= together
    assert guessing.memory.settled == plain.memory.settled
    assert guessing.memory.position == plain.memory.position
    assert all(mark.tokens <= guessing.settled for mark in guessing.marks)
    for number, layer in plain.memory.layers.items():
        own, blocks = guessing.memory.layers[number], guessing.memory.position // BLOCK
        torch.testing.assert_close((own.keys, own.values), (layer.keys, layer.values))
        torch.testing.assert_close(own.summaries[:, :blocks], layer.summaries[:, :blocks])
