"""The typed schema of the whole configuration: a misspelt key or a wrong type is refused at compose time."""

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.config import ModelConfig
from landmark.utils.constants import RULER_TASKS
from landmark.utils.errors import UserError
from landmark.utils.setting import one_of, setting
from landmark.utils.trust import name_modules

SYNTHETIC = ("passkey",)  # tasks: samples are made as needed, and answers to prompts are evaluated
MOST_THREADS = 1024  # torch ends in a segmentation fault where the system has no room for more
QUESTIONS = (*RULER_TASKS, "passkey")
COPY = "copy"  # the probe of looking back: a stretch of text that comes twice
MOST_SOURCES = 20  # passages behind an answer
UNIQUE_BLOCKS = "unique_blocks"
LANDMARKS = "landmarks"  # the scorer of `model.landmarks`
POSITION_BIN = 64  # positions of a segment whose losses a record sums, for the curve over positions
TASKS = {  # what `task=` chooses, in place of training and evaluating
    "table": "print and draw the table of the rows that have a record",
    "evaluate": "evaluate the rows, and train the runs that they need",
    "train": "train the runs that the rows need, or the one of them that `run` names",
    "prepare": "tokenise the corpora of the rows",
    "plan": "print what is missing and what it costs; make nothing",
    "generate": "print what follows a prompt, as it is generated",
    "teach": "learn landmarks from a pretrained model, whose weights stay, and write them to model.landmarks",
    "chat": "a conversation in the terminal, about a file or without one",
    "inspect": "write a page that shows the blocks retrieved for each token of a text",
    "status": "print what is done, running, stopped or missing, and the command that makes the rest",
    "dashboard": "a W&B workspace of an experiment's runs and rows, or of the whole project",
}


MEMORY_OF_BLOCKS = {"retrieval.first": 0}  # for models with landmarks, which have no such blocks


def memory_fields(group: str) -> Any:
    """A dataclass with the settings of a memory that this group of settings has."""
    found = {}
    for item in fields(MemorySettings) + fields(BlockCacheSettings):
        if item.metadata["key"].startswith(f"{group}.") and item.metadata["key"] != "memory.window":
            default = MEMORY_OF_BLOCKS.get(item.metadata["key"], item.default)
            found.setdefault(item.metadata["key"].partition(".")[2], (item.type, field(default=default)))
    return make_dataclass(f"{group.title()}OfMemory", [(name, *field_spec) for name, field_spec in found.items()])


@dataclass
class DataConfig:
    """The text, or the task that makes its samples."""

    name: str = MISSING
    path: str | None = None  # a local copy; null: download, where the corpus has a source on the hub
    cache: str = "${output}/data"  # folder of the prepared streams
    max_documents: int | None = None  # the first documents of each split; null: all
    configs: list[str] | None = None  # arxiv_math: which of the corpus's configs are taken; null: all
    repeats: list[float] | None = setting(None, least=0, most=1)  # text: shares of windows with repeats, first to last
    tasks: float | None = setting(None, above=0, most=1)  # text: share of training windows that are RULER's tasks on it
    passkeys: float | None = setting(None, above=0, most=1)  # text: share of training windows that are pass keys
    needles: int = setting(1, least=1)  # passkey: keys in a prompt, of which one is asked for


@dataclass
class TokenizerConfig:
    """The tokenizer."""

    name: str = MISSING
    file: str | None = None  # a local file of ranks; null: download
    vocab_size: int | None = None  # GPT-2: only the first merges; null: all


