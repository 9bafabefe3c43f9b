"""Identity of a run or a row: a hash of all that decides its result, and of nothing else."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from landmark.experiment.config import SYNTHETIC, Config
from landmark.experiment.config.schema import CLIPPING, LANDMARKS, UNIQUE_BLOCKS, memory_settings
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.utils.constants import (
    ANSWER_WEIGHT,
    BETAS,
    DENSE_SHARE,
    PASSKEY_PROMPTS_VERSION,
    PASSKEY_VERSION,
    ROPE_BASE,
    RULER_SAMPLES_VERSION,
    RULER_VERSION,
)
from landmark.utils.errors import UserError
from landmark.utils.files import sha256_file
from landmark.utils.trust import module_sha256

# Raised by hand when the same settings give other numbers than before.
NUMERICS_VERSION = 1
ALPHA_VERSION = 2  # of models with `model.alpha`

_OPTIMISATION = (
    *("steps", "batch_size", "length", "cut_as", "precision"),
    *("muon_lr", "max_lr", "start_lr", "final_lr", "warmup", "weight_decay"),
)
# Lightning's callbacks that change no weight: a run with them is the same run.
_WATCHING = {
    *("LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor", "ModelCheckpoint", "ModelSummary"),
    *("RichModelSummary", "RichProgressBar", "TQDMProgressBar", "SpikeDetection"),
}
_PRETRAINED = ("kind", "block_size", "lora_rank")
_ALWAYS = ("max_blocks", "k", "granularity", "scorer")


def run_settings(
    config: Config, tokenizer_hash: str, stream_sha256: str, start: str | None = None, beginning: Sequence[int] = ()
) -> dict[str, Any]:
    """All that decides a run's weights: model, optimisation, precision, seed, tokenizer, training stream. start:
    identity of the weights that it starts from; None: drawn anew. beginning: ids that begin each window.
    """
    settings: dict[str, Any] = {"tokenizer": tokenizer_hash}
    if config.model.as_is:  # nothing is trained
        settings["model"] = {"kind": config.model.kind, "as_is": True, **_dtype(config)}
        if config.model.kind == "landmark":
            settings["model"]["block_size"] = config.model.block_size
    else:
        settings |= {"model": _model(config), "train": _optimisation(config), "seed": config.seed}
        settings |= {"stream": stream_sha256} | _training(config)
        if beginning:
            settings["beginning"] = list(beginning)
    if start is not None:
        settings["start"] = start
    if config.cmt.enabled:
        settings["cmt"] = True
    if config.positions.p_jump > 1:
        settings["positions"] = {"kind": "jumps", "p_jump": config.positions.p_jump}
    return settings


def _model(config: Config) -> dict[str, Any]:
    given = {key: value for key, value in asdict(config.model).items() if value is not None}
    if config.model.name is not None:  # its shape is its own
        landmarks = {"landmark_positions": False} if config.model.kind == "landmark" else {}
        return {key: given[key] for key in _PRETRAINED if key in given} | landmarks
    model = {key: value for key, value in given.items() if key not in ("backend", "name", "alpha")}
    joint = {"joint_softmax": config.model.alpha} if config.model.alpha else {}
    return model | joint | {"rope_base": ROPE_BASE}


def _optimisation(config: Config) -> dict[str, Any]:
    given = {key: value for key, value in asdict(config.train).items() if key in _OPTIMISATION and value is not None}
    muon = {} if config.train.muon_lr is None else {"optimizer": "muon"}
    return given | dict(zip(("beta1", "beta2"), BETAS, strict=True)) | muon


def _training(config: Config) -> dict[str, Any]:
    """What a training has that most have not."""
    data, own = config.data, config.model.architecture
    nodes = [node for node in config.callbacks.values() if node and "_target_" in node]
    clipping = {key: value for key in CLIPPING if (value := getattr(config.trainer, key)) is not None}
    settings = {
        "repeats": data.repeats,
        "joint_softmax": ALPHA_VERSION if config.model.alpha else None,
        "tasks": None if data.tasks is None else [data.tasks, ANSWER_WEIGHT, RULER_SAMPLES_VERSION],
        "passkeys": None if data.passkeys is None else [data.passkeys, DENSE_SHARE, ANSWER_WEIGHT, PASSKEY_VERSION],
        "trainer": clipping or None,
        "callbacks": [node for node in nodes if node["_target_"].rpartition(".")[2] not in _WATCHING] or None,
        "module": module_sha256(own, "model.architecture") if own is not None and "." in own else None,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _dtype(config: Config) -> dict[str, Any]:
    """Type and bits of the weights that a model of transformers reads with, where these are not float32."""
    dtype, bits = config.model.reading_dtype, config.model.bits
    return ({} if dtype == "float32" else {"dtype": dtype}) | ({} if bits is None else {"bits": bits})


def _memory_identity(config: Config) -> dict[str, Any]:
    """How a landmark model reads: of a memory's settings those in `_ALWAYS`, and those that are not the default."""
    memory, settings = memory_settings(config), {}
    if config.eval.task == UNIQUE_BLOCKS:
        settings["retrieval_statistics"] = True
    if isinstance(memory, BlockCacheSettings):
        hidden = [item.name for item in fields(memory) if not item.metadata.get("in_identity", True)]
        saved = {name: value for name, value in memory.saved().items() if name not in hidden}
        if (file := config.model.landmarks) is not None:
            if not Path(file).is_file():
                raise UserError(f"model.landmarks={file}: there is no such file, task=teach makes it")
            saved |= {"scorer": LANDMARKS, "landmarks": sha256_file(Path(file))}
        scorer = saved["scorer"] if isinstance(saved["scorer"], str) else str(saved["scorer"].get("name"))
        if "." in scorer:
            saved["module"] = module_sha256(scorer, "retrieval.scorer")
        return settings | {"k": memory.k, "blocks": None} | saved
    for item in fields(memory):
        value, said = getattr(memory, item.name), item.metadata
        other, values = said.get("needs", ("k", [memory.k]))
        is_told = item.name in _ALWAYS or (value != item.default and getattr(memory, other) in values)
        if is_told and said.get("in_identity", True):
            settings[said["key"].rpartition(".")[2]] = value
    if memory.scorer == "random" and config.seed and (config.run is not None or config.model.as_is):
        settings["seed"] = config.seed  # which the run's identity does not have
    if config.cmt.enabled:
        settings["cmt_cutoff"] = memory.cutoff
    return settings


