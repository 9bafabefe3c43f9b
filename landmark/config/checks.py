"""Checks of settings that must go together, before anything runs. Loads no torch."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from landmark.config.schema import SYNTHETIC, Config
from landmark.utils.constants import DEFAULT_CHUNK, RULER_TASKS, SHORTEST_REPEAT
from landmark.utils.errors import UserError

# Keys and groups that have an effect on some models only.
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
    "model.landmark_key": ("landmark",),
    "model.landmark_bias": ("landmark",),
    "model.local_blocks": ("landmark",),
    "model.landmark_values": ("landmark",),
    "model.joint_softmax": ("landmark",),
    "model.block_ends": ("landmark",),
    "model.least_block_size": ("landmark",),
    "model.fan_out": ("landmark",),
    "model.levels": ("landmark",),
    "model.window": ("transformer_xl",),
    "model.cache": ("transformer_xl",),
    "cmt": ("landmark",),
    "positions": ("landmark",),
}


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a value is out of range or two do not go together.

    The model and the memory check their own settings: `landmark.experiment.checks`.
    """
    _check_values(config)
    _check_data(config)
    _check_transformers(config)
    for key, value in (("name", config.name), ("size", config.size)):  # they name folders
        if not re.fullmatch(r"\w[\w.-]*", value):
            raise UserError(f"{key}={value}: must be of letters, digits, '_', '-' and '.'")
    _check_training(config)
    _check_evaluation(config)
    _check_cmt(config)
    _check_positions(config)
    if config.model.masked:
        _check_masked(config)
    if config.model.block_ends not in (None, "fixed"):
        _check_block_ends(config)
    if not 0 < config.generate.top_p <= 1:
        raise UserError(f"generate.top_p={config.generate.top_p}: must be above 0 and at most 1")


def check_task(config: Config) -> None:
    """Raise UserError where the task has no use for a prompt, a memory to load or save, or a file to write."""
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
        raise UserError(f"memory.save={config.memory.save}: the memory of prompt_file is saved, set prompt_file too")


def resolve(config: Config) -> Config:
    """The configuration with `eval.local` and `eval.generated` filled in: null stands for the usual number."""
    if config.eval.generated is None:
        generated = RULER_TASKS.get(config.eval.task or "", 10)
        config = replace(config, eval=replace(config.eval, generated=generated))
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


def beyond_training(config: Config) -> str | None:
    """A warning where true positions reach further than those of the training; None where they do not."""
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
    """Raise UserError where a grid, or its figure, makes no sense."""
    for key, values in config.grid.axes.items():
        if not values or len({str(value) for value in values}) < len(values):
            raise UserError(f"grid.axes: {key}: {values} must be a list of different values")
    if config.figure == "heatmap" and len(config.grid.axes) != 2:
        raise UserError(f"figure=heatmap: needs a grid of two axes, here it has {len(config.grid.axes)}")


def check_own(config: Config, keys: Iterable[str]) -> None:
    """Raise UserError where a row sets a key that has no effect on it. keys: those that it sets itself."""
    for key in keys:
        kind, readers = config.model.kind, _readers(key)
        if readers and kind not in readers:
            raise UserError(f"{key} has no effect on model={kind}: it is for {', '.join(readers)}")
        for condition, needed, dependent in (
            (config.memory.index == "faiss", "memory.index=faiss", ("memory.index_type", "memory.candidates")),
            (config.memory.tier != "device", "memory.tier=cpu or disk", ("memory.cache",)),
            (config.memory.window is not None, "memory.window", ("memory.sinks",)),
        ):
            if key in dependent and not condition:
                raise UserError(f"{key} has no effect here: it is for {needed}")


def unused(keys: Iterable[str], configs: Sequence[Config]) -> str | None:
    """A message that names the first key that none of the rows reads; None where each has an effect."""
    kinds = list(dict.fromkeys(config.model.kind for config in configs))
    for key in keys:
        readers = _readers(key)
        if readers and not set(readers) & set(kinds):
            return f"{key} has no effect on model={', '.join(kinds)}: it is for {', '.join(readers)}"
    return None


