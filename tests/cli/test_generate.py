"""`task=generate`: what stands on the screen is what the model generates, a book is read once and asked again."""

import io
import sys

import pytest
import torch

from landmark.cli import main as app
from landmark.config import to_config
from landmark.data import load_tokenizer
from landmark.data.sources import read_text
from landmark.models import save
from landmark.models.language_model import Sampling
from landmark.utils.errors import UserError
from landmark.utils.files import write_json
from tests.configurations import compose_conf
from tests.saved import saved_run

TOKENIZER = load_tokenizer("bytes")
BOOK, QUESTION = "It was the best of times, it was the worst of times. " * 9, "What was it? "


@pytest.fixture
def ask(tmp_path, capsys):
    """Runs the task; returns what was printed, and what was said of it."""
    model = saved_run(tmp_path / "run")
    (tmp_path / "book.txt").write_text(BOOK)

    def run(*overrides):
        common = ["task=generate", f"run={tmp_path / 'run'}", "tokenizer=bytes", "trainer=cpu", "generate.tokens=30"]
        overrides = [
            *common,
            f"output={tmp_path / 'outputs'}",
            *([] if "+experiment=figure3_passkey" in overrides else ["eval.local=50"]),
            *overrides,
        ]
        app.run(to_config(compose_conf(overrides)), overrides, compose_conf)
        printed = capsys.readouterr()
        return printed.out, printed.err.splitlines()[-1]

    run.model = model
    run.folder = tmp_path
    return run


def expected(model, *texts, sampling=None, **settings):
    """What follows the texts, each read in chunks of its own, until the end of a text."""
    memory = model.new_memory(**settings) if model.config.kind == "landmark" else None
    for text in texts[:-1]:
        model.generate([TOKENIZER.encode(text)], 0, local=50, memory=memory)
    generated = model.generate(
        [TOKENIZER.encode(texts[-1])], 30, local=50, memory=memory, sampling=sampling, stop=[TOKENIZER.eot]
    )
    return TOKENIZER.decode(generated[0]) + "\n"


def test_a_prompt_is_gone_on_from(ask):
    said, statistics = ask("prompt=It was", "retrieval.k=2")
    assert said == expected(ask.model, "It was", k=2)
    assert len(set(said)) > 5
    assert statistics.startswith("6 tokens read in ")
    assert "30 generated" in statistics


@pytest.mark.parametrize("tier", ["device", "cpu", "disk"])
def test_a_book_read_now_or_loaded_gives_the_same_answer(ask, tier):
    book, question = f"prompt_file={ask.folder / 'book.txt'}", f"prompt={QUESTION.strip()}"
    now, _ = ask(book, question, "retrieval.k=2")
    assert now == expected(ask.model, BOOK, QUESTION.strip(), k=2)
    nothing, statistics = ask(book, f"memory.save={ask.folder / 'memory'}", f"memory.tier={tier}", "retrieval.k=2")
    assert nothing == "\n"
    assert statistics.startswith(f"{len(BOOK)} tokens read")
    for _ in range(2):
        later, statistics = ask(
            question, f"memory.load={ask.folder / 'memory'}", "retrieval.k=2", f"memory.tier={tier}"
        )
        assert later == now
        assert statistics.startswith(f"{len(QUESTION.strip())} tokens read")
    both, _ = ask(book, question, f"memory.save={ask.folder / 'again'}", "retrieval.k=2")
    assert both == now


def test_a_file_alone_is_gone_on_from(ask, monkeypatch):
    said, _ = ask(f"prompt_file={ask.folder / 'book.txt'}")
    assert said == expected(ask.model, BOOK)
    monkeypatch.setattr(sys, "stdin", io.StringIO(BOOK))
    assert ask("prompt_file=-")[0] == said


def test_sampling_is_that_of_the_settings(ask):
    settings = ["prompt=It was", "generate.temperature=1.2", "generate.top_k=9", "generate.top_p=0.8", "seed=3"]
    assert ask(*settings)[0] == expected(ask.model, "It was", sampling=Sampling(1.2, 9, 0.8, 3))


