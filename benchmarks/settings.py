"""Options, threads and configurations that all parts share."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.source_tree import ROOT

if TYPE_CHECKING:
    from landmark.experiment.config import Config

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
BLOCK_SIZE = 50
VOCABULARY = 320  # of bytes

Say = Callable[[str], None]


def progress(started: float, about: str = "") -> Say:
    """Prints messages of a benchmark with the seconds since it began. about: before each message."""

    def say(text: str) -> None:
        print(f"{time.time() - started:6.0f} s  {about}{text}", flush=True)

    return say


@dataclass(frozen=True)
class Options:
    """quick: tiny shapes and few runs. text: folder to tokenise (None: Python's standard library). ranks: GPT-2's ranks
    file (None: nothing is tokenised)."""

    quick: bool = False
    text: Path | None = None
    ranks: Path | None = None


@dataclass(frozen=True)
class GPT2Vocabulary:
    """The sizes and ids of GPT-2's tokenizer that models and windows need; the ranks are not needed."""

    vocab_size: int = 50304
    eot: int = 50256
    landmark: int = 50260


class Headless(Decoder):
    """A decoder whose calls return final hidden states instead of logits."""

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


class Widths(Protocol):
    """The shape of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...


def decoder(size: Widths, kind: str) -> Headless:
    """A model of bytes with random weights, "landmark" or "transformer"."""
    shape = VOCABULARY, size.num_layers, size.num_heads, size.head_dim, size.mlp_dim
    landmarks = Landmarks(257, BLOCK_SIZE) if kind == "landmark" else None
    return Headless(DecoderConfig(*shape, landmarks=landmarks)).eval()


def use_threads() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)


def composed(*overrides: str) -> "Config":
    """The configuration of `python run.py` with these overrides. Hydra is imported here: timings need none."""
    from hydra import compose, initialize_config_dir

    from landmark.experiment.config import register, to_config

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return to_config(compose("config", overrides=list(overrides)))