def _readers(key: str) -> tuple[str, ...]:
    """The kinds of models that a key has an effect on; empty for all."""
    for prefix, kinds in READ_BY.items():
        if key == prefix or key.startswith(f"{prefix}."):
            return kinds
    return ()


def _check_values(group: Any, prefix: str = "") -> None:
    """Every value against the choices and the least value that the schema declares."""
    for item in fields(group):
        key, value = f"{prefix}{item.name}", getattr(group, item.name)
        if is_dataclass(value):
            _check_values(value, f"{key}.")
        choices, least = item.metadata.get("choices"), item.metadata.get("least")
        if choices is not None and value not in choices:
            known = ", ".join("null" if choice is None else str(choice) for choice in choices)
            raise UserError(f"{key}={value}: must be one of {known}")
        if least is not None and value is not None and value < least:
            raise UserError(f"{key}={value}: must be at least {least}")


def _check_data(config: Config) -> None:
    if config.data.configs is not None and config.data.name != "arxiv_math":
        raise UserError(f"data.configs={config.data.configs}: data={config.data.name} has no configs to choose from")
    _check_repeats(config)
    _check_training_k(config)
    for key in ("tasks", "passkeys"):
        if (share := getattr(config.data, key)) is None:
            continue
        if config.data.name in SYNTHETIC:
            raise UserError(f"data.{key}={share}: data={config.data.name} is a task itself, set data.{key}=null")
        if not 0 < share <= 1:
            raise UserError(f"data.{key}={share}: must be a share of the training windows, above 0 and at most 1")
    if config.data.tasks is not None and config.data.passkeys is not None:
        raise UserError(f"data.tasks={config.data.tasks} data.passkeys={config.data.passkeys}: choose one of them")


def _check_training_k(config: Config) -> None:
    """Numbers of blocks, for our landmark model, and what training with a memory needs."""
    k, local = config.train.k, config.train.local
    if local is not None:
        if k is None:
            raise UserError(f"train.local={local}: a memory needs the number of blocks it retrieves, like train.k=[4]")
        if local >= config.train.length:
            raise UserError(
                f"train.local={local}: must be less than train.length={config.train.length}, of which it is a part"
            )
        if config.cmt.enabled or config.positions.p_jump > 1:
            raise UserError(f"train.local={local}: training with a memory goes without cmt=on and positions=jumps")
    if config.model.landmark_values and (k is None or local is not None):
        raise UserError(
            "model.landmark_values=true: landmarks learn their values where blocks are left out of a window, "
            "set train.k=[2,4,8] and train.local=null"
        )
    if k is None:
        return
    if config.model.kind != "landmark" or config.model.name or config.model.family:
        raise UserError(f"train.k={k}: only our landmark model (model=landmark) chooses blocks in training")
    if not k or min(k) < 1:
        raise UserError(f"train.k={k}: must be numbers of blocks from 1 on, like [4] or [2,4,8], or null")
    if config.model.backend == "triton":
        raise UserError(f"train.k={k}: the fused kernels attend to all blocks, set model.backend=auto")


