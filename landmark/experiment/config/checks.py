"""Checks of settings that must go together. The model and the memory check their own. Loads no torch."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from landmark.experiment.config.schema import (
    SYNTHETIC,
    UNIQUE_BLOCKS,
    Config,
    ModelConfig,
    TeachConfig,
    TrainConfig,
    value_of,
)
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings
from landmark.utils.constants import DEFAULT_CHUNK, RULER_TASKS, SHORTEST_REPEAT
from landmark.utils.errors import UserError
from landmark.utils.setting import check_value
from landmark.utils.trust import find_module


class Used(NamedTuple):
    """Keys, and groups of them, that have an effect where a condition holds. needs: the condition in words."""

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[Config], bool]


def _needs_kind(kind: str, *keys: str) -> Used:
    return Used(keys, f"model={kind}", lambda config: config.model.kind == kind)


def _is_ours(config: Config) -> bool:
    return config.model.name is None


def _can_have_window(config: Config) -> bool:
    """Whether the memory keeps last keys: of a plain transformer, or of a model that reads without landmarks."""
    return config.model.kind == "transformer" if _is_ours(config) else bool(config.model.as_is)


def _has_scorer(config: Config) -> bool:
    return config.retrieval.scorer != "given" or (config.eval.question or "cwe") not in ("cwe", "fwe", "passkey")


def _can_have_task(config: Config) -> bool:
    return config.model.kind == "landmark" or config.eval.task != UNIQUE_BLOCKS


def _can_have_strategy(config: Config) -> bool:
    in_parts = config.model.kind == "transformer_xl"
    return config.trainer.strategy != "fsdp" or not (in_parts or config.model.lora_rank is not None)


def _is_prompted(config: Config) -> bool:
    return config.data.name in SYNTHETIC or config.eval.question is not None


def _reads_spans(config: Config) -> bool:
    """Whether an evaluation is of a split's text, from which it can take spans."""
    return not _is_prompted(config) and config.eval.probe is None


def _asks_pass_keys(config: Config) -> bool:
    return config.data.name in SYNTHETIC or config.eval.task == "passkey"


def _is_trained_here(config: Config) -> bool:
    """Here, or by the row that an untrained one starts from."""
    if config.model.as_is and config.start is None:
        return False
    return config.run is None or config.task == "train"


def _has_sources(config: Config) -> bool:
    """Whether a model that reads blocks answers about a text."""
    about = config.prompt_file is not None or config.memory.load is not None
    asked = config.task == "chat" or (config.task == "generate" and config.prompt is not None and about)
    return asked and config.generate.tokens > 0 and bool(config.model.as_is) and config.model.kind == "landmark"


def _has_seed(config: Config) -> bool:
    is_drawn = config.task in ("generate", "chat", "teach")
    is_drawn = is_drawn or (config.retrieval.scorer == "random" and not config.model.as_is)
    is_drawn = is_drawn or config.model.landmarks is not None  # whose file may be of ${seed}
    return _is_trained_here(config) or is_drawn


def _needs_other(key: str, other: str, values: tuple[str, ...]) -> Used:
    """A setting of a memory that has an effect with some values of another one alone."""
    needed = MemorySettings.__dataclass_fields__[other].metadata["key"]
    return Used((key,), f"{needed}={' or '.join(values)}", lambda config: value_of(config, needed) in values)


_LANDMARK_FIELDS, _BLOCK_CACHE_FIELDS = (
    {item.metadata["key"]: item.metadata for item in fields(kind)} for kind in (MemorySettings, BlockCacheSettings)
)
_MEMORY_FIELDS = _BLOCK_CACHE_FIELDS | _LANDMARK_FIELDS

# Of our decoder: settings of a model that can be null, but for those of any model or of one of transformers.
_OF_OTHERS = ("architecture", "name", "as_is", "dtype", "bits", "lora_rank", "landmarks", "block_size", "cache")
_OF_OURS = (
    *("cmt.enabled", "positions.p_jump"),
    *(f"model.{each.name}" for each in fields(ModelConfig) if each.default is None and each.name not in _OF_OTHERS),
)

_SHAPE = ("model.num_layers", "model.num_heads", "model.head_dim", "model.mlp_dim")

