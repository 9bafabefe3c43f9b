"""Models of transformers in the program's own training and evaluation, and in rows of experiments."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from transformers import DynamicCache

from landmark.experiment.config import to_config
from landmark.experiment.config.schema import ModelConfig
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.data.passkey import Passkey
from landmark.experiment.data.ruler import Ruler
from landmark.experiment.data.stream import Stream
from landmark.experiment.data.synthetic import SyntheticCorpus
from landmark.experiment.data.synthetic_windows import SyntheticWindows
from landmark.experiment.data.tokenizers import PretrainedTokenizer
from landmark.experiment.evaluation.rows import evaluate
from landmark.experiment.runs.jobs import Inputs
from landmark.experiment.runs.runner import load_trained
from landmark.experiment.training import train
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.models import decoder_config, save
from landmark.models import head_loss as parts
from landmark.models import load as load_model
from landmark.models.config import Landmarks
from landmark.models.huggingface import LandmarkModel, wrap
from landmark.models.huggingface import load as load_wrapped
from landmark.models.pretrained import Pretrained, load_pretrained, start_from, weights_sha256
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.experiment.evaluation.test_perplexity import settings
from tests.experiment.training.training_case import TOKENIZER, identity_of, make_config, make_corpus
from tests.memory.blocks.best import Scorer as Best
from tests.models.huggingface.conftest import make_model, make_tokenizer, save_model
from tests.workplace import run_task

BLOCK = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained model, as far as anyone can tell."""
    folder = tmp_path_factory.mktemp("trained")
    make_model("llama").save_pretrained(folder)
    return folder


def shape(kind="landmark"):
    model = ModelConfig(kind=kind, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, block_size=BLOCK)
    return decoder_config(model, TOKENIZER)


def fine_tune(model, tmp_path, kind="landmark", **changes):
    """A few steps on made-up text, in place."""
    config = make_config(kind, steps=3, max_lr=1e-2, **changes)
    run = tmp_path / "run"
    run.mkdir()
    corpus = make_corpus(tmp_path / "data")
    return train(model, corpus, TOKENIZER, config, run, [], identity_of(config, corpus, "weights")), run


def embedding(model):
    return model.bare.get_input_embeddings().weight.detach().clone()


@pytest.mark.parametrize("tied", [False, True])
def test_only_adapters_and_the_landmarks_embedding_are_trained(folder, tmp_path, tied):
    if tied:
        model = make_model("gemma")
        folder = tmp_path / "tied"
        model.save_pretrained(folder)
    start = start_from(str(folder), shape())
    before, token = embedding(start), TOKENIZER.landmark
    torch.testing.assert_close(before[token], before[:token].mean(0))
    model = start_from(str(folder), shape(), lora_rank=2)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or "trainable_tokens" in name for name in trained)
    assert any("trainable_tokens" in name for name in trained)
    torch.manual_seed(0)
    summary, run = fine_tune(model, tmp_path)
    assert summary["steps"] == 3
    again = load_model(run)
    after = embedding(again)
    assert isinstance(again.bare, LandmarkModel)
    assert not torch.allclose(after[token], before[token], atol=1e-3)
    others = torch.arange(len(before)) != token
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    projection = "model.layers.1.self_attn.v_proj.weight"
    assert not torch.allclose(again.bare.state_dict()[projection], start.bare.state_dict()[projection], atol=1e-4)


def test_everything_is_trained_without_adapters(folder, tmp_path):
    model = start_from(str(folder), shape())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    _, run = fine_tune(model, tmp_path)
    after = dict(load_model(run).named_parameters())
    assert before.keys() == after.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still
    token = TOKENIZER.landmark
    moved = after["model.model.embed_tokens.weight"][token] - before["model.model.embed_tokens.weight"][token]
    assert moved.norm() > 1e-3


