"""The decoder, its three kinds of attention, and how it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from landmark.models.checkpoint import load, save
from landmark.models.decoder import Decoder, DecoderConfig, new_decoder

if TYPE_CHECKING:
    from landmark.models.pretrained import Pretrained

    LanguageModel = Decoder | Pretrained

__all__ = ["Decoder", "DecoderConfig", "build", "decoder_config", "load", "save"]


class ModelSettings(Protocol):
    """The config group `model`."""

    kind: str
    architecture: str | None
    family: str | None
    name: str | None
    lora_rank: int | None
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    block_size: int | None
    window: int | None
    cache: int | None
    rope_base: float
    backend: str


class Vocabulary(Protocol):
    """What a model must know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def landmark(self) -> int: ...


def decoder_config(model: ModelSettings, tokenizer: Vocabulary, cmt: bool = False) -> DecoderConfig:
    """The decoder that these settings and this tokenizer ask for; `cmt`: with a context miss token.

    Raises UserError where they do not fit together.
    """
    return DecoderConfig(
        kind=model.kind,
        vocab_size=tokenizer.vocab_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        mlp_dim=model.mlp_dim,
        landmark_id=tokenizer.landmark if model.kind == "landmark" else None,
        block_size=model.block_size if model.kind == "landmark" else None,
        window=model.window if model.kind == "transformer_xl" else None,
        cache=model.cache if model.kind == "transformer_xl" else None,
        rope_base=model.rope_base,
        backend=model.backend,
        cmt=cmt,
        architecture=model.architecture,
    )


def build(model: ModelSettings, tokenizer: Vocabulary, cmt: bool = False, start: str | None = None) -> LanguageModel:
    """A freshly initialised decoder; seed torch's generator before. start: folder, or name on the hub, of a
    transformers model whose weights it takes instead."""
    if start is not None:
        from landmark.models.pretrained import start_from

        return start_from(
            start, decoder_config(model, tokenizer, cmt), model.lora_rank, getattr(tokenizer, "inner", None)
        )
    if model.family is not None:
        from landmark.models.pretrained import new

        return new(model.family, decoder_config(model, tokenizer, cmt))
    return new_decoder(decoder_config(model, tokenizer, cmt))
