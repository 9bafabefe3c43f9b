"""Train one run, from its newest checkpoint if there is one, and save its weights."""

import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import get_class, instantiate
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger

from landmark.experiment.config.saved import LAUNCH, RUN
from landmark.experiment.config.schema import PASSED_ON
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.training.checkpointing import (
    AtomicCheckpointIO,
    CheckpointCallback,
    Interruption,
    TimeLimit,
    find_checkpoint,
)
from landmark.experiment.training.lightning_module import LanguageModelTraining
from landmark.experiment.training.measurement_callback import MeasurementCallback
from landmark.experiment.training.progress_callback import ProgressCallback
from landmark.experiment.training.sharding import ShardedStrategy, gathered
from landmark.models import checkpoint as weights
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.flops import flops_per_token, keys_per_query, peak_flops
from landmark.utils.hardware import reset_peak_memory
from landmark.utils.team import first_says, started_together

if TYPE_CHECKING:
    from landmark.experiment.config.schema import Config
    from landmark.experiment.data.stream import Corpus
    from landmark.experiment.data.synthetic import SyntheticCorpus
    from landmark.experiment.data.tokenizers import Tokenizer
    from landmark.models import LanguageModel


def train(
    model: "LanguageModel",
    corpus: "Corpus | SyntheticCorpus",
    tokenizer: "Tokenizer",
    config: "Config",
    run_dir: Path,
    loggers: list[Logger],
    identity: dict[str, Any],
) -> dict[str, Any]:
    """Train `model` in place for `train.steps` steps in all, save its weights in `run_dir`, and return measurements.

    It goes on from the newest whole checkpoint, on a CPU with the same threads bit for bit. Checkpoints stay until
    `discard_checkpoints`. identity: the settings that decide the weights. Raises
    UserError if the devices do not fit, if no checkpoint is whole, if one has another identity, and if a loss or a
    weight is not finite; after a checkpoint Stopped for a signal.
    """
    settings = config.train
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path, step = first_says(lambda: find_checkpoint(folder, identity)) or (None, 0)

    data = WindowDataModule(corpus, tokenizer, config)
    data.start_step = step
    others = instances("callbacks", config.callbacks)
    measurements = MeasurementCallback(
        others=others,
        steps=settings.steps,
        log_every=settings.log_every,
        validate_every=settings.validate_every,
        tokens_per_step=settings.batch_size * settings.length,
        flops_per_token=training_flops_per_token(model, config),
    )
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec).*")
    for name in ("lightning.pytorch.profilers", "lightning.pytorch.callbacks.model_summary"):
        logging.getLogger(name).setLevel(logging.INFO)  # what was asked for
    has_bar = config.trainer.enable_progress_bar or any(isinstance(each, ProgressBar) for each in others)
    limit = None if config.trainer.max_time is None else TimeLimit(config.trainer.max_time)
    with Interruption(settings.log_every) as interruption:
        trainer = _trainer(
            config,
            run_dir,
            strategy=ShardedStrategy() if config.trainer.strategy == "fsdp" else config.trainer.strategy,
            callbacks=[
                measurements,
                *([] if has_bar else [ProgressCallback(measurements, run_dir.name)]),
                *others,
                *([] if limit is None else [limit]),
                CheckpointCallback(folder, settings.checkpoint_every, settings.steps, identity, interruption, limit),
            ],
            logger=[*loggers, *instances("logger", config.logger.nodes, run_dir)],
            enable_progress_bar=has_bar,
        )
        if trainer.world_size > 1 and started_together() is None:
            raise UserError(
                f"training on {trainer.world_size} devices must be started by torchrun; or set trainer.devices=1"
            )
        device = trainer.strategy.root_device
        peak = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "", settings.precision)
        measurements.peak_flops = peak and peak * trainer.world_size
        window = model.config.window
        windows = math.ceil(settings.length / window) if window else 1
        module = LanguageModelTraining(model, settings, windows)
        if module.automatic_optimization:
            data.micro_batch = settings.micro_batch
            share = settings.batch_size // trainer.world_size  # windows of a batch on each device
            trainer.accumulate_grad_batches = math.ceil(share / (settings.micro_batch or share))
        if config.trainer.compile:
            model.compile_parts()
        model.train()
        reset_peak_memory()
        with _misconfigured():
            trainer.fit(module, datamodule=data, ckpt_path=path)
    measurements.steps = max(step, trainer.global_step)  # fewer where a callback has ended it
    whole = gathered(trainer)
    if trainer.is_global_zero:
        weights.save(model, run_dir, whole, beside=(RUN, LAUNCH))
    trainer.strategy.barrier("weights saved")
    return measurements.summary() | {"parameters": model.num_parameters()}


def _trainer(config: "Config", run_dir: Path, **arguments: Any) -> Trainer:
    team, own = started_together(), config.trainer
    passed = {name: value for name in PASSED_ON if (value := getattr(own, name)) is not None}
    profiler, plugins = passed.pop("profiler", None), passed.pop("plugins", None) or []
    for name in ("max_time", "enable_progress_bar"):
        passed.pop(name, None)
    if isinstance(profiler, dict):
        profiler = instances("trainer", {"profiler": profiler})[0]
    if isinstance(plugins, list):
        plugins = {str(number): each for number, each in enumerate(plugins)}
    with _misconfigured():
        return Trainer(
            default_root_dir=run_dir,
            accelerator=own.accelerator,
            devices=own.devices,
            num_nodes=1 if team is None else team.machines,
            precision=config.train.precision,  # pyright: ignore[reportArgumentType]
            max_steps=config.train.steps,
            plugins=[AtomicCheckpointIO(), *instances("trainer.plugins", plugins)],
            limit_val_batches=0,  # `MeasurementCallback` validates
            check_val_every_n_epoch=2,  # so EarlyStopping and ModelCheckpoint wait for it, and not for the last step
            use_distributed_sampler=False,
            profiler=profiler,
            **{"enable_model_summary": False} | passed,
            **arguments,
        )


def instances(key: str, nodes: Mapping[str, Any], save_dir: Path | None = None) -> list[Any]:
    """What nodes with `_target_` stand for. save_dir: of those that take one and name none. Raises UserError."""
    found = []
    for name, node in nodes.items():
        if node is None:
            continue
        try:
            more = {}
            if save_dir is not None and "save_dir" in inspect.signature(get_class(node["_target_"])).parameters:
                more = {"save_dir": str(save_dir)}
            found.append(instantiate({"_convert_": "all"} | more | node))
        except Exception as error:  # of a class that somebody else has written
            raise UserError(f"{key}.{name}: {in_one_line(error)}") from error
    return found


@contextmanager
def _misconfigured() -> Iterator[None]:
    """One line for what Lightning refuses."""
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"trainer: {in_one_line(error)}") from error


def training_flops_per_token(model: "LanguageModel", config: "Config") -> float:
    """Training FLOPs of a token, a mean over windows of `train.length` tokens."""
    shape = model.config
    cache = shape.recurrence and shape.recurrence.cache
    keys = keys_per_query(config.train.length, shape.window, cache, shape.masked)
    return flops_per_token(model.num_parameters(), shape.num_layers, shape.hidden_dim, keys)
