"""The typed schema of the whole configuration: a misspelt key or a wrong type is refused at compose time."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.utils.errors import UserError

SYNTHETIC = ("passkey", "key_value")  # data that is made as needed, and evaluated by the answers to its prompts
POSITION_BIN = 64  # positions of a segment whose losses a record sums, for the curve over positions
TASKS = (
    *("auto", "table", "evaluate", "train", "prepare", "plan"),
    *("generate", "inspect", "report", "status", "dashboard"),
)


@dataclass
class ModelConfig:
    """The decoder: `kind` is transformer, landmark or transformer_xl; its width is num_heads * head_dim.

    architecture: module of landmark.models whose `Model` is built in place of the paper's decoder (null).
    family: of transformers, built anew with this shape (llama); null: the paper's decoder. name: folder of a
    transformers model, or its name on the hub, that the training starts from; its own shape counts. as_is: train
    nothing. lora_rank: train adapters of this rank, and the landmark's embedding; null: train everything.
    """

    kind: str = MISSING
    architecture: str | None = None
    family: str | None = None
    name: str | None = None
    as_is: bool | None = None
    lora_rank: int | None = None
    num_layers: int = MISSING
    num_heads: int = MISSING
    head_dim: int = MISSING
    mlp_dim: int = MISSING
    block_size: int | None = None  # landmark: normal tokens per block
    window: int | None = None  # transformer_xl: tokens per window
    cache: int | None = None  # transformer_xl: earlier keys kept
    rope_base: float = 10000.0
    backend: str = "auto"  # how attention is computed: auto, reference, blockwise or triton


@dataclass
class DataConfig:
    """A corpus; `path` names a local copy, `cache` is where prepared streams are kept."""

    name: str = MISSING
    path: str | None = None
    cache: str = MISSING
    workers: int | None = None
    max_documents: int | None = None  # per split
    configs: list[str] | None = None  # arxiv_math: which of the corpus's configs are taken; null: all
    bad_lines: str = "stop"  # arxiv_math: stop at a line that is not as it should be, or skip it
    needles: int = 1  # passkey: keys in a prompt, of which one is asked for
    dense: float = 0.5  # passkey: fraction of the training samples that are dense
    answer_weight: float = 10.0  # passkey, key_value: of the loss where the answer can be read off the text


@dataclass
class TokenizerConfig:
    """A tokenizer; `file` names a local ranks file, `vocab_size` takes only the first merges of GPT-2 (null: all)."""

    name: str = MISSING
    file: str | None = None
    vocab_size: int | None = None


@dataclass
class TrainConfig:
    """One training. A batch is `batch_size` windows (or segments) of `length` tokens, over all devices."""

    steps: int = MISSING
    batch_size: int = MISSING
    micro_batch: int | None = None  # windows per device and pass; null: all at once
    length: int = MISSING  # tokens, landmarks included
    max_lr: float = 2e-3
    start_lr: float = 2e-5
    final_lr: float = 4e-4
    warmup: float = 0.02  # fraction of the steps
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 1e-3
    precision: str = "32-true"
    checkpoint_every: int = 500
    validate_every: int = 500
    validate_batches: int = 8
    log_every: int = 50


@dataclass
class TrainerConfig:
    """Where to compute; `threads` are torch's (null: as torch decides).

    profiler: simple, advanced or pytorch, one of Lightning's, reports into the run's folder.
    """

    name: str = "auto"
    accelerator: str = "auto"
    devices: Union[int, str] = "auto"  # noqa: UP007 (OmegaConf reads no other spelling of a union of two)
    strategy: str = "auto"
    threads: int | None = None
    profiler: str | None = None


@dataclass
class RetrievalConfig:
    """Which blocks are read back: `k` of them, ranked by `scorer`, one set for each `granularity`."""

    granularity: str = "per_token_and_head"
    k: int = 4
    scorer: str = "landmark"


@dataclass
class MemoryConfig:
    """At most `blocks` blocks are kept (null: all), on the device, the CPU or disk, there in files in `folder` (null:
    the system's for temporary ones). `cache` blocks of a layer, all heads, stay on the device of those fetched. `load`,
    `index` faiss finds `candidates` of the older blocks for each query, in place of a scan. `load`,
    `save`: folders of memories, which task=generate goes on from, or makes of what `prompt_file` holds.

    A plain transformer keeps nothing, or with `window` the first `sinks` keys and the last `window`.
    """

    blocks: int | None = None
    tier: str = "device"
    folder: str | None = None
    cache: int = 128
    index: str = "exact"
    index_type: str = "ivf"
    candidates: int = 16
    load: str | None = None
    save: str | None = None
    window: int | None = None
    sinks: int = 4


@dataclass
class CmtConfig:
    """The context miss token: where it weighs less than `cutoff`, nothing is retrieved.

    cutoffs: one for each layer, in its place. per_layer: choose them on the validation split, for the share of lookups
    that `cutoff` drops.
    """

    enabled: bool = False
    cutoff: float = 0.0
    cutoffs: list[float] | None = None
    per_layer: bool = False


@dataclass
class PositionsConfig:
    """Positions in training: standard, or jumps of up to p_jump after each landmark.

    mapping: how a memory is read, stingy or at the true positions.
    """

    kind: str = "standard"
    p_jump: int = 1
    mapping: str = "stingy"

    def __post_init__(self):
        self.mapping = self.mapping.lower()  # `true` on a command line is a boolean, which becomes True


@dataclass
class EvalConfig:
    """Evaluation: segments of `length` tokens fed `local` at a time (null: what the model was built for).

    `tokens` null counts the whole split, else evenly spaced spans of `span` tokens, the same for every row.
    """

    length: int = 512
    local: int | None = None
    split: str = MISSING  # validation or test
    tokens: int | None = None
    span: int = 4096
    batch_size: int | None = None
    prompts: int = 50  # tasks with prompts: how many
    generated: int = 10  # tasks with prompts: tokens generated after each
    retriever: str | None = None  # rank a split's blocks for `prompts` torn sentences: landmark, bm25 or chance
    retrieval_statistics: bool = False  # count the distinct blocks that the chunk before the last retrieves


@dataclass
class GenerateConfig:
    """How task=generate goes on from a prompt: at most `tokens` tokens, drawn as `landmark.models.sampling.Sampling`
    says; `stop`: texts of one token that end it, as end of text does; `limit`: most tokens of a prompt."""

    tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    limit: int | None = None


@dataclass
class LoggerConfig:
    """Weights & Biases, beside the CSV file of each run. `mode` auto: online only if a key is configured.

    weights: upload the trained model, which else is named with its checksum and stays where it is.
    """

    wandb: bool = True
    weights: bool = True
    project: str = "landmark"
    entity: str | None = None
    mode: str = "auto"


@dataclass
class GridConfig:
    """Rows for all combinations of the values of `axes` (key to values); `row` is what they share."""

    row: str = ""
    axes: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class Config:
    """Everything that can be set. `rows`: name to overrides; `compare`: title to two rows; `figure`: results.figures.

    start: of a row, the row whose run its own run goes on from; start_run: the configuration of that, filled in.
    """

    name: str = "single"
    task: str = "auto"
    seed: int = 0
    seeds: list[int] | None = None
    row: str | None = None
    run: str | None = None  # folder of a trained run to evaluate instead of the one these settings name
    prompt: str | None = None  # task=generate, inspect: the text to read; what prompt_file holds comes before it
    prompt_file: str | None = None  # -: standard input
    output_file: str | None = None  # task=inspect: where its page is written; null: named by the text and the run
    start: str | None = None
    start_run: dict[str, Any] | None = None
    rows: dict[str, str] = field(default_factory=dict)
    grid: GridConfig = field(default_factory=GridConfig)
    figure: str = "rows"
    compare: dict[str, list[str]] = field(default_factory=dict)
    output: str = "outputs"
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


def register() -> None:
    """Make the schema known to Hydra, as `schema` at the head of conf/config.yaml's defaults."""
    ConfigStore.instance().store(name="schema", node=Config)


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


def from_dict(schema: type[T], values: dict[str, Any]) -> T:
    """The dataclass that `dataclasses.asdict` gave `values` of."""
    hints = get_type_hints(schema)
    arguments = {}
    for item in fields(schema):  # type: ignore[arg-type]
        hint, value = hints[item.name], values[item.name]
        arguments[item.name] = value if not is_dataclass(hint) else from_dict(hint, value)  # pyright: ignore
    return schema(**arguments)
