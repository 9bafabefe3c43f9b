"""A training step: forward, backward and AdamW.

The landmark model is compared with the plain transformer, and the model with a context miss token with the landmark
model.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device

from benchmarks.report import Report, Row, Target, compare, milliseconds
from benchmarks.settings import GPT2Vocabulary, Options, Say, composed
from benchmarks.timing import interleave
from landmark.experiment.config import Config
from landmark.experiment.data import load_tokenizer
from landmark.experiment.data.windows import ControlledLandmarks, TrainingWindows
from landmark.experiment.training.optimization import make_optimizer
from landmark.models import build
from landmark.utils.window_batch import most_blocks

PLAIN, LANDMARK, CMT = "plain transformer", "landmark", "landmark, context miss token"
MODELS = {PLAIN: ["model=transformer"], LANDMARK: ["model=landmark"], CMT: ["model=landmark", "cmt=on"]}
ROUNDS = {"nano": 15, "small": 3}
STREAM = 5_000_000  # tokens in the stream that windows are cut from


def run(options: Options, say: Say) -> Report:
    rows: list[Row] = []
    for size, rounds in ROUNDS.items():
        say(f"{size}: training step")
        configs = {name: configuration(size, model, options.quick) for name, model in MODELS.items()}
        steps = {name: training_step(config) for name, config in configs.items()}
        seconds = interleave(steps, rounds=2 if options.quick else rounds)
        shape = configs[PLAIN].train
        setting = f"{size}, {shape.batch_size} × {shape.length}"
        taken = milliseconds(seconds)
        pair = {name: taken[name] for name in (PLAIN, LANDMARK)}
        rows += compare("training", setting, "ms", pair, PLAIN, {LANDMARK: Target("≤", 1.15)})
        pair = {name: taken[name] for name in (LANDMARK, CMT)}
        rows += compare("training", setting, "ms", pair, LANDMARK, {CMT: Target("≤", 1.1)})[1:]
    return Report(rows)


def configuration(size: str, model: list[str], quick: bool) -> Config:
    """The recipe of a size with a batch of 4. nano uses the tokenizer `bytes`."""
    tokenizer = "bytes" if size == "nano" else "gpt2"
    width = ["model.num_layers=1", "model.mlp_dim=64", "model.num_heads=2", "model.head_dim=8"]
    tiny = [*width, "train.length=128"] if quick else []
    return composed(f"size={size}", *model, f"tokenizer={tokenizer}", "train.batch_size=4", *tiny)


def training_step(config: Config, device: str = "cpu") -> Callable[[], None]:
    """A function that takes one optimizer step on the next batch; on a GPU with bfloat16 autocast."""
    model = build(config.model, vocabulary(config), config.cmt.enabled).to(device)
    optimizer = make_optimizer(model, config.train)
    batches: Iterator = map(windows(config).batch, count())
    if config.cmt.enabled and config.model.block_size is not None:
        blocks = most_blocks(config.train.length, config.model.block_size)
        controlled = ControlledLandmarks(config.model.num_layers, blocks)
        batches = (
            replace(batch, controlled=controlled.for_step(config.seed, step, range(len(batch))))
            for step, batch in enumerate(batches)
        )

    def step() -> None:
        batch = move_data_to_device(next(batches), device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            for loss, targets in model.window_losses(batch):
                (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def windows(config: Config) -> TrainingWindows:
    """Windows of random tokens, cut as in training."""
    tokens = vocabulary(config)
    stream = np.random.default_rng(0).integers(0, tokens.eot, STREAM, dtype=np.uint16)
    return TrainingWindows(
        stream,
        length=config.train.length,
        batch_size=config.train.batch_size,
        seed=config.seed,
        block_size=config.model.block_size if config.model.kind == "landmark" else None,
        landmark=tokens.landmark,
        eot=tokens.eot,
    )


def vocabulary(config: Config):
    return load_tokenizer("bytes") if config.tokenizer.name == "bytes" else GPT2Vocabulary()
