"""Composed configurations and made-up records."""

import functools
import math
import pickle
import random
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from landmark.experiment.config import Config, register
from landmark.experiment.config.checks import resolve
from landmark.experiment.runs.identity import digest, row_settings
from landmark.models.config import DecoderConfig
from landmark.utils.files import sealed

CONF = Path(__file__).parents[1] / "conf"
SMALL = [  # a model, its training and what stands around them
    *("model.num_layers=1", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "trainer.threads=1"),
    *("train.steps=2", "train.batch_size=2", "train.validate_every=2", "train.validate_batches=1"),
    *("logger=csv", "trainer=cpu"),
]
TINY = ["+experiment=quickstart", "data.max_documents=6", "eval.tokens=8192", *SMALL]  # one row, in a second


def compose_conf(overrides: list[str]) -> DictConfig:
    """Compose conf/config.yaml with overrides, outside a Hydra job."""
    return pickle.loads(_composed(tuple(overrides)))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> bytes:
    _register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(compose(config_name="config", overrides=list(overrides)))


_register = functools.cache(register)


def row_record(config: Config, row: str, perplexity: float) -> dict[str, Any]:
    """A row's record as an evaluation would leave it, on 24 stretches of text."""
    settings = row_settings(resolve(config), f"run-{config.model.kind}-{config.seed}", "stream")
    noise = random.Random(f"{row}{config.seed}")
    nll = math.log(perplexity)
    labels = {"size": config.size, "data": config.data.name, "tokenizer": config.tokenizer.name, "seed": config.seed}
    labels |= {"block_size": config.model.block_size, "row": row, "run": "outputs/runs/made-up"}
    results = {"tokens": 24 * 4096, "nll": nll, "perplexity": perplexity}
    results |= {"bits_per_byte": nll / math.log(2) / 4.2, "word_perplexity": perplexity**1.4, "keys_attended": 300.0}
    results |= {"tokens_per_second": 12345.6, "seconds": 8.0, "peak_memory_bytes": 10**9}
    results["segments"] = [[4096 * i, 4096, 4096 * (nll + noise.gauss(0, 0.002))] for i in range(24)]
    provenance = {"commit": "0123456789abcdef", "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": None}}
    provenance |= {"hardware": {"cpu": "an abacus", "cores": 2}, "command": "python run.py +experiment=made_up"}
    parts = {"settings": settings, "labels": labels, "results": results, "provenance": provenance}
    return sealed({"id": digest(settings), **parts})


def decoder_config(kind, vocab_size, num_layers, num_heads, head_dim, mlp_dim, **flat) -> DecoderConfig:
    """A decoder by the names of its settings."""
    shape = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": head_dim, "mlp_dim": mlp_dim}
    return DecoderConfig.from_flat({"kind": kind, "vocab_size": vocab_size, **shape, **flat})


def changed(config: DecoderConfig, **flat) -> DecoderConfig:
    """The configuration with some settings by their names."""
    return DecoderConfig.from_flat(config.to_flat() | flat)
