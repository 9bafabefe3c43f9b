"""100 bad commands and 100 damaged files, drawn: none ends in a traceback, with a wrong number, or never.
ATTACK_SEED=… draws others, ATTACK_COUNT=… draws more."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import landmark
from landmark.cli import main as app
from landmark.cli.terminal import said
from landmark.experiment.config import to_config
from landmark.experiment.config.schema import TASKS
from landmark.experiment.data.stream import open_corpus
from landmark.experiment.results import render, tables
from landmark.experiment.runs.records import Records
from landmark.experiment.training.checkpointing import AtomicCheckpointIO, find_checkpoint
from landmark.models.huggingface.teaching import Teaching, TeachSettings
from landmark.reading.answering import Answering
from landmark.reading.session import Prompt, Session
from landmark.utils.files import HASHES, sealed
from landmark.utils.metrics_csv import metrics_so_far
from tests.configurations import compose_conf
from tests.saved import hash_again, saved_run
from tests.workplace import Workplace, run_task

COUNT = int(os.environ.get("ATTACK_COUNT", 100))  # of each kind
SECONDS = 120  # after which a case counts as one that never ends
SEED = int(os.environ.get("ATTACK_SEED", 0))
VALUES = ("nan", "inf", "-inf", "-1", "0", "1e30", "1e-320", "99999999999999999999", "''", "null", "[]", "[null]")
VALUES += ("true", "[nan]", "[-1]", "'\udcff'", "nope", "${nope}", "${size}", "${rows}", "???", "0.5", "'a/../b'", "{}")
VALUES += ("[0,0]", "{a: 1}", "[[1]]", "'\x1b[2J'", "'\n'", "{", "1,2", "range(1,3)", "glob(*)", "@", "${seed}", "x y")
FLAGS = ("-m", "--info", "--cfg=hydra", "--config-dir=nowhere", "-x", "--", "--multirun=1", "-sc", "--task=plan")
BASE = ("data=stdlib", "tokenizer=bytes", "size=nano", "task=plan")
CHECKPOINT = {"global_step": 1, "settings": {"seed": 3}, "state": torch.ones(9)}
TEACH = TeachSettings(length=96, steps=2, queries=20, vectors=2)
OUTSIDE = ("model.name", "tokenizer.file", "task")  # read from the hub; what is asked for


@contextlib.contextmanager
def ending(case: object) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"{case} does not end; seed {SEED}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration."""
    for key in config:
        yield f"{prefix}{key}"
        if isinstance(config._get_node(key), DictConfig) and not config._get_node(key)._is_none():  # pyright: ignore
            yield from keys(config[key], f"{prefix}{key}.")


def bad_command(draw: random.Random, every: list[str]) -> list[str]:
    key, value, other = draw.choice(every), draw.choice(VALUES), draw.choice(every)
    letters = "".join(draw.choice("abc=+~[]{}$,:'\"\\ .-@/\x00\x1b\né") for _ in range(draw.randrange(1, 12)))
    wrong = draw.choice((
        *[[f"{key}={value}"]] * 6,
        [f"{key}=${{{other}}}"], [f"+{key}={value}"], [f"++{key}={value}"], [f"~{key}"], [key], [f"{key}@x={value}"],
        [f"+rows.a={key}={value}"], [f"+rows.{value}=model=landmark"],
        [f"{key}={value}", f"{other}={draw.choice(VALUES)}"], [letters], [draw.choice(FLAGS)],
        ["-m", f"{key}={value},1"], ["-m", "retrieval.k=1,2", f"hydra.launcher.{key}={value}"],
        ["-m", "retrieval.k=1,2", "hydra/launcher=submitit_slurm", f"hydra.launcher.comment={value}"],
        [f"hydra.{key}={value}"], [f"+experiment={value}"], ["+experiment=table1_pg19", f"{key}={value}"],
        [draw.choice([*TASKS])],
    ))  # fmt: skip
    return [*BASE, f"model={draw.choice(('landmark', 'transformer', 'transformer_xl', 'pretrained'))}", *wrong]


