"""Settings that make no sense are refused before anything runs. Loads no torch."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from landmark.config.schema import SYNTHETIC, TASKS, Config
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError

CHOICES = {
    "task": TASKS,
    "model.kind": ("transformer", "landmark", "transformer_xl"),
    "model.family": (None, "llama"),
    "model.backend": ("auto", "reference", "blockwise", "triton"),
    "train.precision": ("32-true", "bf16-mixed"),
    "retrieval.granularity": ("per_token_and_head", "per_head", "per_token"),
    "retrieval.scorer": ("landmark", "recent", "random", "mean_key"),
    "memory.tier": ("device", "cpu", "disk"),
    "memory.index": ("exact", "faiss"),
    "memory.index_type": ("flat", "ivf"),
    "positions.kind": ("standard", "jumps"),
    "positions.mapping": ("stingy", "true"),
    "trainer.profiler": (None, "simple", "advanced", "pytorch"),
    "eval.split": ("validation", "test"),
    "eval.retriever": (None, "landmark", "bm25", "chance"),
    "data.bad_lines": ("stop", "skip"),
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
    "model.lora_rank": 1,
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
    "positions.p_jump": 1,
    "retrieval.k": 0,
    "memory.blocks": 1,
    "memory.cache": 1,
    "memory.candidates": 1,
    "memory.window": 1,
    "memory.sinks": 0,
    "eval.length": 1,
    "eval.local": 1,
    "eval.tokens": 1,
    "eval.span": 1,
    "eval.batch_size": 1,
    "eval.prompts": 1,
    "eval.generated": 1,
    "generate.tokens": 1,
    "generate.temperature": 0,
    "generate.top_k": 1,
    "generate.limit": 1,
    "data.needles": 1,
    "data.dense": 0,
    "data.answer_weight": 0,
}
# Keys and groups that only some models read.
READ_BY = {
    "retrieval": ("landmark",),
    "memory.blocks": ("landmark",),
    "memory.tier": ("landmark",),
    "memory.folder": ("landmark",),
    "memory.cache": ("landmark",),
    "memory.index": ("landmark",),
    "memory.index_type": ("landmark",),
    "memory.candidates": ("landmark",),
    "memory.load": ("landmark",),
    "memory.save": ("landmark",),
    "memory.window": ("transformer",),
    "memory.sinks": ("transformer",),
    "model.block_size": ("landmark",),
    "model.window": ("transformer_xl",),
    "model.cache": ("transformer_xl",),
    "cmt": ("landmark",),
    "positions": ("landmark",),
}


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a value is out of range or two do not go together."""
    for key, choices in CHOICES.items():
        if (value := _get(config, key)) not in choices:
            known = ", ".join("null" if choice is None else choice for choice in choices)
            raise UserError(f"{key}={value}: must be one of {known}")
    for key, least in AT_LEAST.items():
        if (value := _get(config, key)) is not None and value < least:
            raise UserError(f"{key}={value}: must be at least {least}")
    _check_data(config)
    _check_model(config)
    for key in ("name", "size"):  # they name folders
        if not re.fullmatch(r"\w[\w.-]*", value := _get(config, key)):
            raise UserError(f"{key}={value}: must be of letters, digits, '_', '-' and '.'")
    _check_training(config)
    _check_evaluation(config)
    _check_cmt(config)
    _check_positions(config)
    if not 0 < config.generate.top_p <= 1:
        raise UserError(f"generate.top_p={config.generate.top_p}: must be above 0 and at most 1")


def check_task(config: Config) -> None:
    """Raise UserError where a text, a memory to load or save, or a file to write and the task do not go together."""
    asked = {"prompt": config.prompt, "prompt_file": config.prompt_file}
    memory = {"memory.load": config.memory.load, "memory.save": config.memory.save}
    for values, tasks in (
        (asked, ("generate", "inspect")),
        (memory, ("generate",)),
        ({"output_file": config.output_file}, ("inspect",)),
    ):
        for key, value in values.items():
            if value is not None and config.task not in tasks:
                raise UserError(f"{key}={value}: is for {' and '.join(f'task={task}' for task in tasks)}")
    if config.task not in ("generate", "inspect"):
        return
    if all(value is None for value in asked.values()):
        raise UserError(f"task={config.task}: set prompt='…' or prompt_file=FILE (- for standard input)")
    if config.memory.save is not None and config.prompt_file is None:
        raise UserError(f"memory.save={config.memory.save}: what is saved is what prompt_file holds, set that too")


def resolve(config: Config) -> Config:
    """The config with `eval.local` decided: null is what that kind of model reads at a time."""
    if config.eval.local is not None:
        return config
    natural = {
        "transformer": min(config.memory.window or config.eval.length, config.eval.length),
        "landmark": min(DEFAULT_CHUNK, config.eval.length),
        "transformer_xl": min(config.model.window or config.eval.length, config.eval.length),
    }[config.model.kind]
    return replace(config, eval=replace(config.eval, local=natural))


