"""The configuration of a decoder, and its checks. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from landmark.utils.constants import BACKENDS, channels_of
from landmark.utils.errors import UserError
from landmark.utils.fractions import fraction
from landmark.utils.retired import check_retired, without_retired

if TYPE_CHECKING:
    from landmark.config.schema import ModelConfig

INITIALISATIONS = ("gpt2", "fan_in")
LANDMARK_KEYS = ("token", "mean")
KINDS = ("transformer", "landmark", "transformer_xl")


@dataclass(frozen=True)
class Landmarks:
    """What makes a decoder a landmark model.

    token: the landmark's id; None: the text has no landmarks, and a model of transformers finds blocks by a summary of
        their keys, without training.
    block_size: ℓ, normal tokens of a block.
    alpha: of the gate (`landmark.attention.gates`).
    cmt: whether the model has a context miss token.
    """

    token: int | None
    block_size: int
    alpha: float = 0.0
    cmt: bool = False


@dataclass(frozen=True)
class Recurrence:
    """What makes a decoder a Transformer-XL. window: tokens read at a time. cache: keys of earlier windows kept."""

    window: int
    cache: int


@dataclass(frozen=True)
class KeySettings:
    """How queries and keys are made (`landmark.attention.keys`).

    offset: fraction of a head's channels, the last ones, with the key of the normal token before.
    rotary_fraction: fraction of them, the first ones, that positions turn.
    landmark: "token", or "mean": plus the mean of the block's keys.
    bias: whether each head adds a learned number to the scores of landmarks.
    rope_base: of the rotary frequencies.
    norm: whether queries and keys are divided by their root mean square, with learned scales, before positions.
    """

    offset: float = 0.0
    rotary_fraction: float = 1.0
    landmark: str = "token"
    bias: bool = False
    rope_base: float = 10000.0
    norm: bool = False


@dataclass(frozen=True)
class Start:
    """How weights begin.

    initialisation: "gpt2": N(0, 0.02), or "fan_in": N(0, 1/√inputs) for linear layers.
    induction_heads: heads of keys, the last ones of each layer but the first, that begin as induction heads: in the
        channels of the offset their queries and keys have the same weights, so that a query finds tokens that follow an
        earlier occurrence of its own token (Olsson et al. 2022). They are trained as the others are.
    """

    initialisation: str = "gpt2"
    induction_heads: int = 0


# Names in files and on command lines, and the group and field that they are here.
_GROUPED = {
    "landmark_id": ("landmarks", "token"),
    "block_size": ("landmarks", "block_size"),
    "joint_softmax": ("landmarks", "alpha"),
    "cmt": ("landmarks", "cmt"),
    "window": ("recurrence", "window"),
    "cache": ("recurrence", "cache"),
    "rope_base": ("keys", "rope_base"),
    "key_offset": ("keys", "offset"),
    "rotary_fraction": ("keys", "rotary_fraction"),
    "landmark_key": ("keys", "landmark"),
    "landmark_bias": ("keys", "bias"),
    "qk_norm": ("keys", "norm"),
    "initialisation": ("start", "initialisation"),
    "induction_heads": ("start", "induction_heads"),
}
_GROUPS = {"landmarks": Landmarks, "recurrence": Recurrence, "keys": KeySettings, "start": Start}
_OF_KIND = {"landmark": "landmarks", "transformer_xl": "recurrence"}
_WITHOUT = {"joint_softmax": 0.0, "cmt": False}  # of models without landmarks; None for the others
_UNUSED = {"masked": False, "fan_out": None, "levels": 1}  # options that files of earlier versions name in all models


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, which is stored beside its weights.

    Raises UserError, naming the setting, for a value out of range.

    Args:
        vocab_size: rows of the embedding matrix.
        num_layers: number of layers.
        num_heads: query heads.
        head_dim: d, numbers of a head; even, because rotary positions rotate pairs.
        mlp_dim: width of the hidden layer of a perceptron.
        num_kv_heads: heads of keys and values (None: as many as query heads).
        landmarks: of a landmark model; None: it is another.
        recurrence: of a Transformer-XL; None: it is another.
        keys: how queries and keys are made.
        start: how weights begin.
        backend: one of BACKENDS.
        architecture: module of `landmark.models` whose `Model` is built (None: the paper's decoder).
        options: settings of a module of `landmark.extensions`, whose `Model` is then built.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_kv_heads: int | None = None
    landmarks: Landmarks | None = None
    recurrence: Recurrence | None = None
    keys: KeySettings = KeySettings()
    start: Start = Start()
    backend: str = "auto"
    architecture: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        flat = self.to_flat()
        for name, choices in (
            ("backend", BACKENDS),
            ("landmark_key", LANDMARK_KEYS),
            ("initialisation", INITIALISATIONS),
        ):
            if flat[name] not in choices:
                raise UserError(f"model.{name}={flat[name]}: must be one of {', '.join(choices)}")
        for name in ("num_layers", "num_heads", "head_dim", "mlp_dim", "block_size", "window", "cache"):
            least = 0 if name == "cache" else 1
            if (value := flat[name]) is not None and value < least:
                raise UserError(f"model.{name}={value}: must be at least {least}")
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim}: must be even, because positions rotate pairs of numbers")
        for name in ("key_offset", "rotary_fraction"):
            fraction(f"model.{name}", flat[name], "a fraction of a head's channels")
        fraction("model.joint_softmax", self.alpha, "0 the paper's gates, 1 one softmax")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise UserError(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.keys.bias and channels_of(self.keys.rotary_fraction, self.head_dim) == self.head_dim:
            raise UserError(
                f"model.landmark_bias=true needs a channel that does not turn: lower "
                f"model.rotary_fraction={self.keys.rotary_fraction}"
            )
        count, most = self.start.induction_heads, self.num_kv_heads or self.num_heads
        if count and not channels_of(self.keys.offset, self.head_dim):
            raise UserError(f"model.induction_heads={count}: needs model.key_offset above 0")
        if count and self.num_layers == 1:
            raise UserError(f"model.induction_heads={count}: there is one layer, raise model.num_layers")
        if not 0 <= count <= most:
            raise UserError(f"model.induction_heads={count}: must be from 0 to the {most} heads of keys")

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return "landmark" if self.landmarks else "transformer_xl" if self.recurrence else "transformer"

    @property
    def landmark_id(self) -> int | None:
        return self.landmarks.token if self.landmarks else None

    @property
    def block_size(self) -> int | None:
        """ℓ; None: the model has no landmarks."""
        return self.landmarks.block_size if self.landmarks else None

    @property
    def window(self) -> int | None:
        return self.recurrence.window if self.recurrence else None

    @property
    def cmt(self) -> bool:
        """Whether the model has a context miss token."""
        return self.landmarks is not None and self.landmarks.cmt

    @property
    def alpha(self) -> float:
        return self.landmarks.alpha if self.landmarks else 0.0

    @property
    def hidden_dim(self) -> int:
        return self.num_heads * self.head_dim

    def without_landmarks(self) -> DecoderConfig:
        """The plain transformer of the same shape, from whose weights a landmark model can start."""
        keys = replace(self.keys, landmark="token", bias=False)
        return replace(self, landmarks=None, keys=keys, options={})

    def to_flat(self) -> dict[str, Any]:
        """The configuration by the names of the settings, as config.json has it."""
        flat: dict[str, Any] = {"kind": self.kind}
        for item in fields(self):
            if item.name not in (*_GROUPS, "options"):
                flat[item.name] = getattr(self, item.name)
        for name, (group, own) in _GROUPED.items():
            of_group = getattr(self, group)
            flat[name] = _WITHOUT.get(name) if of_group is None else getattr(of_group, own)
        return flat | self.options

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], where: str = "model") -> DecoderConfig:
        """The configuration of settings by their names; those of other kinds of model have no effect.

        where: what they are of, for messages. Raises UserError for a kind without what it needs, for an unknown name,
        and for a removed setting with an effect.
        """
        check_retired(values, where)
        flat = {name: x for name, x in without_retired(values).items() if name not in _UNUSED or x != _UNUSED[name]}
        kind = flat.pop("kind", None)
        if kind not in KINDS:
            raise UserError(f"model.kind={kind}: must be one of {', '.join(KINDS)}")
        arguments: dict[str, Any] = {}
        for group, of_group in _GROUPS.items():
            own = {item: flat.pop(name) for name, (its, item) in _GROUPED.items() if its == group and name in flat}
            if group in _OF_KIND.values() and group != _OF_KIND.get(kind):
                continue
            missing = [name for name, (its, item) in _GROUPED.items() if its == group and own.get(item) is None]
            if needed := [name for name in missing if name in ("landmark_id", "block_size", "window", "cache")]:
                raise UserError(f"model.{needed[0]}=null: a {kind} model needs it")
            arguments[group] = of_group(**{item: value for item, value in own.items() if value is not None})
        own_names = [item.name for item in fields(cls)]
        arguments |= {name: flat.pop(name) for name in own_names if name in flat and name != "options"}
        return cls(**arguments, options={name: value for name, value in flat.items() if value is not None})

    def fingerprint(self) -> str:
        """The part of a saved memory's identity that the configuration is; it must never change."""
        flat = self.to_flat() | {"backend": "auto"}
        return f"DecoderConfig({', '.join(f'{name}={flat[name]!r}' for name in _IN_FINGERPRINT)})"