def _check_repeats(config: Config) -> None:
    """Shares from 0 to 1, of windows of text that have room for a stretch and its copy."""
    repeats, length, block_size = config.data.repeats, config.train.length, config.model.block_size
    if repeats is None:
        return
    if config.data.name in SYNTHETIC:
        raise UserError(f"data.repeats={repeats}: data={config.data.name} is no text, set data.repeats=null")
    if not repeats or not all(0 <= share <= 1 for share in repeats):
        raise UserError(f"data.repeats={repeats}: must be shares from 0 to 1, like [0.5] or [1,0.2], or null")
    landmarks = math.ceil(length / (block_size + 1)) if config.model.kind == "landmark" and block_size else 0
    if length - landmarks + 1 < 2 * SHORTEST_REPEAT:  # one token more than the window has is predicted
        raise UserError(f"data.repeats={repeats}: train.length={length} has no room for a repeat, raise it")


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
        if model.lora_rank is not None:
            raise UserError(
                f"model.lora_rank={model.lora_rank}: is for models of transformers, see model.name and model.family"
            )
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
    train, block_size = config.train, config.model.block_size
    if config.model.kind == "landmark" and block_size is not None and train.length <= block_size:
        raise UserError(
            f"model.block_size={block_size}: a window of train.length={train.length} has no room for a block and its "
            "landmark, so nothing would be retrieved: lower model.block_size"
        )
    if not 0 < train.warmup < 1:
        raise UserError(f"train.warmup={train.warmup}: must be a fraction of the steps, between 0 and 1")
    if train.muon_lr is not None and train.optimizer != "muon":
        raise UserError(f"train.muon_lr={train.muon_lr}: is for train.optimizer=muon")
    if config.model.kind == "transformer_xl" and config.trainer.strategy == "fsdp":
        raise UserError("model=transformer_xl: its windows are trained one by one, which fsdp cannot, use trainer=ddp")
    if train.local is not None and config.trainer.strategy == "fsdp":
        raise UserError(f"train.local={train.local}: chunks are trained one by one, which fsdp cannot, use trainer=ddp")
    for name in ("start_lr", "max_lr", "final_lr", "muon_lr"):
        if getattr(train, name) is not None and getattr(train, name) <= 0:
            raise UserError(f"train.{name}={getattr(train, name)}: must be above 0")
    if config.seeds is not None and (not config.seeds or len(set(config.seeds)) < len(config.seeds)):
        raise UserError(f"seeds={config.seeds}: must be a list of different seeds, or null")


def _check_cmt(config: Config) -> None:
    cmt = config.cmt
    if not cmt.enabled and (cmt.cutoff or cmt.cutoffs or cmt.per_layer):
        key = "cutoff" if cmt.cutoff else "cutoffs" if cmt.cutoffs else "per_layer"
        raise UserError(f"cmt.{key}={getattr(cmt, key)}: without a context miss token there is no cutoff, set cmt=on")
    if cmt.cutoffs is not None and len(cmt.cutoffs) != config.model.num_layers:
        raise UserError(f"cmt.cutoffs={cmt.cutoffs}: must be {config.model.num_layers} numbers, one for each layer")
    if cmt.cutoffs is not None and (cmt.cutoff or cmt.per_layer):
        raise UserError("cmt.cutoffs: takes the place of cmt.cutoff and cmt.per_layer, set one of them")
    if cmt.enabled and (window := config.retrieval.query_window) > 1:
        raise UserError(f"retrieval.query_window={window}: goes without a context miss token, set cmt=off")
    if cmt.per_layer and config.data.name in SYNTHETIC:
        raise UserError(f"cmt.per_layer=true: data={config.data.name} has no validation text to choose cutoffs on")
    if cmt.per_layer and (config.retrieval.k == 0 or resolve(config).eval.local == config.eval.length):
        raise UserError(
            f"cmt.per_layer=true: with retrieval.k={config.retrieval.k} and eval.length={config.eval.length}, "
            f"eval.local={resolve(config).eval.local} nothing is ever looked up"
        )


def _check_masked(config: Config) -> None:
    """A masked model reads whole texts of a corpus, without a memory."""
    if config.data.name in SYNTHETIC or config.data.tasks is not None or config.data.passkeys is not None:
        raise UserError(
            f"model.masked=true: data={config.data.name}, data.tasks, data.passkeys: tokens of text are hidden"
        )
    if resolve(config).eval.local != config.eval.length:
        raise UserError(f"model.masked=true: reads a text at once, leave out eval.local={config.eval.local}")
    if config.train.local is not None:
        raise UserError(f"train.local={config.train.local}: a masked model reads its windows at once, leave it out")
    if config.task in ("generate", "inspect"):
        raise UserError(f"task={config.task}: a masked model continues no text, choose a model without model.masked")
    usual = {"memory": type(config.memory)(), "retrieval": type(config.retrieval)()}
    for group, own in usual.items():
        for item in fields(own):
            key, value = f"{group}.{item.name}", getattr(getattr(config, group), item.name)
            if value != getattr(own, item.name) and key != "retrieval.k":
                raise UserError(f"{key}={value}: a masked model has no memory, only retrieval.k has an effect")
    for key in ("probe", "task", "retriever", "retrieval_statistics"):
        if getattr(config.eval, key):
            raise UserError(f"eval.{key}: a masked model is measured by its perplexity, leave it out")
    if config.model.kind == "landmark" and config.retrieval.k < 1:
        raise UserError(f"retrieval.k={config.retrieval.k}: must be at least 1 for a masked model")