def beyond_training(config: Config) -> str | None:
    """What to warn of where true positions reach further than any that the model was trained at."""
    block, positions, train = config.model.block_size, config.positions, config.train
    if positions.mapping != "true" or not block:
        return None
    reached = config.eval.length + config.eval.length // block
    landmarks = (train.length + block) // (block + 1)
    trained = train.length + (positions.p_jump - 1) * landmarks
    if reached <= trained:
        return None
    return (
        f"positions.mapping=true: eval.length={config.eval.length} reaches position {reached:,}, "
        f"training at most {trained:,} (train.length={train.length}, positions.p_jump={positions.p_jump})"
    )


def check_grid(config: Config) -> None:
    """Raise UserError where a grid, or the figure drawn of it, makes no sense."""
    for key, values in config.grid.axes.items():
        if not values or len({str(value) for value in values}) < len(values):
            raise UserError(f"grid.axes: {key}: {values} must be a list of different values")
    if config.figure == "heatmap" and len(config.grid.axes) != 2:
        raise UserError(f"figure=heatmap: needs a grid of two axes, here it has {len(config.grid.axes)}")


def check_own(config: Config, keys: Iterable[str]) -> None:
    """Raise UserError where a row sets a key that means nothing to its model. keys: those that it sets itself."""
    for key in keys:
        for prefix, kinds in READ_BY.items():
            if (key == prefix or key.startswith(f"{prefix}.")) and config.model.kind not in kinds:
                raise UserError(f"{key} means nothing to model={config.model.kind}: it is for {', '.join(kinds)}")


def _check_data(config: Config) -> None:
    if config.data.configs is not None and config.data.name != "arxiv_math":
        raise UserError(f"data.configs={config.data.configs}: data={config.data.name} has no configs to choose from")


def _check_model(config: Config) -> None:
    model = config.model
    needed = {"landmark": ["block_size"], "transformer_xl": ["window", "cache"]}.get(model.kind, [])
    for name in needed:
        if getattr(model, name) is None:
            raise UserError(f"model.{name}=null: a {model.kind} model needs it")
    _check_transformers(config)
    if model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim}: must be even, for positions rotate pairs")


def _check_transformers(config: Config) -> None:
    """What a model of transformers cannot do, and what only one can."""
    model = config.model
    if model.name == "":
        raise UserError("model.name: name the folder of a transformers model, or its name on the hub")
    if model.as_is and (model.name is None or model.kind != "transformer"):
        raise UserError("model.as_is=true: is for a plain model that model.name gives, see model=pretrained_base")
    if model.name is not None and (model.family is not None or config.start is not None):
        raise UserError(f"model.name={model.name}: is where the weights come from, leave out model.family and start")
    if model.architecture is not None and (model.name is not None or model.family is not None):
        raise UserError(f"model.architecture={model.architecture}: leave out model.name and model.family")
    if model.name is None and model.family is None:
        for key, value in (("model.lora_rank", model.lora_rank), ("start", config.start)):
            if value is not None:
                raise UserError(f"{key}={value}: is for models of transformers, see model.name and model.family")
        return
    if model.lora_rank is not None and model.name is None and config.start is None:
        raise UserError(f"model.lora_rank={model.lora_rank}: adapters need a trained model, set model.name")
    if model.lora_rank is not None and config.trainer.strategy == "fsdp":
        raise UserError("model.lora_rank: adapters are not merged from shares of the weights, use another trainer")
    for key, value in (("cmt", config.cmt.enabled), ("positions", config.positions.kind == "jumps")):
        if value:
            raise UserError(f"{key}: is not supported in models of transformers")
    if model.kind == "transformer_xl" or config.memory.window is not None:
        raise UserError("model=transformer_xl, memory.window: are not supported in models of transformers")


def _check_training(config: Config) -> None:
    train = config.train
    if not 0 < train.warmup < 1:
        raise UserError(f"train.warmup={train.warmup}: must be a fraction of the steps, between 0 and 1")
    for name in ("start_lr", "max_lr", "final_lr"):
        if getattr(train, name) <= 0:
            raise UserError(f"train.{name}={getattr(train, name)}: must be above 0")
    if config.seeds is not None and (not config.seeds or len(set(config.seeds)) < len(config.seeds)):
        raise UserError(f"seeds={config.seeds}: must be a list of different seeds, or null")