_IN_FINGERPRINT = (
    *("kind", "vocab_size", "num_layers", "num_heads", "head_dim", "mlp_dim", "num_kv_heads", "landmark_id"),
    *("block_size", "window", "cache", "rope_base", "backend", "cmt", "key_offset", "rotary_fraction", "landmark_key"),
    *("landmark_bias", "qk_norm", "initialisation"),
)


class Vocabulary(Protocol):
    """The attributes of a tokenizer that a model needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def landmark(self) -> int: ...


def decoder_config(model: ModelConfig, tokenizer: Vocabulary, cmt: bool = False) -> DecoderConfig:
    """The configuration of the decoder that the config group `model` and a tokenizer describe.

    A landmark model that is not trained (`as_is`) reads without landmarks.

    cmt: whether it has a context miss token. Settings of other kinds of model are left out. Raises UserError as
    `DecoderConfig` does.
    """
    if cmt and model.kind != "landmark":
        raise UserError(f"cmt=on: model={model.kind} has no landmarks that a context miss token could control")
    of_other_models = ("family", "name", "as_is", "dtype", "lora_rank")
    values = {item.name: getattr(model, item.name) for item in fields(model) if item.name not in of_other_models}
    values |= {"vocab_size": tokenizer.vocab_size, "landmark_id": tokenizer.landmark, "cmt": cmt}
    if model.kind != "landmark":
        values |= {"landmark_key": None, "landmark_bias": None}
    config = DecoderConfig.from_flat(values)
    if model.as_is and config.landmarks is not None:
        return replace(config, landmarks=replace(config.landmarks, token=None))
    return config


class _AnyVocabulary(NamedTuple):
    vocab_size: int = 1
    landmark: int = 0


def check_decoder(model: ModelConfig, cmt: bool = False) -> DecoderConfig:
    """`decoder_config` without a tokenizer, to check the settings: the vocabulary is a placeholder.

    Raises UserError as `DecoderConfig` does, and for an option of our decoder in a model of transformers.
    """
    if model.name is not None or model.family is not None:
        own = (*_GROUPED.keys() - {"block_size", "window", "cache", "rope_base"}, "num_kv_heads")
        options = [item.name for item in fields(model) if item.metadata.get("extension")]
        for name in (*sorted(name for name in own if hasattr(model, name)), *options):
            if (value := getattr(model, name)) is not None:
                raise UserError(f"model.{name}={value}: is for our decoder, not models of transformers")
    return decoder_config(model, _AnyVocabulary(), cmt)
