"""A training small enough for a test, of each kind of model."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from landmark.experiment.config.schema import (
    CmtConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PositionsConfig,
    TokenizerConfig,
    TrainConfig,
    TrainerConfig,
)
from landmark.experiment.data.stream import Corpus
from landmark.experiment.data.tokenizers import load_tokenizer
from landmark.experiment.runs.identity import run_settings
from landmark.experiment.training import train
from landmark.experiment.training.lightning_module import LanguageModelTraining
from landmark.models import build
from landmark.utils.files import write_atomic

EXTRAS = "landmark_extras"  # with a context miss token, positional jumps, and all that makes models look back
LOOKING_BACK = {"key_offset": 0.5, "rotary_fraction": 0.5, "landmark_key": "mean", "landmark_bias": True}
LOOKING_BACK |= {"qk_norm": True, "initialisation": "fan_in"}
MASKED = "landmark_mlm"
KINDS = ("transformer", "landmark", "transformer_xl", EXTRAS)
TOKENIZER = load_tokenizer("bytes")


def make_config(kind: str, **changes: Any) -> Config:
    """Two layers, 40 steps; logs, validation and checkpoints fall on different steps."""
    extras, masked, kind = kind == EXTRAS, kind == MASKED, "landmark" if kind in (EXTRAS, MASKED) else kind
    model = ModelConfig(
        kind=kind,
        num_layers=2,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        block_size=5 if kind == "landmark" else None,
        window=16 if kind == "transformer_xl" else None,
        cache=16 if kind == "transformer_xl" else None,
        masked=True if masked else None,
        **(LOOKING_BACK if extras else {}),
    )
    settings = {"steps": 40, "batch_size": 4, "micro_batch": 3, "length": 48}
    settings |= {"muon_lr": 1e-2} if extras else {}
    settings |= {"log_every": 3, "validate_every": 10, "validate_batches": 2, "checkpoint_every": 8}
    return Config(
        size="test",
        seed=7,
        model=model,
        data=DataConfig(name="random", cache="", repeats=[1.0, 0.5] if extras else None),
        tokenizer=TokenizerConfig(name="bytes"),
        train=TrainConfig(**(settings | changes)),
        trainer=TrainerConfig(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), threads=1),
        cmt=CmtConfig(enabled=extras),
        positions=PositionsConfig(p_jump=10) if extras else PositionsConfig(),
        eval=EvalConfig(split="test"),
    )


def make_corpus(folder: Path) -> Corpus:
    """Text of few letters, with end of text now and then."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for seed, split in enumerate(("train", "validation", "test")):
        tokens = np.random.default_rng(seed).integers(97, 105, 4000).astype("<u2")
        tokens[::400] = TOKENIZER.eot
        if not (folder / f"{split}.bin").exists():
            write_atomic(folder / f"{split}.bin", tokens.tobytes())  # processes that train together make it at once
        splits[split] = {"file": f"{split}.bin", "sha256": f"of {split}", "documents": 10, "bytes": 4000, "words": 1}
    return Corpus(folder, {"dtype": "<u2", "splits": splits})


def make_model(config: Config):
    torch.manual_seed(config.seed)
    return build(config.model, TOKENIZER, config.cmt.enabled)


def run(config: Config, folder: Path, loggers: list | None = None) -> tuple[Any, dict[str, Any]]:
    """Train in folder/run; the model and its summary."""
    model = make_model(config)
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(folder / "data")
    return model, train(model, corpus, TOKENIZER, config, run_dir, loggers or [], identity_of(config, corpus))


def identity_of(config: Config, corpus: Corpus, start: str | None = None) -> dict[str, Any]:
    """The settings that decide the weights of a run."""
    return run_settings(config, TOKENIZER.hash, corpus.split("train").sha256, start)


class At(DummyLogger):
    """Does something when a step's measurements are logged, in every process, after metrics.csv has them."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.step, self.act = step, act

    def log_metrics(self, metrics, step=None, **_):
        if step == self.step:
            self.act()


def signals(number: int, step: int) -> At:
    return At(step, lambda: os.kill(os.getpid(), number))


def fails(step: int) -> At:

    def stop() -> None:
        raise KeyError("stop")

    return At(step, stop)


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for name, weight in a.state_dict().items():
        assert torch.equal(weight, b.state_dict()[name]), name


def train_and_die(kind: str, folder: Path, step: int) -> None:
    """In a process of its own: SIGKILL comes after `step` is logged."""
    run(make_config(kind), folder, [signals(signal.SIGKILL, step)])


def train_and_be_terminated(kind: str, folder: Path, step: int) -> None:
    """In several processes: SIGTERM comes in `step`, to the last one alone."""
    training_step = LanguageModelTraining.training_step

    def step_and_be_terminated(self, batch, batch_idx):
        if self.global_step == step - 1 and self.trainer.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, batch, batch_idx)

    LanguageModelTraining.training_step = step_and_be_terminated
    run(make_config(kind), folder)


def train_exactly(folder, kind, stop=None, strategy="auto", **changes):
    """In float64, so that sums in another order differ in the fifteenth digit and not the sixth."""
    config = make_config(kind, **{"steps": 24, "precision": "64-true"} | changes)
    config.trainer.strategy = strategy
    model = make_model(config)
    if config.train.precision != "bf16-mixed":
        model.double()  # a checkpoint's weights are read before Lightning makes them float64
    (folder / "run").mkdir(parents=True, exist_ok=True)
    loggers = [] if stop is None else [fails(stop)]
    with nullcontext() if stop is None else suppress(KeyError):
        corpus = make_corpus(folder / "data")
        train(model, corpus, TOKENIZER, config, folder / "run", loggers, identity_of(config, corpus))


def train_all(root, plan):
    """One after the other. plan: the kind of each by its folder, the step at which an error stops it, and settings."""
    for name, case in plan.items():
        train_exactly(root / name, **case)
