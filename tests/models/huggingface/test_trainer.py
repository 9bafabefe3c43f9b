"""Fine-tuning with transformers' own Trainer: windows with their landmarks, their loss, what is refused; compiling."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from landmark.attention.layout import insert_landmarks
from landmark.memory.blocks import attention as sparse_attention
from landmark.memory.blocks import prefill_kernels
from landmark.models.huggingface import LandmarkCollator, attach, unwrap, wrap
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import make_config, make_model, make_tokenizer, wrapped_model

BLOCK = 3
LENGTHS = 23, 5, 40, 12


@pytest.fixture
def wrapped(tokenizer):
    return wrapped_model("llama", tokenizer, block_size=BLOCK)


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 256, (length,), generator=generator).tolist()} for length in LENGTHS]


def trainer_settings(folder, **settings):
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), **quiet, **settings)


def losses(model, document, length):
    """Of each predicted token of a document, window by window, from logits alone."""
    ids = torch.tensor(document["input_ids"])
    tokens, own = insert_landmarks(ids[None], 0, BLOCK, model.landmarks.token)
    found = []
    for start in range(0, tokens.shape[1], length):
        phase = torch.tensor([start % (BLOCK + 1)])
        logits = model(tokens[:, start : start + length], phase=phase).logits[0, :, :]
        here = [(raw, at - start) for raw, at in enumerate(own.tolist()) if start <= at < start + length]
        for raw, at in here:
            if raw + 1 < len(ids):
                found.append(F.cross_entropy(logits[at], ids[raw + 1]))
    return torch.stack(found)


def test_windows_and_labels_are_those_of_the_drawing(wrapped):
    landmark = wrapped.landmarks.token
    batch = LandmarkCollator(wrapped, length=6)([{"input_ids": [1, 2, 3, 4, 5, 6, 7]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, landmark, 4, 5], [6, landmark, 7, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100, 4, 5], [6, -100, 7, -100, -100, -100]]
    assert batch["shift_labels"].tolist() == [[2, 3, 4, -100, 5, 6], [7, -100, -100, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert batch["phase"].tolist() == [0, 2]
    packed = LandmarkCollator(wrapped, packed=True)([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6]}])
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5, landmark, 6]]
    assert packed["cu_seqlens"].tolist() == [0, 2, 7]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4]]
    masked = {"input_ids": [9, 1, 2, 3], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 2, 3]}
    batch = LandmarkCollator(wrapped)([masked])
    assert batch["shift_labels"].tolist() == [[2, 3, -100, -100]]


@pytest.mark.parametrize("positions", [False, True])
@torch.no_grad()
def test_packed_documents_are_read_as_each_alone(positions, tokenizer):
    """Also where a layer slides, and whether or not landmarks take positions, as in the paper."""
    wrapped = wrapped_model("gemma3", tokenizer).double()
    settings = replace(wrapped.landmarks, landmark_positions=positions)
    wrapped = attach(unwrap(wrapped), settings)
    texts = [torch.arange(60, 60 + length) for length in (31, 19)]
    packed = LandmarkCollator(wrapped, packed=True)([{"input_ids": text} for text in texts])
    labels = "labels", "shift_labels"
    found = wrapped(**{name: x for name, x in packed.items() if name not in labels}).logits
    alone = [LandmarkCollator(wrapped)([{"input_ids": text}]) for text in texts]
    expected = [wrapped(batch["input_ids"], phase=batch["phase"]).logits for batch in alone]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "packed"), [("llama", False), ("gemma3", True)])
def test_the_trainer_trains_with_landmarks(family, documents, packed, tokenizer, tmp_path):
    """Its losses are those of the documents by hand, padded or packed, and with gradients accumulated over batches of
    unequal size; then the model learns them."""
    wrapped = wrapped_model(family, tokenizer, block_size=BLOCK)
    with torch.no_grad():
        expected = torch.cat([losses(wrapped, document, 16) for document in documents])
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
    arguments = trainer_settings(tmp_path, max_steps=12, learning_rate=3e-3, logging_steps=1, **batches)
    collator = LandmarkCollator(wrapped, length=16, packed=packed)
    trainer = Trainer(wrapped, arguments, data_collator=collator, train_dataset=documents, eval_dataset=documents)
    before = trainer.evaluate()["eval_loss"]
    assert math.isclose(before, expected.mean(), rel_tol=1e-4)
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert math.isclose(first, expected.mean(), rel_tol=1e-3)
    assert trainer.evaluate()["eval_loss"] < before - 1
    wrapped.eval()
    with torch.no_grad():
        after = torch.cat([losses(wrapped, document, 16) for document in documents])
    assert after.mean() < expected.mean() - 1


def test_what_would_train_something_else_is_refused(wrapped, documents, tokenizer, tmp_path):
    tokenizer.pad_token = "<eot>"
    plain, smoothing = DataCollatorForLanguageModeling(tokenizer, mlm=False), {"label_smoothing_factor": 0.1}
    for collator, settings, said in (
        (plain, {}, "labels without phase would train the model without landmarks.*LandmarkColl"),
        (LandmarkCollator(wrapped), smoothing, "labels and shift_labels: windows need both.*label smoothing"),
    ):
        arguments = trainer_settings(tmp_path, max_steps=1, **settings)
        with pytest.raises(UserError, match=said):
            Trainer(wrapped, arguments, data_collator=collator, train_dataset=documents).train()
    batch = LandmarkCollator(wrapped)(documents)
    del batch["shift_labels"]
    with pytest.raises(UserError, match="windows need both or none, as .*LandmarkCollator gives them"):
        wrapped(**batch)
    ids = torch.tensor([documents[0]["input_ids"]])
    with pytest.warns(UserWarning, match="labels without phase: this loss is of the model without landmarks"):
        wrapped.eval()(ids, labels=ids)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LandmarkCollator(wrapped_model("llama"))([{"input_ids": []}]), "no text"),
        (lambda: LandmarkCollator(wrapped_model("llama"))([{"input_ids": [1, 257]}]), "hold landmarks"),
        (lambda: LandmarkCollator(wrapped_model("llama"))([{"input_ids": [[1, 2]]}]), "one row of integers"),
        (lambda: LandmarkCollator(wrapped_model("llama"))([{"input_ids": [1], "labels": []}]), "its labels have its"),
        (lambda: LandmarkCollator(make_model("llama")), "has no landmarks"),
        (lambda: LandmarkCollator(wrapped_model("llama", landmarks="none")), "reads without landmarks"),
        (lambda: LandmarkCollator(wrapped_model("llama"), 1), "length=1"),
    ],
)
def test_documents_models_and_lengths_that_do_not_fit_are_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()


WINDOW = torch.tensor([[1, 1, 1, 257, 1, 1]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "padding on the right only"),
        ({"past_key_values": object()}, "windows with phase are whole"),
        ({"phase": torch.zeros(2, dtype=torch.int64)}, "phase"),
        *(({"phase": phase}, "phase: must be a tensor of integers") for phase in (torch.tensor([0.0]), [0], 0)),
        ({"phase": torch.tensor([False])}, "phase: must be a tensor of integers"),
        ({"phase": torch.tensor([1])}, "window 0 has no landmark at token 2"),
        ({"input_ids": WINDOW.clamp(max=1)}, "no landmark at token 3, where its phase and block_size=3 say"),
        ({"input_ids": None}, "phase: give the windows too"),
    ],
)
def test_windows_that_are_none_are_refused(wrapped, given, said):
    with pytest.raises(UserError, match=said):
        wrapped(**{"input_ids": WINDOW, "phase": torch.zeros(1, dtype=torch.int64), **given})


@pytest.mark.parametrize("packed", [False, True])
def test_a_collator_of_another_block_size_is_noticed(wrapped, documents, packed):
    batch = LandmarkCollator(wrapped_model("llama", block_size=BLOCK + 1), length=10, packed=packed)(documents)
    with pytest.raises(UserError, match=r"window \d has .* landmark at token \d"):
        wrapped(**batch)


# ---- `torch.compile`: windows and the plain model are one graph, a memory stays outside; reading waits for no GPU


@pytest.fixture
def shallow():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=1))
    return wrap(model, make_tokenizer(), block_size=5, memory={"k": 2}, local=8)


def step(model, call, batch):
    model.zero_grad()
    loss = call(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
def test_training_is_one_graph(shallow, packed, monkeypatch):
    monkeypatch.setattr("landmark.attention.backend_for", lambda *_: "triton")
    documents = [{"input_ids": torch.randint(0, 256, (length,)).tolist()} for length in (22, 9)]
    batch = LandmarkCollator(shallow, length=12, packed=packed)(documents)
    compiled = torch.compile(shallow, fullgraph=True, backend="aot_eager")
    found, expected = (step(shallow.train(), call, batch) for call in (compiled, shallow))
    without = shallow.eval()(batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    assert not torch.allclose(without, expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_the_model_without_landmarks_is_one_graph(shallow):
    ids = torch.randint(0, 256, (2, 20))
    compiled = torch.compile(shallow.eval(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids, use_cache=False).logits, shallow(ids, use_cache=False).logits)


@torch.no_grad()
def test_reading_with_a_memory_stays_outside_of_the_graph(shallow):
    """Nothing of it is compiled, so that it neither takes minutes nor fails."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    ids = torch.randint(0, 256, (1, 40))
    compiled, memory, same = torch.compile(shallow.eval(), backend=backend), shallow.new_memory(), shallow.new_memory()
    for part in ids.split(17, 1):
        found, expected = compiled(part, past_key_values=memory).logits, shallow(part, past_key_values=same).logits
        assert torch.equal(found, expected)
    assert not any(node.op == "call_module" or "linear" in str(node.target) for g in graphs for node in g.graph.nodes)
    settings = {"max_new_tokens": 3, "do_sample": False}
    expected = shallow.generate(ids, **settings)
    shallow.compile(backend=backend)
    assert torch.equal(shallow.generate(ids, **settings), expected)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch is built without CUDA")
@pytest.mark.parametrize("mapping", ["true", "stingy"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_nothing_waits_and_nothing_is_elsewhere(family, mapping, monkeypatch):
    """Without a GPU: to look at its numbers on the CPU, or to mix devices, raises an error here."""
    monkeypatch.setattr(prefill_kernels, "read_tiles", sparse_attention.read_tiles)
    monkeypatch.setattr(sparse_attention, "constant", sparse_attention.constant.__shallow__)  # keeps no such tensors
    settings = {"k": 3, "window": 8, "mapping": mapping}
    model = make_model(family).bfloat16()
    model = wrap(model, make_tokenizer(), block_size=4, memory=settings, local=16, landmarks="none")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model._apply(lambda weight: torch.empty_like(weight, device="cuda"))  # without numbers
        past = model.new_memory()
        past.expect(100)
        ids = torch.empty(2, 82, dtype=torch.int64, device="cuda")
        for part in ids.split([80, 1, 1], 1):
            logits = model(part, past_key_values=past, logits_to_keep=1).logits
            assert logits.shape == (2, 1, 257)
            assert logits.is_cuda
        assert past.stats["blocks_kept"] == 20
