"""Settings that make no sense are refused before anything runs. Loads no torch."""

from dataclasses import replace
from typing import Any

from landmark.config import TASKS, Config
from landmark.errors import UserError

CHOICES = {
    "task": TASKS,
    "model.kind": ("transformer", "landmark", "transformer_xl"),
    "model.backend": ("auto", "reference", "blockwise"),
    "train.precision": ("32-true", "bf16-mixed"),
    "retrieval.granularity": ("per_token_and_head", "per_head", "per_token"),
    "retrieval.scorer": ("landmark", "recent", "random", "mean_key"),
    "memory.tier": ("device",),
    "positions.kind": ("standard", "jumps"),
    "eval.split": ("validation", "test"),
    "logger.mode": ("auto", "online", "offline", "disabled"),
}
AT_LEAST = {
    "seed": 0,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.head_dim": 2,
    "model.mlp_dim": 1,
    "model.block_size": 1,
    "model.window": 1,
    "model.cache": 0,
    "train.steps": 1,
    "train.batch_size": 1,
    "train.micro_batch": 1,
    "train.length": 1,
    "train.checkpoint_every": 1,
    "train.validate_every": 1,
    "train.validate_batches": 1,
    "train.log_every": 1,
    "trainer.threads": 1,
    "retrieval.k": 0,
    "memory.blocks": 1,
    "eval.length": 1,
    "eval.local": 1,
    "eval.tokens": 1,
    "eval.span": 1,
    "eval.batch_size": 1,
}


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a value is out of range or two do not go together."""
    for key, choices in CHOICES.items():
        if (value := _get(config, key)) not in choices:
            raise UserError(f"{key}={value}: must be one of {', '.join(choices)}")
    for key, least in AT_LEAST.items():
        if (value := _get(config, key)) is not None and value < least:
            raise UserError(f"{key}={value}: must be at least {least}")
    _check_model(config)
    _check_training(config)
    _check_evaluation(config)
    if config.cmt.enabled:
        raise UserError("cmt=on: the context miss token is not available yet, use cmt=off")
    if config.positions.kind != "standard":
        raise UserError("positions=jumps: positional jumps are not available yet, use positions=standard")


def resolve(config: Config) -> Config:
    """The config with `eval.local` decided: null is what that kind of model reads at a time."""
    if config.eval.local is not None:
        return config
    natural = {
        "transformer": config.eval.length,
        "landmark": min(250, config.eval.length),
        "transformer_xl": min(config.model.window or config.eval.length, config.eval.length),
    }[config.model.kind]
    return replace(config, eval=replace(config.eval, local=natural))


def _check_model(config: Config) -> None:
    model = config.model
    needed = {"landmark": ["block_size"], "transformer_xl": ["window", "cache"]}.get(model.kind, [])
    for name in needed:
        if getattr(model, name) is None:
            raise UserError(f"model.{name}=null: a {model.kind} model needs it")
    if model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim}: must be even, for positions rotate pairs")


def _check_training(config: Config) -> None:
    train = config.train
    if not 0 < train.warmup < 1:
        raise UserError(f"train.warmup={train.warmup}: must be a fraction of the steps, between 0 and 1")
    for name in ("start_lr", "max_lr", "final_lr"):
        if getattr(train, name) <= 0:
            raise UserError(f"train.{name}={getattr(train, name)}: must be above 0")
    if config.seeds is not None and (not config.seeds or len(set(config.seeds)) < len(config.seeds)):
        raise UserError(f"seeds={config.seeds}: must be a list of different seeds, or null")


def _check_evaluation(config: Config) -> None:
    settings, kind = config.eval, config.model.kind
    if settings.local is not None and settings.local > settings.length:
        raise UserError(f"eval.local={settings.local} is more than eval.length={settings.length}: lower it")
    if settings.tokens is not None and settings.length > settings.span:
        raise UserError(
            f"eval.length={settings.length} is longer than eval.span={settings.span}: "
            f"raise eval.span to at least {settings.length}"
        )
    if kind == "transformer" and settings.local not in (None, settings.length):
        raise UserError(
            f"eval.local={settings.local}: model=transformer reads a whole segment at once, "
            f"set eval.length and eval.local to the same number (eval.length={settings.length})"
        )
    blocks, k = config.memory.blocks, config.retrieval.k
    if kind == "landmark" and blocks is not None and blocks < k:
        raise UserError(f"memory.blocks={blocks} is less than retrieval.k={k}: keep at least as many as are retrieved")


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