def test_bad_commands(here):
    draw = random.Random(SEED)
    every = [key for key in keys(compose_conf([])) if key not in OUTSIDE]
    for _ in range(COUNT):
        words = bad_command(draw, every)
        case = f"{words!a}; seed {SEED}"
        with ending(case):
            ended = here(*words)
        assert "Traceback" not in ended.err, f"{case}\n{ended.err}"
        assert ended.code in (0, 2), case
        said = ended.err.count("error: ")  # a sweep names each job that fails
        assert ended.code == 0 or said == 1 or ("-m" in words and said), f"{case}\n{ended.err}"
        wrong = r"\b(nan|inf) ?(([KMG]B?|B|m?s|min|h|FLOPs|nats|tokens)\b|%|±)"
        assert not re.search(wrong, ended.out), f"{case}\n{ended.out}"


@pytest.fixture
def whole(tmp_path, monkeypatch, books) -> Path:
    """A folder with one of each kind of file that this program writes, or reads from others."""
    from tests.models.huggingface.conftest import save_model

    home = tmp_path / "whole"
    work = Workplace(books, home / "outputs", monkeypatch)
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    settings = ["data=stdlib", "tokenizer=bytes", "size=nano", "model=landmark", "model.block_size=20"]
    memory = (model := saved_run(home / "run", config=to_config(compose_conf(settings)))).new_memory(k=2)
    model.generate([list(b"A heron stands in the water. " * 9)], 0, local=50, memory=memory)
    memory.save(home / "memory")
    save_model(home / "transformers")
    (home / "book.txt").write_text("A heron stands in the water.\n\nThe keeper of the lamp is called Petronella. " * 9)
    begun = Session(reader())
    begun.read(home / "book.txt")
    begun.messages = [{"role": "user", "content": "Who waits?"}, {"role": "assistant", "content": "A heron."}]
    begun.save(home / "reading")
    teaching = Teaching(reader().model, TEACH)
    teaching.learn([*range(96)])
    teaching.done.save(home / "landmarks" / "taught.safetensors")
    teaching.save_state(home / "landmarks" / "teaching.safetensors")
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, home / "checkpoints" / "step-00000001.ckpt")
    (home / "mine" / "experiment").mkdir(parents=True)
    (home / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\nrows:\n  a: model=landmark\n")
    return home


def records(home: Path) -> object:
    contents = Records(home / "outputs").read_all()
    if not contents.rows:
        return None
    table = tables.build("t", {record["labels"]["row"]: [record] for record in contents.rows.values()})
    render.as_text(table), render.as_csv(table)
    return [row.perplexity for row in table.rows]


def run(home: Path) -> object:
    model, tokenizer = landmark.load(home / "run")
    return model.forward(torch.tensor([tokenizer.encode("A heron").tolist()])).sum().item()


def memory(home: Path) -> object:
    (cache := landmark.load(home / "run")[0].new_memory(k=2)).load(home / "memory")
    return cache.position, cache.attend(0, *(torch.ones(1, 2, 1, 8) for _ in range(3))).sum().item()


def corpus(home: Path) -> object:
    (folder,) = (each for each in (home / "outputs" / "data").iterdir() if each.is_dir())
    whole = open_corpus(folder)
    return [(int(whole.split(name).tokens.sum()), whole.manifest["splits"][name]) for name in ("train", "test")]


def checkpoint(home: Path) -> object:
    if found := find_checkpoint(home / "checkpoints", {"seed": 3}):
        return AtomicCheckpointIO().load_checkpoint(found[0])["state"].sum().item()
    return None


def own_settings(home: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", "--config-dir", str(home / "mine"), "+experiment=own", *BASE])
        try:
            app.main()
        except SystemExit as end:  # of a line that Hydra has printed
            if end.code not in (None, 0, 2):
                raise AssertionError(end.code) from end
    return None


def metrics(home: Path) -> object:
    (folder,) = (home / "outputs" / "runs").iterdir()
    return metrics_so_far(folder)[:3]


def transformers(home: Path) -> object:
    from landmark.models.huggingface import load

    model, tokenizer = load(home / "transformers")
    ids = tokenizer("A heron")["input_ids"] or [0]  # a damaged tokenizer may find nothing, or ids that the model lacks
    return model(torch.tensor([ids]).clamp(max=model.config.vocab_size - 1)).logits.sum().item()


@cache
def reader() -> Answering:
    """A model with sliding windows, which reads without landmarks."""
    from tests.models.huggingface.conftest import FREE, make_tokenizer, wrapped_model

    return Answering(wrapped_model("gemma3", **FREE), make_tokenizer())


def reading(home: Path) -> object:
    loaded = Session(reader()).load(home / "reading")
    ids = loaded.exchange(Prompt(loaded.messages)).ids
    texts = [(start, document.text, document.name) for start, document in loaded.documents()]
    return loaded.messages, texts, ids, loaded.answer("Who is called so?", tokens=3)


def landmarks(home: Path) -> object:
    model, text = reader().model, torch.arange(200)[None]
    scorer = {"name": "landmarks", "file": str(home / "landmarks" / "taught.safetensors")}
    memory = model.new_memory(k=1, dense=0, window=0, scorer=scorer)
    return model(text, past_key_values=memory).logits.sum().item()


def teaching(home: Path) -> object:
    began = Teaching(reader().model, TEACH)
    if not began.load_state(home / "landmarks" / "teaching.safetensors"):
        return None
    return began.step, sum(began.learn([*range(96)]).values())


def status(home: Path) -> object:
    run_task(f"output={home / 'outputs'}", "task=status")
    return None


READERS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "outputs/records": (records, status),
    "outputs/data": (corpus,),
    "outputs/runs": (metrics, status),
    "run": (run,),
    "memory": (memory,),
    "transformers": (transformers,),
    "reading": (reading,),
    "landmarks": (landmarks, teaching),
    "checkpoints": (checkpoint,),
    "mine": (own_settings,),
}


def edited(draw: random.Random, content: bytes) -> bytes:
    """JSON with a key that is gone or another, a tensor that is gone or shorter, or a byte that is another."""
    with contextlib.suppress(SafetensorError):
        tensors = load_tensors(content)
        tensor = tensors.pop(name := draw.choice(sorted(tensors)))
        return save_tensors(tensors | ({name: tensor.flatten()[:1]} if draw.random() < 0.5 else {}))
    try:
        at = value = json.loads(content)
    except ValueError:
        return content.replace(content[3:4], b"7")
    while isinstance(at, dict) and at:
        key = draw.choice(sorted(at))
        if not isinstance(at[key], dict) or not at[key] or draw.random() < 0.3:
            new: Any = draw.choice((None, [], {}, 3, -1, 0, 1e300, float("nan"), float("inf"), "x\x1b", "../..", True))
            at.update({key: new}) if draw.random() < 0.8 else at.pop(key)
            break
        at = at[key]
    return json.dumps(value).encode()


def damage(draw: random.Random, path: Path) -> str:
    """Damage a file as a disk, a hand, or a stranger does. Returns how."""
    kinds = "cut", "bits", "gone", "folder", "pipe", "device", "loop"
    content, kind = path.read_bytes(), draw.choice([*kinds, *["edited"] * len(kinds)])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content) or 1)])
    elif kind == "bits":
        changed = bytearray(content or b"\0")
        for _ in range(draw.choice((1, 100))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif kind == "edited":
        path.write_bytes(edited(draw, content))
    return kind


def on_purpose(path: Path) -> None:
    """Make the hashes fit what is there, as somebody does who means harm."""
    for name in (HASHES, "memory.sha256"):
        if path.name != name and (path.parent / name).is_file():
            hash_again(path.parent, name)
    with contextlib.suppress(ValueError, AttributeError):
        value = json.loads(path.read_bytes())
        if "sha256" in value:
            path.write_text(json.dumps(sealed(value)))


def test_damaged_files(whole, tmp_path, here):
    draw, home = random.Random(SEED), tmp_path / "damaged"
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    readers = {file: each for file in files for place, each in READERS.items() if file.is_relative_to(place)}
    expected = {each: each(whole) for found in readers.values() for each in found}
    shutil.copytree(whole, home)
    for _ in range(COUNT):
        file = draw.choice([*readers])
        kind = damage(draw, home / file)
        is_meant = kind == "edited" and draw.random() < 0.5 and "records" not in file.parts
        case = f"{file} {kind}{' with its hashes' * is_meant}; seed {SEED}"
        with ending(case):
            if is_meant:
                on_purpose(home / file)
            for read in readers[file]:
                found, fault = None, "one line"
                try:
                    found = read(home)
                except Exception as error:
                    fault = said(error)
                assert fault is not None, case
                if not is_meant and read not in (metrics, transformers):
                    assert found in (None, expected[read]), f"{case}: {found} in place of {expected[read]}"
        place = Path(next(place for place in READERS if file.is_relative_to(place)))
        shutil.rmtree(home / place)
        shutil.copytree(whole / place, home / place)