@dataclass
class TrainConfig:
    """One training. A batch is `batch_size` windows (or segments) of `length` tokens, over all devices."""

    steps: int = setting(MISSING, least=1)
    batch_size: int = setting(MISSING, least=1)
    micro_batch: int | None = setting(None, least=1)  # windows per device and pass; null: all at once
    length: int = setting(MISSING, least=1)  # tokens, landmarks included
    # Without landmarks: windows begin where those with landmarks after blocks of so many tokens do; null: anywhere.
    cut_as: int | None = setting(None, least=1, kind="transformer")
    muon_lr: float | None = setting(None, above=0)  # of Muon, for matrices of linear layers; null: AdamW trains all
    max_lr: float = setting(2e-3, above=0)
    start_lr: float = setting(2e-5, above=0)
    final_lr: float = setting(4e-4, above=0)
    warmup: float = setting(0.02, above=0, below=1)  # fraction of the steps
    weight_decay: float = setting(1e-3, least=0)
    precision: str = one_of("32-true", "bf16-mixed")
    checkpoint_every: int = setting(500, least=1)  # steps
    validate_every: int = setting(500, least=1)  # steps
    validate_batches: int = setting(8, least=1)
    log_every: int = setting(50, least=1)  # steps


# Arguments of `lightning.Trainer` that `trainer` passes on as they are; null: Lightning's default.
PASSED_ON = (
    *("max_time", "gradient_clip_val", "gradient_clip_algorithm", "profiler", "detect_anomaly", "deterministic"),
    *("benchmark", "inference_mode", "plugins", "sync_batchnorm", "enable_progress_bar", "enable_model_summary"),
    *("enable_autolog_hparams", "model_registry"),
)
CLIPPING = ("gradient_clip_val", "gradient_clip_algorithm")  # those that decide weights
_ONE_PASS = "a training takes each of its windows once, in an order that a resumed one finds again"
# The other arguments: what says it here, or why nothing can.
ELSEWHERE = {
    **dict.fromkeys(("max_steps", "min_steps", "max_epochs", "min_epochs"), "train.steps"),
    **dict.fromkeys(("limit_train_batches", "overfit_batches"), f"train.steps or data.max_documents: {_ONE_PASS}"),
    **dict.fromkeys(("accumulate_grad_batches",), "train.micro_batch, the windows of a part"),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), "train.validate_every"),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), "train.validate_batches"),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), "eval.tokens"),
    **dict.fromkeys(("reload_dataloaders_every_n_epochs", "use_distributed_sampler"), f"nothing: {_ONE_PASS}"),
    **dict.fromkeys(
        ("enable_checkpointing", "barebones"), "train.checkpoint_every: without checkpoints nothing resumes"
    ),
    **{"fast_dev_run": "+debug=limit", "log_every_n_steps": "train.log_every", "precision": "train.precision"},
    **{"default_root_dir": "output", "logger": "the group logger", "callbacks": "the group callbacks"},
    "num_nodes": "srun or torchrun, which starts a process for each device",
}


@dataclass
class TrainerConfig(make_dataclass("Passed", [(name, Any, None) for name in PASSED_ON])):
    """Where to compute, and for how long; and Lightning's arguments."""

    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    devices: Union[int, str] = "auto"  # noqa: UP007 (OmegaConf reads no other spelling of a union of two)
    strategy: str = one_of("auto", "ddp", "fsdp")
    threads: int | None = setting(None, least=1, most=MOST_THREADS)  # null: OMP_NUM_THREADS, or the cores
    compile: bool = False  # training: torch.compile makes few kernels of what is not attention


@dataclass
class RetrievalConfig(memory_fields("retrieval")):
    """Which blocks a landmark model retrieves."""

    scorer: Any = MemorySettings.scorer  # of a model without landmarks that is its default, mean_key


@dataclass
class MemoryConfig(memory_fields("memory")):
    """What is kept between the chunks of a long input."""

    window: int | None = setting(None, least=0)  # transformer: last keys kept; model=pretrained: as of a memory
    sinks: int = setting(4, least=0)  # transformer with a window: first keys kept
    # task=generate, chat: folder of a saved memory to go on from; [a,b]: of texts that were read alone, asked together
    load: Any = None
    save: str | None = None  # task=generate: folder for the memory of `prompt_file`; chat: of the chat

    @property
    def loaded(self) -> list[Any]:
        """The folders of `load`; a name may look like a number."""
        given = self.load if isinstance(self.load, list) else [] if self.load is None else [self.load]
        return [each if isinstance(each, dict | list) else str(each) for each in given]


@dataclass
class CmtConfig(memory_fields("cmt")):
    """The context miss token (paper, Appendix D)."""

    enabled: bool = False


