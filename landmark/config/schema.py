"""The typed schema of the whole configuration: a misspelt key or a wrong type is refused at compose time."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.utils.constants import RULER_TASKS
from landmark.utils.errors import UserError
from landmark.utils.retired import check_retired, without_retired

SYNTHETIC = ("passkey", "key_value", "mqar")  # tasks: samples are made as needed, and answers to prompts are evaluated
POSITION_BIN = 64  # positions of a segment whose losses a record sums, for the curve over positions
TASKS = (
    *("table", "evaluate", "train", "prepare", "plan"),
    *("generate", "inspect", "report", "status", "dashboard", "card"),
)


def one_of(default: Any, *choices: Any) -> Any:
    """A field that takes its default or one of these values."""
    return field(default=default, metadata={"choices": choices if default == MISSING else (default, *choices)})


def at_least(least: float, default: Any = MISSING) -> Any:
    """A field with a least value; a default of None allows null."""
    return field(default=default, metadata={"least": least})


def above_zero(default: Any, most: float | None = None) -> Any:
    """A field with values above 0, and up to `most` where that is given; a default of None allows null."""
    return field(default=default, metadata={"above": 0, "most": most})


def of_landmarks(least: float | None = None, *, extension: bool = False) -> Any:
    """A field that landmark models alone can have; null: the usual. least, extension: as `at_least`, `of_extension`."""
    return field(default=None, metadata={"kind": "landmark", "least": least, "extension": extension})


def of_extension() -> Any:
    """A field that a module of `landmark.extensions` reads; null: not used."""
    return field(default=None, metadata={"extension": True})


@dataclass
class ModelConfig:
    """The model. The width of the paper's decoder is num_heads * head_dim."""

    kind: str = MISSING  # transformer, landmark or transformer_xl
    architecture: str | None = None  # module that has a `Model`, of landmark.models or with a dot any other; null: ours
    family: str | None = one_of(None, "llama")  # a model of transformers, built anew with this shape: llama
    name: str | None = None  # a model of transformers to start from: its folder or name on the hub; keeps its own shape
    as_is: bool | None = None  # of that model: train nothing
    dtype: str | None = one_of(None, "float32", "bfloat16", "float16")  # of its weights where it reads; null: float32
    lora_rank: int | None = at_least(1, None)  # train adapters and the landmark's embedding; null: everything
    num_layers: int = MISSING
    num_heads: int = MISSING
    head_dim: int = MISSING
    mlp_dim: int = MISSING
    num_kv_heads: int | None = at_least(1, None)  # heads of keys and values, shared by groups; null: num_heads
    block_size: int | None = None  # landmark: normal tokens per block
    window: int | None = None  # transformer_xl: tokens per window
    cache: int | None = None  # transformer_xl: earlier keys kept
    rope_base: float = 10000.0
    key_offset: float | None = None  # fraction of a head's channels, the last ones, with the key of the token before
    rotary_fraction: float | None = None  # fraction of a head's channels, the first ones, that positions turn; null: 1
    landmark_key: str | None = of_landmarks()  # token, or mean: plus the mean of the block's keys; null: token
    landmark_bias: bool | None = of_landmarks()  # learned numbers on landmarks' scores; null: false
    joint_softmax: float | None = of_landmarks()  # from the paper's gates (0) to one softmax (1); null: 0
    masked: bool | None = of_extension()  # see later tokens too, and predict hidden ones, 15 %; null: false
    fan_out: int | None = of_landmarks(2, extension=True)  # blocks of a group with a gate; null: no groups
    levels: int | None = of_landmarks(1, extension=True)  # of groups: of blocks, of such groups, …; null: 1
    qk_norm: bool | None = None  # normalise queries and keys (RMS, learned scales) before positions; null: false
    initialisation: str | None = None  # gpt2: N(0, 0.02), or fan_in: N(0, 1/√inputs); null: gpt2
    induction_heads: int | None = at_least(1, None)  # of each layer but the first, begin as induction heads; null: none
    backend: str = "auto"  # how attention is computed: auto, reference, blockwise or triton


