"""The configuration of a decoder, and its checks. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from landmark.memory.settings import LANDMARK_KEYS
from landmark.utils.backends import BACKENDS
from landmark.utils.block_ends import BLOCK_ENDS, BlockEnds, Ids, block_ends
from landmark.utils.channels import channels_of
from landmark.utils.errors import UserError
from landmark.utils.fractions import fraction, joint_softmax_of

if TYPE_CHECKING:
    from landmark.config.schema import ModelConfig

INITIALISATIONS = ("gpt2", "fan_in")
_WITH_DEFAULTS = (
    "key_offset",
    "rotary_fraction",
    "no_rope_layer_interval",
    "landmark_key",
    "landmark_bias",
    "fan_out",
    "levels",
    "local_blocks",
    "landmark_values",
    "joint_softmax",
    "block_ends",
    "least_block_size",
    "qk_norm",
    "initialisation",
    "induction_heads",
    "short_convolution",
    "masked",
)
_OF_LANDMARKS = (
    *("landmark_id", "block_size", "landmark_key", "landmark_bias", "local_blocks", "landmark_values", "joint_softmax"),
    *("cmt", "fan_out", "levels", "block_ends", "least_block_size", "end_ids", "document_end"),
)
KINDS = ("transformer", "landmark", "transformer_xl")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, which is stored beside its weights.

    Raises UserError, naming the setting, for a value that is missing, out of range or of another kind of model.

    Args:
        kind: one of KINDS.
        vocab_size: rows of the embedding matrix.
        num_layers: number of layers.
        num_heads: query heads.
        head_dim: d, numbers of a head; even, because rotary positions rotate pairs.
        mlp_dim: width of the hidden layer of a perceptron.
        num_kv_heads: heads of keys and values (None: as many as query heads).
        landmark_id: token id of the landmark; required for a landmark model.
        block_size: ℓ, normal tokens of a block; required for a landmark model.
        window: tokens that a Transformer-XL reads at a time; required there.
        cache: keys of earlier windows that a Transformer-XL keeps; required there.
        rope_base: base of the rotary frequencies.
        backend: one of BACKENDS.
        cmt: whether a landmark model has a context miss token.
        key_offset: fraction of each head's channels, the last ones, in which a key is that of the normal token before
            (`landmark.attention.key_offset`).
        rotary_fraction: fraction of each head's channels, the first ones, that rotary positions turn.
        no_rope_layer_interval: n: of the layers 1, 2, 3, … the n-th, 2n-th, … have no rotary positions, as in models of
            transformers with this setting (SmolLM3, Llama 4); None: all layers have them.
        landmark_key: "token", the paper's; "mean": plus the mean of the block's keys; or "pooled": plus the block's
            keys, weighed by the landmark's query (`landmark.attention.landmark_keys`).
        landmark_bias: whether each head adds a learned number to the scores of landmarks (there too).
        qk_norm: whether queries and keys are divided by their root mean square, with learned scales, before positions.
        initialisation: "gpt2": N(0, 0.02), or "fan_in": N(0, 1/√inputs) for linear layers.
        induction_heads: heads of keys, the last ones of each layer but the first, that begin as induction heads: in the
            channels of key_offset their queries and keys have the same weights, so that a query finds tokens that
            follow an earlier occurrence of its own token (Olsson et al. 2022). They are trained as the others are.
        short_convolution: tokens, itself included, of whose hidden states each channel gets a learned sum before
            attention and perceptron (`landmark.models.short_convolution`); 1: none.
        local_blocks: blocks before a query's own whose tokens a landmark model sees without their landmarks.
        landmark_values: whether blocks that are not among the best are read by their landmarks' values
            (`landmark.attention.top_k`); for a landmark model without groups and context miss token.
        joint_softmax: how much of the log-sum-exp of a block's scores is added to its landmark's score, from 0, the
            paper's gates, to 1, one softmax over the tokens of all blocks (`landmark.attention.landmark_attention`);
            for a landmark model without groups, values of landmarks and context miss token.
        masked: whether tokens see later ones too, and hidden tokens are predicted instead of the next ones (Appendix
            F). A transformer or a landmark model without a context miss token; it has no memory.
        fan_out: m, nodes of a group in a hierarchy of landmarks (`landmark.attention.hierarchy`); None: no groups. The
            bias of groups, log m, is learned with landmark_bias.
        levels: of groups.
        block_ends: one of BLOCK_ENDS: all blocks of a landmark model have ℓ tokens, or they end early, where sentences
            or lines and documents do (`landmark.utils.block_places`).
        least_block_size: tokens of a block from which on it may end early; required where blocks do.
        end_ids: ids at which it may end; required there.
        document_end: id of end of text; required there.
        architecture: module of `landmark.models` whose `Model` is built (None: the paper's decoder).
    """

    kind: str
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_kv_heads: int | None = None
    landmark_id: int | None = None
    block_size: int | None = None
    window: int | None = None
    cache: int | None = None
    rope_base: float = 10000.0
    backend: str = "auto"
    cmt: bool = False
    key_offset: float = 0.0
    rotary_fraction: float = 1.0
    landmark_key: str = "token"
    landmark_bias: bool = False
    qk_norm: bool = False
    initialisation: str = "gpt2"
    architecture: str | None = field(default=None, repr=False)
    local_blocks: int = field(default=0, repr=False)  # a saved memory has it beside the model's fingerprint
    masked: bool = field(default=False, repr=False)
    fan_out: int | None = field(default=None, repr=False)
    levels: int = field(default=1, repr=False)
    block_ends: str = field(default="fixed", repr=False)
    least_block_size: int | None = field(default=None, repr=False)
    end_ids: tuple[int, ...] = field(default=(), repr=False)
    document_end: int | None = field(default=None, repr=False)
    landmark_values: bool = field(default=False, repr=False)
    induction_heads: int = field(default=0, repr=False)
    joint_softmax: float = field(default=0.0, repr=False)
    no_rope_layer_interval: int | None = field(default=None, repr=False)
    short_convolution: int = field(default=1, repr=False)

    def __post_init__(self):
        for name, choices in (
            ("kind", KINDS),
            ("backend", BACKENDS),
            ("landmark_key", LANDMARK_KEYS),
            ("initialisation", INITIALISATIONS),
            ("block_ends", BLOCK_ENDS),
        ):
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"model.{name}={value}: must be one of {', '.join(choices)}")
        needed = {"landmark": ("block_size",), "transformer_xl": ("window", "cache")}.get(self.kind, ())
        for name in needed:
            if getattr(self, name) is None:
                raise UserError(f"model.{name}=null: a {self.kind} model needs it")
        for name in ("num_layers", "num_heads", "head_dim", "mlp_dim", "block_size", "window", "cache"):
            least = 0 if name == "cache" else 1
            if (value := getattr(self, name)) is not None and value < least:
                raise UserError(f"model.{name}={value}: must be at least {least}")
        if (interval := self.no_rope_layer_interval) is not None and not 1 <= interval <= self.num_layers:
            raise UserError(
                f"model.no_rope_layer_interval={interval}: must be from 1 to model.num_layers={self.num_layers}"
            )
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim}: must be even, because positions rotate pairs of numbers")
        for name in ("key_offset", "rotary_fraction"):
            fraction(f"model.{name}", getattr(self, name), "a fraction of a head's channels")
        object.__setattr__(self, "joint_softmax", joint_softmax_of(self.joint_softmax))
        if self.induction_heads and not channels_of(self.key_offset, self.head_dim):
            raise UserError(f"model.induction_heads={self.induction_heads}: needs model.key_offset above 0")
        if self.induction_heads and self.num_layers == 1:
            raise UserError(f"model.induction_heads={self.induction_heads}: there is one layer, raise model.num_layers")
        if not 0 <= self.induction_heads <= (most := self.num_kv_heads or self.num_heads):
            raise UserError(f"model.induction_heads={self.induction_heads}: must be from 0 to the {most} heads of keys")
        if self.short_convolution < 1:
            raise UserError(f"model.short_convolution={self.short_convolution}: must be at least 1")
        if self.kind == "landmark" and self.block_size is not None and self.short_convolution > self.block_size + 1:
            raise UserError(
                f"model.short_convolution={self.short_convolution}: must be at most a block and its landmark, "
                f"model.block_size + 1 = {self.block_size + 1}"
            )
        if self.landmark_key != "token" and self.kind != "landmark":
            raise UserError(f"model.landmark_key={self.landmark_key}: model={self.kind} has no landmarks")
        if self.landmark_bias and self.kind != "landmark":
            raise UserError(f"model.landmark_bias=true: model={self.kind} has no landmarks")
        if self.local_blocks and self.kind != "landmark":
            raise UserError(f"model.local_blocks={self.local_blocks}: model={self.kind} has no landmarks")
        if (self.local_blocks or self.masked) and self.backend == "triton":
            name = "masked=true" if self.masked else f"local_blocks={self.local_blocks}"
            raise UserError(f"model.{name}: the fused kernels do not have it, set model.backend=auto")
        if self.masked and (self.kind == "transformer_xl" or self.cmt):
            what = "cmt=on" if self.cmt else f"model={self.kind}"
            raise UserError(f"model.masked=true: {what} reads a text in one direction, leave out one of them")
        if self.landmark_values and (self.kind != "landmark" or self.cmt or self.masked or self.fan_out is not None):
            raise UserError(
                "model.landmark_values=true: is for model=landmark without cmt, model.masked, model.fan_out"
            )
        if self.joint_softmax and (
            self.kind != "landmark" or self.cmt or self.landmark_values or self.fan_out is not None
        ):
            raise UserError(
                f"model.joint_softmax={self.joint_softmax}: is for model=landmark without cmt, model.landmark_values, "
                "model.fan_out"
            )
        if self.fan_out is not None and self.kind != "landmark":
            raise UserError(f"model.fan_out={self.fan_out}: model={self.kind} has no landmarks")
        if self.fan_out is None and self.levels != 1:
            raise UserError(f"model.levels={self.levels}: are levels of groups of landmarks, set model.fan_out")
        if self.fan_out is not None and (self.fan_out < 2 or self.levels < 1):
            raise UserError(f"model.fan_out={self.fan_out}, model.levels={self.levels}: must be at least 2 and 1")
        if self.fan_out is not None and (self.local_blocks or self.masked):
            name = "masked=true" if self.masked else f"local_blocks={self.local_blocks}"
            raise UserError(f"model.{name}: goes without groups of landmarks, set model.fan_out=null")
        if self.fan_out is not None and self.backend == "triton":
            raise UserError(f"model.fan_out={self.fan_out}: the fused kernels do not have it, set model.backend=auto")
        if self.landmark_key == "pooled" and not self.landmark_bias:
            raise UserError("model.landmark_key=pooled adds an entropy to scores: it needs model.landmark_bias=true")
        if self.landmark_bias and channels_of(self.rotary_fraction, self.head_dim) == self.head_dim:
            raise UserError(
                f"model.landmark_bias=true needs a channel that does not turn: lower "
                f"model.rotary_fraction={self.rotary_fraction}"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise UserError(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.kind == "landmark" and self.landmark_id is None:
            raise UserError("model.kind=landmark: the model needs the landmark's token id (landmark_id)")
        if self.cmt and self.kind != "landmark":
            raise UserError(f"cmt=on: model={self.kind} has no landmarks that a context miss token could control")
        object.__setattr__(self, "end_ids", tuple(self.end_ids))  # a list where it was read from a file
        self._check_block_ends()

    def _check_block_ends(self) -> None:
        least, name = self.least_block_size, f"model.block_ends={self.block_ends}"
        if self.block_ends == "fixed":
            if least is not None:
                raise UserError(f"model.least_block_size={least}: is for model.block_ends=sentences or lines")
            return
        if self.kind != "landmark" or self.block_size is None:
            raise UserError(f"{name}: model={self.kind} has no landmarks")
        if least is None or not 1 <= least <= self.block_size:
            raise UserError(f"model.least_block_size={least}: must be from 1 to model.block_size={self.block_size}")
        if not self.end_ids or self.document_end is None:
            raise UserError(f"{name}: needs the ids at which blocks end (end_ids, document_end)")
        for option, value, only in (
            ("model.landmark_key", "pooled" if self.landmark_key == "pooled" else None, "token or mean"),
            ("model.local_blocks", self.local_blocks or None, "0"),
            ("model.masked", self.masked or None, "null"),
            ("model.short_convolution", self.short_convolution if self.short_convolution > 1 else None, "null"),
            ("model.fan_out", self.fan_out, "null"),
            ("cmt", "on" if self.cmt else None, "off"),
        ):
            if value is not None:
                raise UserError(f"{name}: goes without {option}={value}, set {option}={only}")

    @property
    def ends(self) -> BlockEnds | None:
        """The rule by which blocks end early; None: all have ℓ tokens."""
        if self.block_ends == "fixed":
            return None
        assert self.block_size is not None
        assert self.least_block_size is not None
        assert self.document_end is not None
        return BlockEnds(self.block_size, self.least_block_size, self.end_ids, self.document_end)

    @property
    def still_layers(self) -> frozenset[int]:
        """The layers, counted from 0, that have no rotary positions."""
        interval = self.no_rope_layer_interval
        return frozenset() if interval is None else frozenset(range(interval - 1, self.num_layers, interval))

    def without_landmarks(self) -> DecoderConfig:
        """The plain transformer of the same shape, from whose weights a landmark model can start."""
        usual = {item.name: item.default for item in fields(self) if item.name in _OF_LANDMARKS}
        return replace(self, kind="transformer", **usual)

    @property
    def hidden_dim(self) -> int:
        return self.num_heads * self.head_dim


class Vocabulary(Ids, Protocol):
    """The attributes of a tokenizer that a model needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def landmark(self) -> int: ...


def decoder_config(model: ModelConfig, tokenizer: Vocabulary, cmt: bool = False) -> DecoderConfig:
    """The configuration of the decoder that the config group `model` and a tokenizer describe.

    cmt: whether it has a context miss token. Settings of other kinds of model are left out. Raises UserError as
    `DecoderConfig` does.
    """
    is_landmark, is_xl = model.kind == "landmark", model.kind == "transformer_xl"
    options = {name: value for name in _WITH_DEFAULTS if (value := getattr(model, name)) is not None}
    if model.block_ends in BLOCK_ENDS and is_landmark and model.block_size is not None:
        ends = block_ends(model.block_ends, model.block_size, model.least_block_size, tokenizer)
        if ends is not None:
            options |= {"least_block_size": ends.least, "end_ids": ends.ends, "document_end": ends.document_end}
    return DecoderConfig(
        kind=model.kind,
        vocab_size=tokenizer.vocab_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_kv_heads,
        mlp_dim=model.mlp_dim,
        landmark_id=tokenizer.landmark if is_landmark else None,
        block_size=model.block_size if is_landmark else None,
        window=model.window if is_xl else None,
        cache=model.cache if is_xl else None,
        rope_base=model.rope_base,
        backend=model.backend,
        cmt=cmt,
        architecture=model.architecture,
        **options,
    )


class _AnyVocabulary(NamedTuple):
    vocab_size: int = 1
    landmark: int = 0
    eot: int = 0
    sentence_ends: tuple[int, ...] = (0,)
    line_ends: tuple[int, ...] = (0,)


def check_decoder(model: ModelConfig, cmt: bool = False) -> DecoderConfig:
    """`decoder_config` without a tokenizer, to check the settings: the vocabulary is a placeholder.

    Raises UserError as `DecoderConfig` does, and for an option of our decoder in a model of transformers.
    """
    if model.name is not None or model.family is not None:
        for name in (*_WITH_DEFAULTS, "num_kv_heads"):
            if (value := getattr(model, name)) is not None:
                raise UserError(f"model.{name}={value}: is for our decoder, not models of transformers")
    return decoder_config(model, _AnyVocabulary(), cmt)