@dataclass
class PositionsConfig(memory_fields("positions")):
    """Positions of a landmark model."""

    p_jump: int = setting(1, least=1)  # in training: the largest jump after a landmark; 1: none

    def __post_init__(self):
        self.mapping = str(self.mapping).lower()  # `true` on a command line is a boolean


@dataclass
class EvalConfig:
    """One evaluation."""

    length: int = setting(512, least=1)  # tokens of a segment
    local: int | None = setting(None, least=1)  # tokens fed at a time; null: the model's usual number
    split: str = one_of(MISSING, "validation", "test")  # validation or test
    tokens: int | None = setting(None, least=1)  # in all, in evenly spaced spans that every row shares; null: all
    span: int = setting(4096, least=1)  # tokens of such a span
    batch_size: int | None = setting(None, least=1)
    prompts: int = setting(50, least=1)  # of tasks with prompts; segments of a probe
    generated: int | None = setting(None, least=1)  # after a prompt; null: as published, else 10
    # In place of perplexity answers to `prompts` questions, or `prompts` segments on which to look back; or beside it
    # the distinct blocks that the last chunk but one retrieves.
    task: str | None = one_of(None, *QUESTIONS, COPY, UNIQUE_BLOCKS)

    @property
    def question(self) -> str | None:
        """The task that asks questions, None without one."""
        return self.task if self.task in QUESTIONS else None

    @property
    def probe(self) -> str | None:
        """The task that measures whether the model looks back, None without one."""
        return self.task if self.task == COPY else None


@dataclass
class GenerateConfig:
    """How task=generate and chat continue a text (`landmark.models.sampling.Sampling`)."""

    tokens: int = setting(200, least=0)  # most tokens generated; 0: the text is read and nothing is generated
    # Of settings that are null. model: what generation_config of a model of transformers says; where it says nothing,
    # and with greedy, the most probable token is taken.
    defaults: str = one_of("model", "greedy")
    temperature: float | None = setting(None, least=0, most=100)  # 0: the most probable token
    top_k: int | None = setting(None, least=0)  # 0: of all tokens
    top_p: float | None = setting(None, above=0, most=1)
    min_p: float | None = setting(None, least=0, below=1)
    repetition_penalty: float | None = setting(None, least=0.01, most=100)
    stop: list[str] = field(default_factory=list)  # texts that end it, as end of text does
    sources: int = setting(0, least=0, most=MOST_SOURCES)  # passages behind the answer that are shown; 0: none
    # find these passages (three, if sources is 0) before the answer, which is made from them alone
    from_sources: bool = False
    # settings of the model's template for chats, through which `prompt` goes; null: it does not
    template: dict[str, Any] | None = field(default_factory=dict)

    @property
    def finds(self) -> bool:
        """Whether passages are found; three, if only from_sources is set."""
        return self.sources > 0 or self.from_sources


@dataclass
class TeachConfig:
    """How task=teach learns landmarks. A step is one window of text (`landmark.models.huggingface.teaching`)."""

    steps: int = setting(160, least=1)
    length: int = setting(3072, least=2)  # tokens of a window
    vectors: int = setting(4, least=1)  # that stand for a block; the paper has one
    queries: int = setting(384, least=1)  # of a window, whose attention is learned
    max_lr: float = setting(2e-3, above=0)
    repeats: float = setting(0.5, least=0, most=1)  # share of windows that repeat spans of their own, and numbers


@dataclass
class LoggerConfig:
    """Where metrics go beside the CSV file of each run. W&B also reads WANDB_MODE, WANDB_ENTITY and other variables.
    Other keys are Lightning's loggers, each a node with `_target_`.
    """

    service: str = one_of("wandb", "csv")  # csv: nowhere else
    weights: bool = False  # upload the trained model to W&B; else its artifact has a checksum and the place alone
    project: str = "landmark"
    nodes: dict[str, Any] = field(default_factory=dict)  # those loggers by their keys, filled in