# Keys that a row may not set itself where they have no effect; rows that share one may.
USED_BY = (
    _needs_kind("landmark", "retrieval", "cmt", "positions", "model.block_size", "memory.load", "memory.save"),
    _needs_kind("landmark", *(key for key in _MEMORY_FIELDS if key.startswith("memory.") and key != "memory.window")),
    _needs_kind("transformer", "memory.sinks"),
    Used(("memory.window",), "model=transformer or model=pretrained", _can_have_window),
    _needs_kind("transformer_xl", "model.window", "model.cache"),
    Used(("memory.sinks",), "memory.window", lambda config: config.memory.window is not None),
    Used(("seed", "seeds"), "a training, or what is drawn", _has_seed),
    Used(
        ("train.micro_batch",),
        "a larger train.batch_size, of which it is a part",
        lambda c: c.train.micro_batch is None or c.train.micro_batch < c.train.batch_size,
    ),
    Used(_SHAPE, "our decoder, not models of transformers", _is_ours),
    Used(("data.path", "data.max_documents"), "the text of a corpus", lambda c: c.data.name not in SYNTHETIC),
    Used(("data.needles",), "data=passkey or eval.task=passkey", _asks_pass_keys),
    Used(("tokenizer.vocab_size",), "tokenizer=gpt2", lambda c: c.tokenizer.name == "gpt2"),
    Used(("tokenizer.file",), "tokenizer=gpt2 or pretrained", lambda c: c.tokenizer.name not in ("bytes", "code")),
    *(_needs_other(key, *said["needs"]) for key, said in _MEMORY_FIELDS.items() if "needs" in said),
)

# Keys whose values other than the default must have an effect, whoever sets them.
_NEEDED = (
    _needs_kind("landmark", "cmt.enabled", "positions.p_jump", "positions.mapping"),
    Used(("eval.task",), "model=landmark", _can_have_task),
    Used(_OF_OURS, "our decoder, not models of transformers", _is_ours),
    Used(("memory.window",), "our decoder or model=pretrained", lambda c: _is_ours(c) or _can_have_window(c)),
    Used(
        tuple(key for key in _BLOCK_CACHE_FIELDS if key not in (*_LANDMARK_FIELDS, "memory.window")),
        "model=pretrained",
        lambda c: bool(c.model.as_is),
    ),
    Used(
        tuple(key for key in _LANDMARK_FIELDS if key not in (*_BLOCK_CACHE_FIELDS, "seed")),
        "a model with landmarks",
        lambda c: not c.model.as_is,
    ),
    Used(
        ("model.landmarks",),
        "model=pretrained, whose retrieval.scorer they are",
        lambda c: bool(c.model.as_is) and c.model.kind == "landmark" and c.retrieval.scorer == MemorySettings.scorer,
    ),
    Used(
        ("model.as_is", "model.dtype", "model.bits", "model.lora_rank"),
        "a model that model.name gives",
        lambda c: not _is_ours(c),
    ),
    Used(
        ("data.repeats", "data.tasks", "data.passkeys", "eval.task"),
        "the text of a corpus",
        lambda c: c.data.name not in SYNTHETIC,
    ),
    Used(
        (
            "data.tasks",
            "data.passkeys",
            "eval.task",
            *(key for key in _MEMORY_FIELDS if key not in ("retrieval.k", "seed")),
        ),
        "models with a memory; model.masked=true reads whole texts, without one",
        lambda c: not c.model.masked,
    ),
    Used(("data.configs",), "data=arxiv_math", lambda config: config.data.name == "arxiv_math"),
    Used(
        ("trainer.gradient_clip_val",), "whole windows, not transformer_xl", lambda c: c.model.kind != "transformer_xl"
    ),
    Used(
        ("trainer.gradient_clip_algorithm",), "trainer.gradient_clip_val", lambda c: bool(c.trainer.gradient_clip_val)
    ),
    Used(("trainer.strategy",), "whole windows, and all weights of a model: use trainer=ddp", _can_have_strategy),
    Used(("cmt.cutoff",), "cmt=on", lambda config: config.cmt.enabled),
    Used(("retrieval.scorer",), "eval.task=niah_… or vt, of which the right blocks are known", _has_scorer),
)

_OF_KINDS = tuple(
    _needs_kind(item.metadata["kind"], f"{group}.{item.name}")
    for group, schema in (("model", ModelConfig), ("train", TrainConfig))
    for item in fields(schema)
    if "kind" in item.metadata
)