def row_settings(config: Config, run: str, stream_sha256: str) -> dict[str, Any]:
    """Everything that decides a row's numbers: the run's identity, how it is read, the evaluated split; without
    settings that do not matter for the kind of model. config: `resolved` by `landmark.experiment.config.checks`.
    """
    kind = config.model.kind
    settings: dict[str, Any] = {
        "run": run,
        "model": kind,
        "eval_length": config.eval.length,
        "local": config.eval.local,
        "split": config.eval.split,
        "tokens": config.eval.tokens,
        "span": config.eval.span if config.eval.tokens is not None else None,
        "stream": stream_sha256,
        "numerics": NUMERICS_VERSION,
    }
    dtype = {} if config.model.as_is else _dtype(config)  # as_is, the run's settings have it
    settings |= dtype
    if config.data.name in SYNTHETIC:
        settings |= {"prompts": config.eval.prompts, "generated": config.eval.generated, "tokens": None, "span": None}
    if config.eval.probe is not None:
        settings |= {"probe": config.eval.probe, "prompts": config.eval.prompts, "tokens": None, "span": None}
    if config.eval.question is not None:
        asked = {"task": config.eval.task, "task_version": RULER_VERSION, "generated": config.eval.generated}
        if config.eval.task == "passkey":
            asked |= {"needles": config.data.needles, "task_version": PASSKEY_PROMPTS_VERSION}
        settings |= asked | {"prompts": config.eval.prompts, "tokens": None, "span": None}
    if config.model.name is not None:
        settings["beginning"] = True  # the ids that begin a text stand before each segment
    if kind == "landmark":
        settings |= _memory_identity(config)
    if kind == "transformer" and config.memory.window is not None:
        settings |= {"window": config.memory.window, "sinks": config.memory.sinks}
    if kind == "transformer_xl":
        settings["cache"] = config.model.cache
    if config.model.masked:
        settings["masked"] = True
    return settings


def digest(settings: dict[str, Any]) -> str:
    """Ten hexadecimal digits, the same for equal settings whatever their order."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def run_name(config: Config, run_id: str) -> str:
    """Name of a run's folder below outputs/runs; its last part is the run's identity."""
    source = "pretrained" if config.model.name else None
    kind = "-".join(part for part in (source, config.model.architecture, config.model.kind) if part)
    return f"{kind}-{config.data.name}-{config.size}-{run_id}"