@dataclass
class DataConfig:
    """The text, or the task that makes its samples."""

    name: str = MISSING
    path: str | None = None  # a local copy; null: download, where the corpus has a source on the hub
    cache: str = MISSING  # folder of the prepared streams
    workers: int | None = None  # threads that tokenise; null: one per core
    max_documents: int | None = None  # the first documents of each split; null: all
    configs: list[str] | None = None  # arxiv_math: which of the corpus's configs are taken; null: all
    bad_lines: str = one_of("stop", "skip")  # arxiv_math: stop at a line that cannot be read, or skip it
    repeats: list[float] | None = None  # text: shares of training windows with repeats, from first step to last
    tasks: float | None = above_zero(None, most=1)  # text: share of training windows that are RULER's tasks on it
    passkeys: float | None = above_zero(None, most=1)  # text: share of training windows that are pass keys; null: none
    needles: int = at_least(1, 1)  # passkey: keys in a prompt, of which one is asked for
    pairs: int = at_least(1, 8)  # mqar: pairs of a key and a value in a text
    dense: float = at_least(0, 0.5)  # passkey: fraction of its training windows that are dense
    answer_weight: float = at_least(0, 10.0)  # passkey, key_value, tasks: loss weight of determined tokens


@dataclass
class TokenizerConfig:
    """The tokenizer."""

    name: str = MISSING
    file: str | None = None  # a local file of ranks; null: download
    vocab_size: int | None = None  # GPT-2: only the first merges; null: all


@dataclass
class TrainConfig:
    """One training. A batch is `batch_size` windows (or segments) of `length` tokens, over all devices."""

    steps: int = at_least(1)
    batch_size: int = at_least(1)
    micro_batch: int | None = at_least(1, None)  # windows per device and pass; null: all at once
    length: int = at_least(1)  # tokens, landmarks included
    batches: int | None = at_least(1, None)  # different ones, again and again (+debug=overfit); null: no end of them
    k: list[int] | None = None  # landmark: earlier blocks that a query attends to, drawn for each step; null: all
    local: int | None = of_landmarks(1, extension=True)  # tokens read at a time, with a memory; null: all
    optimizer: str | None = one_of(None, "adamw", "muon")  # muon: for the matrices of linear layers; null: adamw
    muon_lr: float | None = above_zero(None)  # of these matrices, where the others have max_lr; null: max_lr
    max_lr: float = above_zero(2e-3)
    start_lr: float = above_zero(2e-5)
    final_lr: float = above_zero(4e-4)
    warmup: float = 0.02  # fraction of the steps
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 1e-3
    precision: str = one_of("32-true", "bf16-mixed")
    checkpoint_every: int = at_least(1, 500)  # steps
    validate_every: int = at_least(1, 500)  # steps
    validate_batches: int = at_least(1, 8)
    log_every: int = at_least(1, 50)  # steps


@dataclass
class TrainerConfig:
    """Where to compute."""

    name: str = "auto"
    accelerator: str = "auto"
    devices: Union[int, str] = "auto"  # noqa: UP007 (OmegaConf reads no other spelling of a union of two)
    num_nodes: int | None = at_least(1, None)  # machines; null: those on which torchrun or srun started the command
    strategy: str = "auto"
    threads: int | None = at_least(1, None)  # torch's on a CPU; null: OMP_NUM_THREADS, or the cores
    max_hours: float | None = at_least(0, 24.0)  # of a training on a CPU, as task=plan estimates; null: any number
    profiler: str | None = one_of(None, "simple", "advanced", "pytorch")  # of Lightning; reports to the run's folder


@dataclass
class RetrievalConfig:
    """Which blocks a landmark model retrieves."""

    granularity: str = "per_token_and_head"  # what has its own set: per_token_and_head, _and_group, …
    k: int = 4  # blocks
    scorer: str = "landmark"  # ranks the blocks; recent, random, mean_key and given are ablations
    recent: int = at_least(0, 0)  # newest blocks that are always among the k
    first: int = at_least(0, 0)  # blocks that begin the text and are always among the k
    rerank: int | None = None  # blocks with the best scores, of which k are taken by their tokens too; null: k


@dataclass
class MemoryConfig:
    """What is kept between the chunks of a long input."""

    blocks: int | None = None  # landmark: most blocks kept; null: all
    tier: str = "device"  # landmark: blocks lie on the device, the CPU or disk
    folder: str | None = None  # of the tier disk: where its files lie; null: the system's folder for temporary files
    cache: int = 128  # of the other tiers: blocks of a layer, all heads, that the device keeps of those it fetched
    index: str = "exact"  # exact scans all landmarks; faiss searches an index of them
    index_type: str = "ivf"  # of faiss: ivf (approximate) or flat
    candidates: int = 16  # of faiss: older blocks found for each query
    load: str | None = None  # task=generate: folder of a saved memory to go on from
    save: str | None = None  # task=generate: folder for the memory of `prompt_file`
    window: int | None = at_least(1, None)  # transformer: last keys kept; model=pretrained: read beside the k blocks
    sinks: int = at_least(0, 4)  # transformer with a window: first keys kept