def _check_cmt(config: Config) -> None:
    cmt, kind = config.cmt, config.model.kind
    if cmt.enabled and kind != "landmark":
        raise UserError(f"cmt=on: model={kind} has no landmarks that a context miss token could control")
    if not cmt.enabled and (cmt.cutoff or cmt.cutoffs or cmt.per_layer):
        key = "cutoff" if cmt.cutoff else "cutoffs" if cmt.cutoffs else "per_layer"
        raise UserError(f"cmt.{key}={getattr(cmt, key)}: without a context miss token there is no cutoff, set cmt=on")
    for key, values in (("cutoff", [cmt.cutoff]), ("cutoffs", cmt.cutoffs or [])):
        if not all(0 <= value <= 1 for value in values):
            raise UserError(f"cmt.{key}={getattr(cmt, key)}: a cutoff is compared with a weight, from 0 to 1")
    if cmt.cutoffs is not None and len(cmt.cutoffs) != config.model.num_layers:
        raise UserError(f"cmt.cutoffs={cmt.cutoffs}: must be {config.model.num_layers} numbers, one for each layer")
    if cmt.cutoffs is not None and (cmt.cutoff or cmt.per_layer):
        raise UserError("cmt.cutoffs: takes the place of cmt.cutoff and cmt.per_layer, set one of them")
    if cmt.per_layer and config.data.name in SYNTHETIC:
        raise UserError(f"cmt.per_layer=true: data={config.data.name} has no validation text to choose cutoffs on")
    if cmt.per_layer and (config.retrieval.k == 0 or resolve(config).eval.local == config.eval.length):
        raise UserError(
            f"cmt.per_layer=true: with retrieval.k={config.retrieval.k} and eval.length={config.eval.length}, "
            f"eval.local={resolve(config).eval.local} nothing is ever looked up"
        )


def _check_positions(config: Config) -> None:
    positions, kind = config.positions, config.model.kind
    if positions.kind == "standard" and positions.p_jump != 1:
        raise UserError(f"positions.p_jump={positions.p_jump}: there are no jumps, set positions=jumps")
    if positions.kind == "jumps" and kind != "landmark":
        raise UserError(f"positions=jumps: positions jump after landmarks, and model={kind} has none")
    if positions.mapping != "stingy" and kind != "landmark":
        raise UserError(f"positions.mapping={positions.mapping}: model={kind} has no memory whose positions are mapped")


def _check_evaluation(config: Config) -> None:
    settings, kind = config.eval, config.model.kind
    if settings.local is not None and settings.local > settings.length:
        raise UserError(f"eval.local={settings.local} is more than eval.length={settings.length}: lower it")
    if config.data.name not in SYNTHETIC and settings.tokens is not None and settings.length > settings.span:
        raise UserError(
            f"eval.length={settings.length} is longer than eval.span={settings.span}: "
            f"raise eval.span to at least {settings.length}"
        )
    if kind == "transformer" and settings.local not in (None, settings.length) and config.memory.window is None:
        raise UserError(
            f"eval.local={settings.local}: model=transformer reads a whole segment at once, set eval.length and "
            f"eval.local to the same number (eval.length={settings.length}), or memory.window to keep the last keys"
        )
    blocks, k = config.memory.blocks, config.retrieval.k
    if kind == "landmark" and blocks is not None and blocks < k:
        raise UserError(f"memory.blocks={blocks} is less than retrieval.k={k}: keep at least as many as are retrieved")
    if config.memory.index == "faiss" and (blocks is not None or config.retrieval.scorer != "landmark"):
        raise UserError(
            f"memory.index=faiss: an index of the landmarks that forgets nothing: memory.blocks={blocks} must be null, "
            f"retrieval.scorer={config.retrieval.scorer} must be landmark"
        )
    if config.memory.folder is not None and config.memory.tier != "disk":
        raise UserError(f"memory.folder={config.memory.folder}: memory.tier={config.memory.tier} keeps no files there")
    if settings.retriever is not None and (kind != "landmark" or config.data.name in SYNTHETIC):
        raise UserError(f"eval.retriever={settings.retriever}: needs a landmark model and the text of a corpus")
    if settings.retrieval_statistics:
        _check_retrieval_statistics(config)


def _check_retrieval_statistics(config: Config) -> None:
    if config.model.kind != "landmark" or config.data.name in SYNTHETIC:
        raise UserError(
            f"eval.retrieval_statistics=true: model={config.model.kind} on data={config.data.name} has none, "
            "they are of a landmark model's perplexity"
        )
    length, local = config.eval.length, resolve(config).eval.local or config.eval.length
    start = (-(-length // local) - 2) * local
    if config.retrieval.k == 0 or start < (config.model.block_size or 1):
        raise UserError(
            f"eval.retrieval_statistics=true: the last chunk but one of eval.length={length} tokens, "
            f"eval.local={local} at a time, has no blocks to retrieve (retrieval.k={config.retrieval.k})"
        )


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