def test_a_trained_run_is_what_transformers_saves(folder, tmp_path):
    """`landmark.models.huggingface.load` opens a run's folder, with the tokenizer that came with the model."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<landmark>"], special_tokens=True)
    model = start_from(str(folder), shape(), tokenizer=tokenizer)
    save(model, tmp_path)
    wrapped, _ = load_wrapped(tmp_path)
    ids = torch.randint(0, 256, (1, 60))
    memory = model.new_memory(k=2)
    found = torch.cat([model(chunk, memory=memory) for chunk in ids.split(20, 1)], 1)
    expected = wrapped(ids, past_key_values=wrapped.new_memory(k=2), local=20).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "lora_rank", "in_parts"),
    [
        ("llama", None, True),
        ("gemma", None, True),  # its head is the embedding
        ("gemma", 2, False),  # of which one row is trained beside the weight
        ("llama", 2, True),
        ("granite", None, False),  # divides its logits
        ("phi", None, False),  # its head has a bias
    ],
)
def test_losses_of_many_logits_in_parts_are_those_of_all(family, lora_rank, in_parts, tmp_path, monkeypatch):
    make_model(family).save_pretrained(tmp_path)
    model = start_from(str(tmp_path), shape(), lora_rank=lora_rank)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    config = make_config("landmark")
    data = WindowDataModule(make_corpus(tmp_path / "data"), TOKENIZER, config)
    batch, called = data.training.batch(0), []
    head_loss = parts.head_loss
    monkeypatch.setattr(parts, "head_loss", lambda *given: called.append(given) or head_loss(*given))
    trained = [weight for weight in model.parameters() if weight.requires_grad]

    def found():
        ((loss, count),) = model.window_losses(batch)
        return loss, count, *torch.autograd.grad(loss, trained)

    whole = found()
    assert not called
    monkeypatch.setattr(parts, "AT_ONCE", 1000)
    for got, right in zip(found(), whole, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    assert bool(called) == in_parts


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_plain_model_that_is_trained_further_reads_through_blocks(folder, tmp_path, lora_rank):
    """Its first loss is the model's own; afterwards, with all blocks, it reads as its weights alone do."""
    plain = shape().without_landmarks()
    start = start_from(str(folder), plain)
    ids = torch.randint(0, 256, (1, 60))
    before = start(ids).detach()
    torch.testing.assert_close(start_from(str(folder), plain, lora_rank=lora_rank)(ids), before, rtol=0, atol=0)
    _, run = fine_tune(start_from(str(folder), plain, lora_rank=lora_rank), tmp_path, kind="transformer")
    reading = dataclasses.replace(plain, landmarks=Landmarks(None, BLOCK))
    tuned, blocks = load_pretrained(run), load_pretrained(run, reading)
    with torch.no_grad():
        assert not torch.allclose(tuned(ids), before, atol=1e-3)
        memory = blocks.new_memory(k=100, window=4)
        read = torch.cat([blocks(chunk, memory=memory) for chunk in ids.split(7, 1)], 1)
        torch.testing.assert_close(read, tuned(ids), rtol=0, atol=1e-4)
        assert memory.stats["blocks_kept"] > 8