@dataclass
class CmtConfig:
    """The context miss token (paper, Appendix D)."""

    enabled: bool = False
    cutoff: float = 0.0  # below this weight of the token nothing is retrieved
    cutoffs: list[float] | None = None  # one for each layer, in place of `cutoff`


@dataclass
class PositionsConfig:
    """Positions of a landmark model."""

    kind: str = one_of("standard", "jumps")  # in training: standard, or jumps after landmarks
    p_jump: int = at_least(1, 1)  # the largest jump
    mapping: str = "stingy"  # in memory: stingy, true positions, or auto: true as far as a pretrained model knows them

    def __post_init__(self):
        self.mapping = self.mapping.lower()  # `true` on a command line is a boolean, which becomes True


@dataclass
class EvalConfig:
    """One evaluation."""

    length: int = at_least(1, 512)  # tokens of a segment
    local: int | None = at_least(1, None)  # tokens fed at a time; null: the model's usual number
    split: str = one_of(MISSING, "validation", "test")  # validation or test
    tokens: int | None = at_least(1, None)  # in all, in evenly spaced spans that every row shares; null: all
    span: int = at_least(1, 4096)  # tokens of such a span
    batch_size: int | None = at_least(1, None)
    prompts: int = at_least(1, 50)  # of tasks with prompts; segments of a probe
    generated: int | None = at_least(1, None)  # tokens generated after a prompt; null: of a task as published, else 10
    task: str | None = one_of(None, *RULER_TASKS, "passkey")  # answer `prompts` questions of it; RULER's: on the text
    retriever: str | None = one_of(None, "landmark", "tokens", "bm25", "chance")  # ranks blocks for `prompts` sentences
    query: str = one_of("second_half", "sentence", "altered")  # what of a sentence a retriever is given
    probe: str | None = one_of(None, "copy", "recall")  # whether the model looks back, measured on `prompts` segments
    retrieval_statistics: bool = False  # count the distinct blocks that the last chunk but one retrieves


@dataclass
class GenerateConfig:
    """How task=generate continues a prompt (`landmark.models.sampling.Sampling`)."""

    tokens: int = at_least(1, 200)  # most tokens generated
    temperature: float = at_least(0, 0.0)
    top_k: int | None = at_least(1, None)
    top_p: float = above_zero(1.0, most=1)
    stop: list[str] = field(default_factory=list)  # texts of one token that end it, as end of text does
    limit: int | None = at_least(1, None)  # most tokens of a prompt


@dataclass
class LoggerConfig:
    """Weights & Biases, beside the CSV file of each run."""

    wandb: bool = True
    beside: str | None = one_of(None, "tensorboard", "mlflow", "trackio")  # it gets the metrics of trainings too
    weights: bool = True  # upload the trained model; else its artifact has a checksum and the place alone
    project: str = "landmark"
    entity: str | None = None
    mode: str = one_of("auto", "online", "offline", "disabled")  # auto: online where a key is configured, else offline