@dataclass
class PanelConfig:
    """A panel of an experiment's picture."""

    value: str = one_of("perplexity", "difference", "percent", "copies")  # difference: from the row's base, percent
    series: dict[str, str] = field(default_factory=dict)  # words for the legend to names of rows: landmark_* long_4096


@dataclass
class Config:
    """Everything that can be set."""

    name: str = "single"  # of the experiment
    about: str = one_of("beyond", "paper", "check")  # of an experiment: a check is of this program itself
    task: str = one_of("auto", *TASKS)
    seed: int = setting(0, least=0)
    seeds: list[int] | None = setting(None, least=0)  # each row once for each seed
    row: str | None = None  # one row of the experiment
    run: str | None = None  # folder of a trained run to use in place of the one that these settings name
    prompt: str | None = None  # task=generate, inspect: the text to read, after the content of prompt_file
    prompt_file: Any = (
        None  # task=chat too: a file, or a list of files; -: standard input; the Document, once it is read
    )
    start: str | None = None  # of a row: the row whose run its training starts from, or, as_is, whose run it reads
    start_run: Any = None  # configuration of that run, filled in
    rows: dict[str, str] = field(default_factory=dict)  # name to overrides; a name with braces stands for several rows
    parts: dict[str, str] = field(default_factory=dict)  # what a choice in such braces adds: name to overrides
    figure: str = "rows"  # of landmark.experiment.results.figures
    panels: dict[str, PanelConfig] = field(default_factory=dict)  # in place of that picture: title to a panel
    compare: dict[str, list[str]] = field(default_factory=dict)  # title to two rows, the better one expected first
    trial: bool = False  # numbers of few steps, which a table compares with nothing
    output: str = "outputs"  # folder of all that is made
    size: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)  # of Lightning, each a node with `_target_`
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cmt: CmtConfig = field(default_factory=CmtConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    teach: TeachConfig = field(default_factory=TeachConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def memory_settings(config: Config) -> MemorySettings | BlockCacheSettings:
    """How a row's model reads, with landmarks or without. Raises UserError for settings that make no sense."""
    kind = BlockCacheSettings if config.model.as_is else MemorySettings
    given = {item.name: value_of(config, item.metadata["key"]) for item in fields(kind)}
    if config.model.as_is and given["scorer"] == MemorySettings.scorer:
        file = None if config.task == "teach" else config.model.landmarks
        given["scorer"] = BlockCacheSettings.scorer if file is None else {"name": LANDMARKS, "file": file}
    return kind(**given)


def value_of(config: Config, key: str) -> Any:
    """The value of a setting by its key, such as retrieval.k."""
    return functools.reduce(getattr, key.split("."), config)


# Groups whose options set a key or two, as `cmt=on` does: the others are folders of conf/.
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "retrieval": {
        name: {"granularity": name} for name in ("per_token_and_head", "per_head", "per_token", "per_token_and_group")
    },
    "cmt": {"off": {"enabled": False}, "on": {"enabled": True}},
    "positions": {"standard": {"p_jump": 1}, "jumps": {"p_jump": 100}},
    "logger": {name: {"service": name} for name in ("wandb", "csv")},  # conf/logger has others
    "trainer": {
        "auto": {"accelerator": "auto", "devices": 1},  # one GPU if there is one, else the CPU
        "cpu": {"accelerator": "cpu", "devices": 1},
        "gpu": {"accelerator": "gpu", "devices": 1},
        # Every GPU of this machine, one process each; with fsdp they share out weights, gradients and moments (FSDP2).
        "ddp": {"accelerator": "gpu", "devices": "auto", "strategy": "ddp"},
        "fsdp": {"accelerator": "gpu", "devices": "auto", "strategy": "fsdp"},
    },
}


@dataclass
class Schema(Config):
    """What Hydra composes. Beside its own keys, `logger` has loggers of any name; without `service` none is W&B's."""

    logger: dict[str, Any] = field(default_factory=lambda: asdict(LoggerConfig(service="csv")))  # pyright: ignore


def _logger(values: dict[str, Any]) -> LoggerConfig:
    own = {item.name for item in fields(LoggerConfig)}
    nodes = {key: value for key, value in values.items() if key not in own}
    known = {key: value for key, value in values.items() if key in own}
    if not isinstance(given := known.get("nodes", {}), dict):
        raise UserError(f"logger.nodes={given}: must be a mapping of loggers, as {{mine: {{_target_: …}}}}")
    typed = OmegaConf.merge(OmegaConf.structured(LoggerConfig), known | {"nodes": given | nodes})
    return OmegaConf.to_object(typed)  # pyright: ignore[reportReturnType]


def elsewhere(key: str) -> str | None:
    """A line for an argument of Lightning's Trainer that another setting gives."""
    name = key.removeprefix("trainer.")
    return f"{key}: Lightning's {name} is set by {ELSEWHERE[name]}" if name in ELSEWHERE else None


def register() -> None:
    """Make the schema known to Hydra, as `schema` at the head of conf/config.yaml's defaults, and the small groups."""
    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda _: store  # Hydra's help copies it 127 times, though it only reads the copies
    store.store(name="schema", node=Schema)
    for group, options in GROUPS.items():
        for name, values in options.items():
            store.store(group=group, name=name, node=values)


def to_config(composed: DictConfig, *, is_command: bool = True) -> Config:
    """Plain dataclasses from a composed config, interpolations resolved. is_command: modules that it names may be
    imported. Raises UserError for an unknown key and a missing value.
    """
    try:
        config = OmegaConf.to_object(composed)
        if isinstance(config, Schema):
            own: dict[str, Any] = {item.name: getattr(config, item.name) for item in fields(Config)}
            own["logger"] = _logger(config.logger)
            config = Config(**own)
    except OmegaConfBaseException as error:
        hint = ": in a text write \\${…}" if isinstance(error, InterpolationKeyError) else ""
        raise UserError(str(error).splitlines()[0] + hint) from error
    if not isinstance(config, Config):
        raise UserError("these settings do not follow the schema: begin their defaults with `- config`")
    for message in _misfits(config, Config):
        raise UserError(message)
    if unknown := _unknown_keys(composed, config):
        raise UserError(elsewhere(unknown[0]) or f"unknown key {', '.join(unknown)}: --help shows those that exist")
    if is_command:
        read = config.output, config.run, config.model.name, *map(str, config.memory.loaded)
        scorer = config.retrieval.scorer
        named = scorer.get("name") if isinstance(scorer, dict) else scorer
        if not isinstance(named, str):
            raise UserError(f"retrieval.scorer={scorer}: must be the name of a scorer, or {{name: NAME, FIELD: VALUE}}")
        name_modules((config.model.architecture, config.data.name, named), outside=read)
    return config


def _misfits(value: Any, kind: Any, key: str = "") -> Iterator[str]:
    """Messages on values that are a group, a mapping or a list where they must not be, or the reverse. OmegaConf does
    not see those that an interpolation replaces, nor those in a mapping of texts.
    """
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    holders = {get_origin(option) or option: option for option in options}
    wanted = next((each for each in holders if each in (dict, list) or is_dataclass(each)), None)
    if Any in holders or (value is None and NoneType in holders):
        return
    if not isinstance(value, wanted or (int, float, str)):  # pyright: ignore[reportArgumentType]
        said = {dict: "a mapping, as {name: value}", list: "a list, as [value]", None: "one value"}
        yield f"{key}={value}: must be {said.get(wanted, 'a group of settings: name one of its options')}"
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _misfits(each, get_args(holders[dict])[1], f"{key}.{name}")
    elif is_dataclass(wanted):
        for item in fields(wanted):
            yield from _misfits(getattr(value, item.name), item.type, f"{key}.{item.name}".lstrip("."))


def _unknown_keys(composed: DictConfig, config: Any, prefix: str = "") -> list[str]:
    known = {item.name: getattr(config, item.name) for item in fields(config)}
    unknown = [f"{prefix}{key}" for key in composed if key not in known]
    for name, value in known.items():
        if is_dataclass(value) and not isinstance(value, LoggerConfig) and name in composed:
            unknown += _unknown_keys(composed[name], value, f"{prefix}{name}.")
    return unknown