@torch.no_grad()
def test_a_plain_model_goes_on_with_its_own_cache_and_a_window_equals_a_memory_of_everything(folder):
    model = load_pretrained(folder).eval()
    ids = torch.randint(0, 256, (2, 30))
    assert model.new_memory() is None
    expected = model.bare.generate(ids, max_new_tokens=5, do_sample=False)[:, 30:]
    assert model.generate(ids, 5, local=12) == expected.tolist()
    with pytest.raises(UserError, match="window"):
        model.new_memory(window=5)
    model = start_from(str(folder), shape()).eval()
    ids = torch.randint(0, 256, (2, 40))
    memory = model.new_memory(k=100)
    chunks = torch.cat([model(chunk, memory=memory) for chunk in ids.split(11, 1)], 1)
    torch.testing.assert_close(model(ids), chunks, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(ids, last=True), chunks[:, -1:], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_model_with_landmarks_generates_as_transformers_does(folder):
    model = start_from(str(folder), shape()).eval()
    ids = torch.randint(0, 256, (2, 30))
    expected = model.bare.generate(ids, max_new_tokens=7, do_sample=False, past_key_values=model.new_memory(k=2))
    memory = model.new_memory(k=2)
    assert model.generate(ids, 7, memory=memory) == expected[:, 30:].tolist()
    assert memory.get_seq_length() == 36
    assert [step[0] for step in model.stream(ids, 7, memory=lambda: model.new_memory(k=2))] == expected[0, 30:].tolist()
    several = [ids[0], ids[1][:9]]
    assert [len(text) for text in model.generate(several, 3)] == [3, 3]
    with pytest.raises(UserError, match="several lengths"):
        model.generate(several, 3, memory=model.new_memory())


def test_models_that_do_not_fit_are_refused(folder, tmp_path):
    save(start_from(str(folder), shape()), tmp_path / "run")
    run = tmp_path / "run"
    other = dataclasses.replace(shape(), landmarks=Landmarks(TOKENIZER.landmark, 7))
    for use, said in (
        (lambda: start_from(str(tmp_path / "nowhere"), shape()), r"there is no such folder"),
        (lambda: weights_sha256(str(tmp_path)), r"holds no config\.json"),
        (lambda: start_from(str(run), shape("transformer")), "was trained with landmarks"),
        (lambda: start_from(str(run), other), "block_size=7"),
        (lambda: load_pretrained(run, other), "block_size is 5, not 7"),
    ):
        with pytest.raises(UserError, match=said):
            use()


def test_the_same_weights_are_the_same_start_wherever_they_are(folder, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "a")
    make_model("llama", seed=1).save_pretrained(tmp_path / "b")
    assert weights_sha256(str(tmp_path / "a")) == weights_sha256(str(folder))
    assert weights_sha256(str(tmp_path / "b")) != weights_sha256(str(folder))


# ---- rows of experiments: how they read, and that texts begin as the model expects


BEGINNING = 65  # the letter A, for a tokenizer without such a token


def tokenizer_with_beginning():
    return PretrainedTokenizer(make_tokenizer(beginning=BEGINNING))


@pytest.fixture(scope="module")
def stream():
    tokens = np.random.default_rng(0).integers(0, 256, 4 * 64 + 1).astype("<u2")
    return Stream(tokens, "")


def of_transformers(**changes):
    config = settings(64, tokens=None, batch_size=2, **changes)
    config.model.name = "a folder"
    return config


@pytest.mark.parametrize("local", [64, 16, 17])
def test_a_plain_model_reads_with_its_own_cache_and_a_beginning(local, stream):
    model = make_model("llama").double()
    config = of_transformers(local=local)
    found = evaluate(Pretrained(model), stream, tokenizer_with_beginning(), config)
    tokens = torch.from_numpy(stream.tokens.astype(np.int64))
    losses = []
    for start in range(0, 256, 64):
        segment = torch.cat([torch.tensor([BEGINNING]), tokens[start : start + 65]])
        with torch.no_grad():
            logits = model(segment[None, :-1], past_key_values=DynamicCache(config=model.config)).logits[0, 1:]
        losses.append(F.cross_entropy(logits, segment[2:], reduction="none"))
    assert found["tokens"] == 256
    assert found["nll"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)


@pytest.mark.parametrize("local", [64, 16])
def test_with_every_block_it_is_the_plain_model(local, stream):
    plain, tokenizer = Pretrained(make_model("llama").double()), tokenizer_with_beginning()
    expected = evaluate(plain, stream, tokenizer, of_transformers(local=64))
    memory = {"k": 100, "window": 7}
    model = wrap(make_model("llama").double(), make_tokenizer(), block_size=4, landmarks="none", memory=memory)
    config = of_transformers(local=local, k=100, window=7, mapping="auto")
    config.model.as_is, config.memory.dense = True, 0
    found = evaluate(Pretrained(model), stream, tokenizer, config)
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-12)
    config.retrieval.k = 1
    few = evaluate(Pretrained(model), stream, tokenizer, config)["nll"]
    assert abs(few - expected["nll"]) > 1e-4
    config.memory.dense = 100
    assert evaluate(Pretrained(model), stream, tokenizer, config)["nll"] == pytest.approx(expected["nll"], rel=1e-12)


