"""The configuration of a decoder, and its checks. Importing this loads no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from landmark.utils.constants import BACKENDS, ROPE_BASE, channels_of
from landmark.utils.errors import UserError
from landmark.utils.setting import REQUIRED, check_field, one_of, setting

KINDS = ("transformer", "landmark", "transformer_xl")


@dataclass(frozen=True)
class Landmarks:
    """What makes a decoder a landmark model.

    token: the landmark's id; None: the text has none, and a model of transformers finds blocks without training.
    block_size: ℓ, normal tokens of a block. alpha: of the gate. cmt: whether there is a context miss token.
    """

    token: int | None = setting(key="landmark_id")
    block_size: int = setting(least=1)
    alpha: float = setting(0.0, least=0, most=1)
    cmt: bool = False


@dataclass(frozen=True)
class Recurrence:
    """What makes a decoder a Transformer-XL. window: tokens read at a time. cache: keys of earlier windows kept."""

    window: int = setting(least=1)
    cache: int = setting(least=0)


@dataclass(frozen=True)
class KeySettings:
    """How queries and keys are made (`landmark.attention.keys`; the schema of settings says what each is).

    norm: whether queries and keys are divided by their root mean square, with learned scales, before positions.
    """

    offset: float = setting(0.0, key="key_offset", least=0, most=1)
    rotary_fraction: float = setting(1.0, least=0, most=1)
    landmark: str = setting("token", key="landmark_key", choices=("token", "mean"))
    bias: bool = setting(False, key="landmark_bias")
    rope_base: float = setting(ROPE_BASE, above=0)
    norm: bool = setting(False, key="qk_norm")


@dataclass(frozen=True)
class Start:
    """How weights begin.

    induction_heads: heads of keys, the last ones of each layer but the first, whose queries have the same weights in
    the channels of the offset. So a query finds tokens that follow an earlier occurrence of its own token (Olsson et
    al. 2022). They are trained as the others are.
    """

    initialisation: str = setting("gpt2", choices=("gpt2", "fan_in"))
    induction_heads: int = setting(0, least=0)


_GROUPS = {"landmarks": Landmarks, "recurrence": Recurrence, "keys": KeySettings, "start": Start}
_OF_KIND = {"landmark": "landmarks", "transformer_xl": "recurrence"}  # the others have these groups not


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, which is stored beside its weights.

    architecture: module of `landmark.models` whose `Model` is built (None: the paper's decoder). masked: it attends in
    both directions and predicts hidden tokens (`landmark.models.masked`). A default never changes: files leave it out.
    Raises UserError, naming the setting, for a value out of range.
    """

    vocab_size: int = setting(least=1)
    num_layers: int = setting(least=1)
    num_heads: int = setting(least=1)
    head_dim: int = setting(least=1)
    mlp_dim: int = setting(least=1)
    num_kv_heads: int | None = setting(None, least=1)
    landmarks: Landmarks | None = None
    recurrence: Recurrence | None = None
    keys: KeySettings = KeySettings()
    start: Start = Start()
    backend: str = setting("auto", choices=BACKENDS)
    architecture: str | None = None
    masked: bool = False

    def __post_init__(self):
        for name, item, value in self._settings():
            check_field(f"model.{name}", value, item)
        if self.masked and (self.recurrence or self.cmt or self.backend == "triton"):
            told = f"model={self.kind}, cmt={self.cmt}, model.backend={self.backend}"
            raise UserError(f"model.masked=true: {told} read in one direction")
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim}: must be even, because positions rotate pairs of numbers")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise UserError(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.keys.bias and channels_of(self.keys.rotary_fraction, self.head_dim) == self.head_dim:
            raise UserError("model.landmark_bias=true needs a channel that does not turn: lower model.rotary_fraction")
        count, most = self.start.induction_heads, self.num_kv_heads or self.num_heads
        if count and not channels_of(self.keys.offset, self.head_dim):
            raise UserError(f"model.induction_heads={count}: needs model.key_offset above 0")
        if count and self.num_layers == 1:
            raise UserError(f"model.induction_heads={count}: there is one layer, raise model.num_layers")
        if count > most:
            raise UserError(f"model.induction_heads={count}: must be at most the {most} heads of keys")

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
        return self.landmarks is not None and self.landmarks.cmt

    @property
    def alpha(self) -> float:
        return self.landmarks.alpha if self.landmarks else 0.0

    @property
    def hidden_dim(self) -> int:
        return self.num_heads * self.head_dim

    def without_landmarks(self) -> "DecoderConfig":
        """The plain transformer of the same shape, from whose weights a landmark model can start."""
        keys = replace(self.keys, landmark="token", bias=False)
        return replace(self, landmarks=None, keys=keys, masked=False)

    def _settings(self) -> Iterator[tuple[str, Field, Any]]:
        """All settings: the name on the command line and in files, the field, and the value."""
        for group in (self, *(getattr(self, name) for name in _GROUPS)):
            for item in fields(group) if group is not None else ():
                if item.name not in _GROUPS:
                    yield _flat_name(item), item, getattr(group, item.name)

    def to_flat(self) -> dict[str, Any]:
        """The settings other than the defaults by their names, as config.json has them."""
        changed = {name: value for name, item, value in self._settings() if value != item.default}
        return {"kind": self.kind} | changed

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration of settings by their names; those of other kinds of model have no effect.

        Raises UserError for a name that is none here, and for a kind without what it needs.
        """
        kind = values.get("kind")
        if kind not in KINDS:
            raise UserError(f"model.kind={kind}: must be one of {', '.join(KINDS)}")
        flat = {name: value for name, value in values.items() if name != "kind" and value is not None}
        arguments: dict[str, Any] = {}
        for name, group in _GROUPS.items():
            group_fields = {_flat_name(item): item for item in fields(group)}
            given = {item.name: flat.pop(key) for key, item in group_fields.items() if key in flat}
            if name in _OF_KIND.values() and name != _OF_KIND.get(kind):
                continue
            for key, item in group_fields.items():
                if item.default is MISSING and item.name not in given:
                    raise UserError(f"model.{key}=null: a {kind} model needs it")
            arguments[name] = group(**given)
        arguments |= {item.name: flat.pop(item.name) for item in fields(cls) if item.name in flat}
        if flat:
            raise UserError(
                f"model.{next(iter(flat))}: there is no such setting; experiments/tried.md has those that were removed"
            )
        return cls(**arguments)

    def fingerprint(self) -> str:
        """The part of a saved memory's identity that the configuration is."""
        return json.dumps(replace(self, backend="auto", architecture=None).to_flat(), sort_keys=True)