def test_a_stop_text_ends_it(ask):
    whole = ask("prompt=It was")[0]
    letter = next(letter for letter in whole[5:] if letter.isalnum())
    assert ask("prompt=It was", f"generate.stop=[{letter}]")[0] == whole[: whole.index(letter)] + "\n"


def test_a_plain_transformer_reads_both(ask):
    model = saved_run(ask.folder / "plain", "transformer")
    (ask.folder / "short.txt").write_text("It was ")
    said, _ = ask(
        f"run={ask.folder / 'plain'}", "model=transformer", "eval.local=null", "prompt=the best",
        f"prompt_file={ask.folder / 'short.txt'}",
    )  # fmt: skip
    assert said == expected(model, "It was the best")
    with pytest.raises(UserError, match="only a landmark model has a memory to save"):
        ask(f"run={ask.folder / 'plain'}", f"prompt_file={ask.folder / 'short.txt'}", "memory.save=x")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompt=''"], "prompt 0 is empty"),
        (["prompt_file=/dev/zero"], r"prompt_file=/dev/zero: is a device, name a file \(- for standard input\)"),
        (["prompt=hello", "generate.stop=[end]"], "generate.stop: 'end' is 3 tokens of tokenizer=bytes"),
    ],
)
def test_bad_input_is_refused(ask, overrides, said):
    with pytest.raises(UserError, match=said):
        ask(*overrides)


def test_a_mark_of_the_byte_order_is_no_text(ask):
    (ask.folder / "book.txt").write_bytes(b"\xef\xbb\xbfIt was")
    assert ask(f"prompt_file={ask.folder / 'book.txt'}")[0] == expected(ask.model, "It was")
    assert read_text(ask.folder / "book.txt") == "It was"


def test_text_that_is_none_is_refused(ask):
    (ask.folder / "book.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match="book.txt: is not text in UTF-8"):
        ask(f"prompt_file={ask.folder / 'book.txt'}")


def test_a_run_of_another_tokenizer_is_refused(ask):
    write_json(ask.folder / "run" / "run.json", {"model": {}, "tokenizer": "f" * 64})
    with pytest.raises(UserError, match="was trained with another tokenizer .ffffffffff….* than tokenizer=bytes"):
        ask("prompt=hello")


def test_a_memory_of_another_run_is_refused(ask):
    ask(f"prompt_file={ask.folder / 'book.txt'}", f"memory.save={ask.folder / 'memory'}")
    with torch.no_grad():
        ask.model.norm.weight[0] += 1
    save(ask.model, ask.folder / "run")
    with pytest.raises(UserError, match="was read by another model"):
        ask("prompt=hello", f"memory.load={ask.folder / 'memory'}")


def test_a_pretrained_model_reads_without_training(ask, tmp_path):
    """As `wrap` without landmarks; the memory of a book is saved and asked too."""
    pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
    from landmark.huggingface import wrap
    from tests.huggingface.conftest import make_model, make_tokenizer

    folder, tokenizer = tmp_path / "pretrained", make_tokenizer()
    make_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"k": 2, "window": 9, "rerank": 4, "first": 1}
    model = wrap(make_model("llama"), tokenizer, block_size=6, memory=settings, local=50, landmarks="none")
    own = ["run=null", "model=pretrained", f"model.name={folder}", "tokenizer=pretrained", "generate.tokens=12"]
    own += ["model.block_size=6", "memory.window=9", "retrieval.k=2", "retrieval.rerank=4"]
    said, statistics = ask(*own, f"prompt_file={ask.folder / 'book.txt'}")
    ids = torch.tensor([tokenizer(BOOK)["input_ids"]])
    generated = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert said.startswith(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)[:3])
    assert statistics.startswith(f"{len(BOOK)} tokens read")
    assert f"memory of {(len(BOOK) + 11) // 6} blocks" in statistics
    book, question = f"memory.save={ask.folder / 'kept'}", f"prompt={QUESTION.strip()}"
    now, _ = ask(*own, f"prompt_file={ask.folder / 'book.txt'}", question, book)
    assert ask(*own, f"memory.load={ask.folder / 'kept'}", question)[0] == now