@pytest.mark.parametrize("data", [Passkey(), Ruler("niah_single_1", 8, None)], ids=["passkey", "niah"])
def test_prompts_begin_as_texts_do(data):
    tokenizer = tokenizer_with_beginning()
    (prompt,) = SyntheticCorpus(data, tokenizer).prompts("test", 600, 1)
    (bare,) = SyntheticCorpus(data, PretrainedTokenizer(make_tokenizer())).prompts("test", 599, 1)
    assert len(prompt.tokens) <= 600
    assert prompt.tokens[0] == BEGINNING
    assert prompt.answer in tokenizer.decode(prompt.tokens)
    for first, stop in prompt.evidence:
        assert prompt.answer in tokenizer.decode(prompt.tokens[first:stop])
    both = tokenizer, PretrainedTokenizer(make_tokenizer())
    assert len({SyntheticCorpus(data, each).split("test").sha256 for each in both}) == 2
    assert bare.tokens[0] != BEGINNING


@pytest.mark.parametrize("block_size", [None, 7])
def test_training_windows_of_text_and_of_tasks_begin_as_prompts_do(block_size):
    tokenizer = tokenizer_with_beginning()
    bare = PretrainedTokenizer(make_tokenizer())
    settings = {"length": 300, "batch_size": 4, "seed": 0, "block_size": block_size}
    made = SyntheticWindows(SyntheticCorpus(Passkey(), tokenizer), "train", **settings).batch(0)
    shorter = settings | {"length": 300 if block_size else 299}
    usual = SyntheticWindows(SyntheticCorpus(Passkey(), bare), "train", **shorter).batch(0)
    assert (made.tokens[:, 0] == BEGINNING).all()
    assert (made.targets[:, 0] == NO_LOSS).all()

    def own(batch):  # tokens and targets without landmarks
        kept = batch.tokens[0] != tokenizer.landmark
        return batch.tokens[:, kept], batch.targets[:, kept]

    for with_it, without in zip(own(made), own(usual), strict=True):
        assert with_it[:, 1:].tolist() == without[:, : with_it.shape[1] - 1].tolist()


# ---- rows that read the model of transformers that another row trains further


ROWS = {
    "training": "model=pretrained_base model.as_is=false model.lora_rank=2",
    "tuned": "model=pretrained start=training",
    "tuned-dense": "model=pretrained_base start=training",
    "plain": "model=pretrained",
}
SETTINGS = [
    *("size=nano", "data=stdlib", "data.max_documents=6", "tokenizer=pretrained", "trainer=cpu", "logger=csv"),
    *("train.steps=2", "train.batch_size=2", "train.length=64", "train.precision=32-true", "train.validate_batches=1"),
    *("train.max_lr=0.01", "train.start_lr=0.01", "eval.tokens=512", "eval.length=256", "eval.local=64"),
]
LISTED = f"+rows={{{', '.join(f'{name}: {text!r}' for name, text in ROWS.items())}}}"


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """A function that runs a command with a tiny Llama, and gives the records of its rows by their names."""
    output = tmp_path_factory.mktemp("tuned")
    save_model(output / "tiny")

    def run(*words, name=output / "tiny"):
        given = [*SETTINGS, f"output={output}", f"model.name={name}", *words]
        run_task(*given)
        rows = [json.loads(path.read_text()) for path in (output / "records" / "rows").glob("*.json")]
        return output, {row["labels"]["row"]: row for row in rows}

    return run