def _flat_name(item: Field) -> str:
    """The name of a group's field on the command line and in files."""
    return item.metadata.get("key", item.name)


@dataclass
class ModelConfig:
    """The model. The width of the paper's decoder is num_heads * head_dim."""

    kind: str = REQUIRED  # transformer, landmark or transformer_xl
    architecture: str | None = None  # module that has a `Model`, of landmark.models or with a dot any other; null: ours
    name: str | None = None  # a model of transformers to start from: its folder or name on the hub; keeps its own shape
    as_is: bool | None = None  # of that model: train nothing
    # Of its weights where it reads; null: float32, or of a .gguf file bfloat16.
    dtype: str | None = one_of(None, "float32", "bfloat16", "float16")
    bits: int | None = one_of(None, 4, 8)  # of the weights of its linear layers where it reads; null: as they are
    # File of landmarks that were learned from that model and find its blocks; the file that task=teach makes.
    landmarks: str | None = None
    lora_rank: int | None = setting(None, least=1)  # train adapters and the landmark's embedding; null: everything
    num_layers: int = REQUIRED
    num_heads: int = REQUIRED
    head_dim: int = REQUIRED
    mlp_dim: int = REQUIRED
    num_kv_heads: int | None = setting(None, least=1)  # heads of keys and values, shared by groups; null: num_heads
    block_size: int | None = setting(None, least=1)  # landmark: normal tokens per block
    window: int | None = None  # transformer_xl: tokens per window
    cache: int | None = None  # transformer_xl: earlier keys kept
    key_offset: float | None = None  # fraction of a head's channels, the last ones, with the key of the token before
    rotary_fraction: float | None = None  # fraction of a head's channels, the first ones, that positions turn; null: 1
    # Token, or mean: plus the mean of the block's keys; null: token.
    landmark_key: str | None = setting(None, kind="landmark")
    landmark_bias: bool | None = setting(None, kind="landmark")  # learned numbers on landmarks' scores; null: false
    alpha: float | None = setting(None, kind="landmark")  # null, 0: the paper's gates; 1: one softmax
    masked: bool | None = None  # see later tokens too, and predict 15 % that are hidden; null: false
    qk_norm: bool | None = None  # normalise queries and keys (RMS, learned scales) before positions; null: false
    initialisation: str | None = None  # gpt2: N(0, 0.02), or fan_in: N(0, 1/√inputs); null: gpt2
    induction_heads: int | None = setting(None, least=1)  # of each layer but the first; null: none
    backend: str = "auto"  # how attention is computed: auto, reference, blockwise or triton

    @property
    def reading_dtype(self) -> str:
        """The type of a pretrained model's weights where it reads: integers of few bits go with bfloat16."""
        is_gguf = self.as_is and str(self.name).endswith(".gguf")
        return self.dtype or ("bfloat16" if is_gguf or self.bits else "float32")


def decoder_config(model: ModelConfig, tokenizer: Any = None, cmt: bool = False) -> "DecoderConfig":
    """The configuration of the decoder that the config group `model` and a tokenizer describe (None: any).

    Settings of other kinds of model are left out. A landmark model that is not trained (`as_is`) has no landmarks.
    """
    if cmt and model.kind != "landmark":
        raise UserError(f"cmt=on: model={model.kind} has no landmarks that a context miss token could control")
    vocab_size, landmark = (1, 0) if tokenizer is None else (tokenizer.vocab_size, tokenizer.landmark)
    values: dict[str, Any] = {"vocab_size": vocab_size, "landmark_id": landmark, "cmt": cmt}
    for item in fields(model):
        has_it = item.metadata.get("kind", model.kind) == model.kind
        if has_it and item.name not in ("name", "as_is", "dtype", "bits", "landmarks", "lora_rank"):
            values[item.name] = getattr(model, item.name)
    config = DecoderConfig.from_flat(values)
    if model.as_is and config.landmarks is not None:
        return replace(config, landmarks=replace(config.landmarks, token=None))
    return config