def _check_block_ends(config: Config) -> None:
    """Blocks of different lengths are for texts that are trained in windows, and read one by one."""
    name = f"model.block_ends={config.model.block_ends}"
    if config.data.name in SYNTHETIC or config.data.tasks is not None or config.data.passkeys is not None:
        share = f"data.tasks={config.data.tasks}, data.passkeys={config.data.passkeys}"
        raise UserError(f"{name}: data={config.data.name}, {share}: blocks end in text alone")
    if config.task == "inspect":
        raise UserError(f"{name}: task=inspect shows blocks of one size, choose a model without model.block_ends")
    settings = config.eval
    for key, value in (
        ("train.local", config.train.local),
        ("eval.probe", "copy" if settings.probe == "copy" else None),
        ("eval.retriever", settings.retriever),
        ("eval.retrieval_statistics", settings.retrieval_statistics or None),
        ("eval.batch_size", settings.batch_size if (settings.batch_size or 1) > 1 else None),
    ):
        if value is not None:
            raise UserError(f"{name}: goes without {key}={str(value).lower()}, leave it out")


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
    asks = settings.probe is not None or settings.task is not None
    reads_spans = config.data.name not in SYNTHETIC and (not asks or config.cmt.per_layer)
    if reads_spans and settings.tokens is not None and settings.length > settings.span:
        raise UserError(
            f"eval.length={settings.length} is longer than eval.span={settings.span}: "
            f"raise eval.span to at least {settings.length}"
        )
    if config.memory.folder is not None and config.memory.tier != "disk":
        raise UserError(f"memory.folder={config.memory.folder}: memory.tier={config.memory.tier} keeps no files there")
    if settings.retriever is not None and (kind != "landmark" or config.data.name in SYNTHETIC):
        raise UserError(f"eval.retriever={settings.retriever}: needs a landmark model and the text of a corpus")
    if settings.retriever is None and settings.query != "second_half":
        raise UserError(f"eval.query={settings.query}: is asked of eval.retriever, which is null")
    if settings.retrieval_statistics and (kind != "landmark" or config.data.name in SYNTHETIC):
        raise UserError(
            f"eval.retrieval_statistics=true: model={config.model.kind} on data={config.data.name} has none, "
            "they are of a landmark model's perplexity"
        )
    if settings.probe is not None:
        _check_probe(config)
    if settings.task is not None:
        _check_task(config)
    if config.retrieval.scorer == "given" and settings.task in (None, "cwe", "fwe", "passkey"):
        raise UserError("retrieval.scorer=given: the right blocks are known for eval.task=niah_… and vt alone")


def _check_task(config: Config) -> None:
    settings, task = config.eval, f"eval.task={config.eval.task}"
    if config.data.name in SYNTHETIC:
        raise UserError(f"{task}: data={config.data.name} has prompts of its own, choose the text of a corpus")
    for key in ("probe", "retriever", "retrieval_statistics"):
        if getattr(settings, key):
            other = f"eval.{key}={str(getattr(settings, key)).lower()}"
            raise UserError(f"{task} and {other}: a row measures one of them, leave out one")


def _check_probe(config: Config) -> None:
    settings, probe = config.eval, f"eval.probe={config.eval.probe}"
    if config.data.name in SYNTHETIC:
        raise UserError(f"{probe}: data={config.data.name} has prompts of its own, choose the text of a corpus")
    if settings.retriever is not None:
        raise UserError(f"{probe} and eval.retriever={settings.retriever}: a row measures one of them, leave out one")
    if settings.retrieval_statistics:
        raise UserError(f"{probe} and eval.retrieval_statistics=true: a row measures one of them, leave out one")
    step = 2 if settings.probe == "copy" else 4
    if settings.length < 4 or settings.length % step:
        why = "reads half of it twice" if step == 2 else "reads pairs of tokens twice"
        raise UserError(f"eval.length={settings.length}: must be a multiple of {step}, at least 4, as {probe} {why}")
