"""Small trained models on disk, as a training leaves them, and changed on purpose."""

import json
from pathlib import Path
from typing import Any

import torch

from landmark.experiment.config import Config
from landmark.experiment.config.saved import write_launch
from landmark.experiment.data import load_tokenizer
from landmark.models import Decoder, DecoderConfig, save
from landmark.utils.files import HASHES, write_hashes, write_json
from tests.configurations import decoder_config


def random_decoder(config: DecoderConfig, std: float = 0.5) -> Decoder:
    """The same weights each time, large enough that the text decides what comes next."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def saved_run(
    folder: Path, kind: str = "landmark", config: Config | None = None, tokenizer: str = "bytes", block_size: int = 20
) -> Decoder:
    """A run's folder. config: that its launch.json names; None: it has none."""
    vocabulary = load_tokenizer(tokenizer)
    shape = decoder_config(
        kind, vocabulary.vocab_size, num_layers=2, num_heads=2, head_dim=8, mlp_dim=16,
        landmark_id=vocabulary.landmark, block_size=block_size,
    )  # fmt: skip
    model = random_decoder(shape)
    with torch.no_grad():
        model.embedding.weight[128:] = 0  # says ASCII
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", {"model": {}, "tokenizer": vocabulary.hash})
    if config is not None:
        write_launch(folder, config)
    save(model, folder, beside=("run.json", "launch.json"))
    return model


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a model's JSON, and its hash with it, as somebody would who does it on purpose."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    hash_again(path.parent)


def hash_again(folder: Path, name: str = HASHES) -> None:
    files = [line.split("  ")[1] for line in (folder / name).read_text().splitlines()]
    write_hashes(folder, files, name)