# Keys of which one at most is set.
_ALTERNATIVES = (
    ("data.tasks", "data.passkeys"),
    ("model.name", "model.architecture"),
    ("model.masked", "model.architecture"),
)

_OF_TASKS = (
    Used(("prompt",), "task=generate or inspect", lambda config: config.task in ("generate", "inspect")),
    Used(("prompt_file",), "task=generate, chat or inspect", lambda c: c.task in ("generate", "chat", "inspect")),
    Used(("memory.load", "memory.save"), "task=generate or chat", lambda config: config.task in ("generate", "chat")),
    Used(
        ("generate.sources", "generate.from_sources"),
        "model=pretrained, and an answer about prompt_file or memory.load",
        _has_sources,
    ),
    Used(tuple(f"teach.{item.name}" for item in fields(TeachConfig)), "task=teach", lambda c: c.task == "teach"),
    Used(("memory.save",), "the memory of prompt_file", lambda c: c.prompt_file is not None or c.task == "chat"),
)


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a value is out of range, has no effect, or does not fit another."""
    check_settings(config)
    for key, value in (("name", config.name), ("size", config.size)):  # they name folders
        if not re.fullmatch(r"\w[\w.-]*", value):
            raise UserError(f"{key}={value}: must be of letters, digits, '_', '-' and '.'")
    if not re.fullmatch(r"auto|[1-9]\d*|\d+(,\d+)+,?|\d+,", devices := str(config.trainer.devices)):
        raise UserError(f"trainer.devices={devices}: must be auto, a number from 1 on, or numbers like 0,1")
    for key, nodes in (("callbacks", config.callbacks), ("logger", config.logger.nodes)):
        for name, node in nodes.items():
            if node is not None and not (isinstance(node, dict) and isinstance(node.get("_target_"), str)):
                raise UserError(f"{key}.{name}={node}: must be a mapping with _target_, the name of a class")
    if not _is_duration(limit := config.trainer.max_time):
        raise UserError(f"trainer.max_time={limit}: must be DD:HH:MM:SS, or a mapping, as {{hours: 1, minutes: 30}}")
    if config.model.name is not None and config.start is not None and not config.model.as_is:
        raise UserError(f"model.name={config.model.name} and start={config.start}: a training starts from one of them")
    if (own := config.model.architecture) is not None and "." not in own:
        find_module("landmark.models", own, "Model", key="model.architecture")
    _check_training(config)
    _check_evaluation(config)
    if config.model.masked:
        _check_masked(config)


def check_settings(config: Config) -> None:
    """`check` of what a model that reads needs, without what is of trainings and rows alone."""
    _check_values(config)
    _check_needed(config, (*_NEEDED, *_OF_KINDS))
    for keys in _ALTERNATIVES:
        chosen = [f"{key}={value}" for key in keys if (value := value_of(config, key))]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)}: choose one of them")
    if config.model.name == "":
        raise UserError("model.name: name the folder of a transformers model, or its name on the hub")
    if config.model.name is not None and config.tokenizer.name != "pretrained":
        raise UserError(
            f"tokenizer={config.tokenizer.name}: {config.model.name} knows the ids of its own alone, leave it"
        )
    if config.memory.folder is not None and not Path(config.memory.folder).is_dir():
        raise UserError(f"memory.folder={config.memory.folder}: there is no such folder, make it before")


def _is_duration(value: Any) -> bool:
    if isinstance(value, dict):
        units = {"weeks", "days", "hours", "minutes", "seconds"}
        return value.keys() <= units and all(isinstance(each, int | float) for each in value.values())
    return value is None or re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(value)) is not None


def check_task(config: Config) -> None:
    """Raise UserError where the task has no use for a prompt, a memory to load or save, or a file to write."""
    _check_needed(config, _OF_TASKS)
    if config.task in ("generate", "inspect") and config.prompt is None and config.prompt_file is None:
        raise UserError(f"task={config.task}: set prompt='…' or prompt_file=FILE (- for standard input)")


def resolve(config: Config) -> Config:
    """The configuration of a row, with numbers in place of null."""
    if config.eval.generated is None:
        generated = RULER_TASKS.get(config.eval.task or "", 10)
        config = replace(config, eval=replace(config.eval, generated=generated))
    is_row = config.task not in ("generate", "chat")  # rows measure blocks, on each device alike
    if is_row and config.model.as_is and config.memory.dense is None:
        config = replace(config, memory=replace(config.memory, dense=0))
    if config.eval.local is not None:
        return config
    if config.model.masked:
        return replace(config, eval=replace(config.eval, local=config.eval.length))
    natural = {
        "transformer": min(config.memory.window or config.eval.length, config.eval.length),
        "landmark": min(DEFAULT_CHUNK, config.eval.length),
        "transformer_xl": min(config.model.window or config.eval.length, config.eval.length),
    }[config.model.kind]
    return replace(config, eval=replace(config.eval, local=natural))


def unused(keys: Iterable[str], configs: Sequence[Config]) -> UserError | None:
    """An error that names the first key that none of the configurations reads; None where each has an effect."""
    for key in keys:
        for read in USED_BY:
            if any(key == own or key.startswith(f"{own}.") for own in read.keys) and not any(map(read.holds, configs)):
                kinds = ", ".join(dict.fromkeys(config.model.kind for config in configs))
                place = f"on model={kinds}" if read.needs.startswith("model=") else "here"
                return UserError(f"{key} has no effect {place}: it is for {read.needs}")
    return None


def _check_needed(config: Config, needed: Iterable[Used]) -> None:
    """Raise UserError for a value other than the default, and other than none at all, that has no effect."""
    usual = Config()
    for read in needed:
        for key in () if read.holds(config) else read.keys:
            value = value_of(config, key)
            if value != value_of(usual, key) and value is not None and value is not False and value != 0:
                raise UserError(f"{key}={value}: is for {read.needs}")


def _check_values(group: Any, prefix: str = "") -> None:
    """Every value against the choices and the range that the schema declares."""
    for item in fields(group):
        key, value = f"{prefix}{item.name}", getattr(group, item.name)
        if is_dataclass(value):
            _check_values(value, f"{key}.")
        else:
            check_value(key, value, item.metadata)


def _check_training(config: Config) -> None:
    train, block_size, repeats = config.train, config.model.block_size, config.data.repeats
    if len(set(config.seeds or [])) < len(config.seeds or []):
        raise UserError(f"seeds={config.seeds}: must be a list of different seeds, or null")
    for key in ("start_lr", "final_lr"):
        if (rate := getattr(train, key)) > train.max_lr:
            raise UserError(f"train.{key}={rate}: is above train.max_lr={train.max_lr}, the highest of a training")
    landmarks = 0
    if config.model.kind == "landmark" and block_size:
        if train.length <= block_size:
            raise UserError(
                f"model.block_size={block_size}: a window of train.length={train.length} has no room for a block and "
                "its landmark, so nothing would be retrieved: lower model.block_size"
            )
        landmarks = math.ceil(train.length / (block_size + 1))
    room = train.length - landmarks + 1  # one token more than the window has is predicted
    if repeats is not None and room < 2 * SHORTEST_REPEAT:
        raise UserError(f"data.repeats={repeats}: train.length={train.length} has no room for a repeat, raise it")


def _check_masked(config: Config) -> None:
    if config.data.name in SYNTHETIC or config.task in ("generate", "inspect"):
        raise UserError(f"model.masked=true: is for text of a corpus, not data={config.data.name} task={config.task}")
    if config.eval.local not in (None, length := config.eval.length):
        raise UserError(f"eval.local={config.eval.local}: model.masked=true reads all of eval.length={length} at once")
    if config.model.kind == "landmark" and config.retrieval.k < 1:
        raise UserError(f"retrieval.k={config.retrieval.k}: must be at least 1 for a masked model")


def _check_evaluation(config: Config) -> None:
    settings, length, span = config.eval, config.eval.length, config.eval.span
    if _reads_spans(config) and settings.tokens is not None and length > span:
        raise UserError(f"eval.length={length} is longer than eval.span={span}: raise eval.span to at least {length}")
    if config.model.kind == "transformer" and config.memory.window == 0:
        raise UserError("memory.window=0: must be at least 1, for a query reads its own key")
    if settings.probe is not None and (length < 4 or length % 2):
        raise UserError(
            f"eval.length={length}: must be a multiple of 2, at least 4: eval.task=copy reads its half twice"
        )