@dataclass
class GridConfig:
    """Rows for all combinations of some values."""

    row: str = ""  # overrides that they share
    axes: dict[str, list[Any]] = field(default_factory=dict)  # key to its values


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
    seed: int = at_least(0, 0)
    seeds: list[int] | None = None  # each row once for each seed
    row: str | None = None  # one row of the experiment
    run: str | None = None  # folder of a trained run to use in place of the one that these settings name
    prompt: str | None = None  # task=generate, inspect: the text to read, after the content of prompt_file
    prompt_file: str | None = None  # -: standard input
    output_file: str | None = None  # task=inspect: the page; null: named after the text and the run
    start: str | None = None  # of a row: the row whose run its training starts from, or, as_is, whose run it reads
    start_run: dict[str, Any] | None = None  # configuration of that run, filled in
    rows: dict[str, str] = field(default_factory=dict)  # name to overrides; a name with braces stands for several rows
    parts: dict[str, str] = field(default_factory=dict)  # what a choice in such braces adds: name to overrides
    grid: GridConfig = field(default_factory=GridConfig)
    figure: str = "rows"  # of landmark.results.figures
    panels: dict[str, PanelConfig] = field(default_factory=dict)  # in place of that picture: title to a panel
    compare: dict[str, list[str]] = field(default_factory=dict)  # title to two rows, the better one expected first
    next_commands: dict[str, str] = field(default_factory=dict)  # shown below the table: title to overrides, where
    # {ROW} is the folder of a row's run and {stdlib} that of Python's standard library
    output: str = "outputs"  # folder of all that is made
    size: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cmt: CmtConfig = field(default_factory=CmtConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


# Groups whose options set a key or two, as `cmt=on` does: the others are folders of conf/.
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "retrieval": {
        name: {"granularity": name} for name in ("per_token_and_head", "per_head", "per_token", "per_token_and_group")
    },
    "cmt": {"off": {"enabled": False}, "on": {"enabled": True}},
    "positions": {"standard": {"kind": "standard"}, "jumps": {"kind": "jumps", "p_jump": 100}},
    "logger": {
        "csv": {"wandb": False},
        "wandb": {"wandb": True},
        **{name: {"wandb": False, "beside": name} for name in ("tensorboard", "mlflow", "trackio")},
    },
    "trainer": {
        "auto": {"name": "auto", "accelerator": "auto", "devices": 1},  # one GPU if there is one, else the CPU
        "cpu": {"name": "cpu", "accelerator": "cpu", "devices": 1},
        "gpu": {"name": "gpu", "accelerator": "gpu", "devices": 1},
        # Every GPU of this machine, one process each; with fsdp they share out weights, gradients and moments (FSDP2).
        "ddp": {"name": "ddp", "accelerator": "gpu", "devices": "auto", "strategy": "ddp"},
        "fsdp": {"name": "fsdp", "accelerator": "gpu", "devices": "auto", "strategy": "fsdp"},
    },
}


def register() -> None:
    """Make the schema known to Hydra, as `schema` at the head of conf/config.yaml's defaults, and the small groups."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in GROUPS.items():
        for name, values in options.items():
            store.store(group=group, name=name, node=values)


def to_config(composed: DictConfig) -> Config:
    """Plain dataclasses from a composed config, interpolations resolved.

    Raises UserError: unknown key (added with +), missing value.
    """
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0]) from error
    if not isinstance(config, Config):
        raise TypeError("the composed config does not follow the schema: `schema` is missing in its defaults")
    for item in fields(Config):  # which an interpolation may replace
        value, group = getattr(config, item.name), item.default_factory
        if isinstance(group, type) and is_dataclass(group) and not isinstance(value, group):
            raise UserError(f"{item.name}={value}: is a group of settings, name one of its options")
    if unknown := _unknown_keys(composed, config):
        raise UserError(f"unknown key {', '.join(unknown)}: see landmark/config/schema.py for those that exist")
    return config


def _unknown_keys(composed: DictConfig, config: Any, prefix: str = "") -> list[str]:
    known = {item.name: getattr(config, item.name) for item in fields(config)}
    unknown = [f"{prefix}{key}" for key in composed if key not in known]
    for name, value in known.items():
        if is_dataclass(value):
            unknown += _unknown_keys(composed[name], value, f"{prefix}{name}.")
    return unknown


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as JSON-ready values."""
    return asdict(config)


T = TypeVar("T")


def from_dict(schema: type[T], values: dict[str, Any], where: str = "the configuration") -> T:
    """The inverse of `dataclasses.asdict`; a value that an earlier version did not have is the default.

    Args:
        schema: the class of the result.
        values: of its fields.
        where: place of the values, for messages.

    Raises UserError for an unknown key, and for a removed setting that had an effect.
    """
    check_retired(values, where)
    given, hints = without_retired(values), get_type_hints(schema)
    if unknown := sorted(given.keys() - hints.keys()):
        raise UserError(f"{where}: unknown key {', '.join(unknown)}: it was made with another version of landmark")
    for name, value in given.items():
        if is_dataclass(hint := hints[name]) and isinstance(hint, type):
            given[name] = from_dict(hint, value, f"{where}, {name}")  # pyright: ignore[reportArgumentType]
        elif get_origin(hint) is dict and is_dataclass(of := get_args(hint)[1]) and isinstance(of, type):
            parts: Any = value
            given[name] = {key: from_dict(of, each, f"{where}, {name}.{key}") for key, each in parts.items()}
    return schema(**given)
