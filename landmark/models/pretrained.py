"""Decoders of transformers as this program trains and evaluates its own (`model.family`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from landmark.errors import UserError
from landmark.models.decoder import DecoderConfig, Window, summed_loss

FAMILIES = {"llama": LlamaConfig}


class Pretrained(nn.Module):
    """A causal language model of transformers with the interface of `landmark.models.Decoder`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.config = _shape(model)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Trained numbers, with or without the embeddings."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings else total - self.model.get_input_embeddings().weight.numel()

    def new_memory(self, **settings) -> None:
        """Nothing is kept between chunks."""
        if settings:
            raise UserError(f"memory.window={settings.get('window')}: a transformers model has no window to keep")

    def new_cache(self, length: int) -> DynamicCache:
        """A memory of all tokens of a text, for a plain transformer that goes on with it."""
        return DynamicCache(config=self.model.config)

    def forward(self, tokens: Tensor, memory: DynamicCache | None = None, last: bool = False) -> Tensor:
        """Logits of the next token after each (B, T, vocabulary), or after the last alone."""
        return self.model(tokens, past_key_values=memory, use_cache=memory is not None, logits_to_keep=int(last)).logits

    def window_losses(self, batch: Window) -> Iterator[tuple[Tensor, int]]:
        """Summed loss in nats, and the number of targets, of the one window of a batch."""
        yield summed_loss(self.model(batch.tokens, use_cache=False).logits, batch.targets, batch.weights)

    def save(self, folder: Path) -> None:
        """Write transformers' own files, the configuration last, each whole or not at all."""
        partial = folder / ".weights.partial"
        shutil.rmtree(partial, ignore_errors=True)
        self.model.save_pretrained(partial)
        for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
        partial.rmdir()


def new(family: str, shape: DecoderConfig) -> Pretrained:
    """A freshly initialised model of a family; seed torch's generator before."""
    config = FAMILIES[family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_dim,
        intermediate_size=shape.mlp_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Pretrained(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def load_pretrained(folder: Path, expected: DecoderConfig | None = None) -> Pretrained:
    """Read back what `Pretrained.save` wrote."""
    return Pretrained(AutoModelForCausalLM.from_pretrained(folder))


def _shape(model: PreTrainedModel) -> DecoderConfig:
    config = model.config
    return DecoderConfig(
        kind="transformer",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        mlp_dim=config.intermediate_size,
        num_kv_heads=config.num_key_value_heads,
        rope_base=config.rope_parameters["rope_theta"],
    )