def test_a_row_reads_what_another_trains(launch, capsys):
    output, rows = launch(LISTED, "row=tuned")
    (trained,) = (output / "runs").iterdir()
    assert "train.steps" not in capsys.readouterr().err
    assert rows["tuned"]["labels"]["run"] == str(trained)
    before = (trained / "model.safetensors").stat().st_mtime_ns
    _, rows = launch(LISTED)
    assert [path.name for path in (output / "runs").iterdir()] == [trained.name]
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    nll = {name: row["results"]["nll"] for name, row in rows.items()}
    assert nll["training"] == nll["tuned-dense"]
    assert len({row["id"] for row in rows.values()}) == 4
    assert abs(nll["tuned"] - nll["plain"]) > 1e-3
    _, rows = launch("model=pretrained", "name=folder", name=trained)
    assert rows["folder"]["results"]["nll"] == nll["tuned"]
    assert rows["folder"]["id"] != rows["tuned"]["id"]


def test_a_scorer_of_a_module_of_ones_own_is_a_row(launch):
    """And in Python it is an argument."""
    module, reads = "tests.memory.blocks.best", "model=pretrained retrieval.k=2 memory.window=32"
    scorers = {"best": module, "worse": f"{{name: {module}, least: 0.0}}", "mean": "mean_key"}
    rows = ", ".join(f'{name}: "{reads} retrieval.scorer={scorer!r}"' for name, scorer in scorers.items())
    output, found = launch(f"+rows={{{rows}}}")
    assert found["best"]["settings"]["scorer"] == module
    assert found["mean"]["settings"]["scorer"] == "mean_key"
    assert len({found[name]["results"]["nll"] for name in scorers}) == 3
    model, _ = load_wrapped(output / "tiny")
    with pytest.raises(UserError, match="has no setting lest; it has least"):
        model.new_memory(scorer={"name": module, "lest": 1})
    ids = torch.arange(200)[None] % 90
    memories = [model.new_memory(dense=0, k=2, window=32, scorer=each) for each in (module, Best(), "mean_key")]
    logits = [model(ids, past_key_values=memory).logits for memory in memories]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert BlockCacheSettings(scorer=Best(0.5)).saved()["scorer"] == {"name": module, "least": 0.5}


def test_a_model_that_cannot_have_landmarks_is_refused_before_another_row_trains(launch, tmp_path):
    save_model(folder := tmp_path / "windows")
    said = json.loads((folder / "config.json").read_text())
    said |= {"model_type": "mistral", "sliding_window": 16, "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said))
    rows = "+rows={plain: 'model=pretrained_base model.as_is=false', landmark: 'model=pretrained_landmark'}"
    with pytest.raises(UserError, match="every layer has a sliding window of 16"):
        launch(rows, f"output={tmp_path}", name=folder)
    assert not (tmp_path / "runs").exists()


def test_the_training_is_one_run_of_a_plan_and_of_task_train(launch, capsys):
    launch(LISTED, "task=train")  # which other tests may have done
    capsys.readouterr()
    launch(LISTED, "task=train")
    said = capsys.readouterr().out
    assert said.count("trained before") == 1
    with pytest.raises(UserError, match="task=train: single trains nothing"):
        launch("model=pretrained", "task=train")
    launch(LISTED, "row=tuned", "train.steps=3", "task=plan")
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in said if line[:1] == ["run"]] == ["missing"]
    assert [line[2] for line in said if line[:2] == ["row", "tuned"]] == ["missing"]


def test_a_trained_model_is_read_in_the_type_that_is_named(launch):
    output, rows = launch(LISTED, "row=training")
    whole = rows["training"]
    launch(LISTED, "row=training", "model.dtype=bfloat16")
    records = [json.loads(path.read_text()) for path in (output / "records" / "rows").glob("*.json")]
    (halves,) = (record for record in records if record["settings"].get("dtype") == "bfloat16")
    assert halves["settings"] == whole["settings"] | {"dtype": "bfloat16"}
    assert 0 < abs(halves["results"]["nll"] - whole["results"]["nll"]) < 0.05
    config = to_config(compose_conf([*SETTINGS, "model=pretrained_base", f"model.name={output / 'tiny'}"]))
    for dtype in (None, "bfloat16"):
        config.model.as_is, config.model.dtype = False, dtype
        model, _ = load_trained(config, Path(whole["labels"]["run"]), Inputs())
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype or "float32")}
