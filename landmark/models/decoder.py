"""One decoder for all three models of the paper: plain, landmark and Transformer-XL (Section 4.1).

GPT-2-like: pre-LayerNorm, GELU, no biases, embeddings tied to the head, rotary positions. The three differ only in
what attends.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.attention import landmark_attention
from landmark.attention.causal import causal_attention
from landmark.attention.layout import insert_landmarks
from landmark.attention.rotary import RotaryTable, rotary_factors, rotate, rotate_cmt
from landmark.memory import Memory, RecurrentMemory, SinkMemory
from landmark.models import generation
from landmark.utils.backends import BACKENDS
from landmark.utils.errors import UserError
from landmark.utils.extensions import load_extension

KINDS = ("transformer", "landmark", "transformer_xl")
IGNORED = -100  # target of a position without loss

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is built from; it is stored beside the weights. Raises UserError where it cannot be built."""

    kind: str
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_kv_heads: int | None = None  # None: as many as heads
    landmark_id: int | None = None
    block_size: int | None = None
    window: int | None = None  # Transformer-XL: tokens read at a time
    cache: int | None = None  # Transformer-XL: keys kept of what came before
    rope_base: float = 10000.0
    backend: str = "auto"
    cmt: bool = False  # landmark: a context miss token
    architecture: str | None = field(default=None, repr=False)  # module of `landmark.models`; None: this one

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"model.kind={self.kind}: must be one of {', '.join(KINDS)}")
        if self.backend not in BACKENDS:
            raise UserError(f"model.backend={self.backend}: must be one of {', '.join(BACKENDS)}")
        if self.kind == "landmark" and (not self.block_size or self.block_size < 1 or self.landmark_id is None):
            raise UserError(f"model.block_size={self.block_size}: a landmark model needs a block size of at least 1")
        if self.cmt and self.kind != "landmark":
            raise UserError(f"cmt=on: a context miss token means nothing to model.kind={self.kind}")
        if self.kind == "transformer_xl" and (not self.window or self.cache is None):
            raise UserError("model.window, model.cache: a Transformer-XL needs both")
        if self.head_dim % 2 or min(self.num_layers, self.num_heads, self.head_dim, self.mlp_dim) < 1:
            raise UserError("model: layers, heads, head_dim and mlp_dim must be at least 1, and head_dim even")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise UserError(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")

    @property
    def hidden_dim(self) -> int:
        return self.num_heads * self.head_dim


class Window(Protocol):
    """What the models train on: see `landmark.data.windows.Batch`."""

    tokens: Tensor
    targets: Tensor
    phase: Tensor | None
    weights: Tensor | None
    controlled: Tensor | None
    positions: Tensor | None


class SelfAttention(nn.Module):
    """Projections around an attention function that is given from outside."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(config.hidden_dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: (B, T, hidden) → (B, T, hidden)."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.out(attend(*qkv.split(self.heads, dim=1)).transpose(1, 2).flatten(2))

    def key(self, x: Tensor) -> Tensor:
        """Keys alone: (1, hidden) → (H_kv, d)."""
        weight = self.qkv.weight.unflatten(0, (-1, self.head_dim)).split(self.heads)[1]
        return F.linear(x, weight.flatten(0, 1)).unflatten(-1, (-1, self.head_dim))[0]


class Block(nn.Module):
    """Attention and a GELU perceptron, each behind a LayerNorm and beside a residual."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.mlp_in = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(config.mlp_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.feed_forward(x + self.attention(self.attention_norm(x), attend))

    def feed_forward(self, x: Tensor) -> Tensor:
        """What follows attention: (…, hidden) → (…, hidden)."""
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Decoder(nn.Module):
    """A decoder-only language model with plain attention, landmark attention or Transformer-XL's recurrence."""

    block: type[Block] = Block

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.cmt = nn.Embedding(1, config.hidden_dim) if config.cmt else None
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self._rotary = RotaryTable(config.rope_base)
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02), output projections N(0, 0.02/√(2·layers))."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.num_layers) ** 0.5 if is_output else 0.02)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Trained numbers, with or without the (tied) embeddings."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings else total - self.embedding.weight.numel()

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self.config).items() if v is not None)

    def new_memory(self, **settings) -> Memory | RecurrentMemory | None:
        """An empty memory that fits this model.

        settings: those of `Memory` for a landmark model; of `SinkMemory` for a plain transformer, which without any
        keeps nothing (None).
        """
        config = self.config
        if config.kind == "landmark":
            assert config.block_size is not None
            cutoff = settings.get("cutoff")
            if cutoff and not config.cmt:
                raise UserError(f"cmt.cutoff={cutoff}: this model has no context miss token")
            if isinstance(cutoff, Sequence) and len(cutoff) != config.num_layers:
                raise UserError(f"cmt.cutoffs={cutoff}: must be {config.num_layers} numbers, one for each layer")
            settings = {"rope_base": config.rope_base, "model": self.fingerprint, "backend": config.backend, **settings}
            return Memory(config.block_size, **settings)
        if config.kind == "transformer_xl":
            assert config.cache is not None
            return RecurrentMemory(config.cache, config.rope_base)
        return SinkMemory(rope_base=config.rope_base, **settings) if settings else None

    def fingerprint(self) -> str:
        """Hex SHA-256 of the configuration and the weights: what a memory that is read again must fit."""
        digest = hashlib.sha256(repr(replace(self.config, backend="auto")).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def forward(self, tokens: Tensor, memory: Memory | RecurrentMemory | None = None, last: bool = False) -> Tensor:
        """Logits of the next raw token after each raw token, or after the last alone.

        tokens: (B, T) raw ids; landmarks are inserted inside. With a memory the tokens continue what it has read,
        and are committed to it. Returns (B, T, vocabulary), T = 1 with `last`.
        """
        if self.config.kind != "landmark":
            hidden = self.hidden(tokens, memory=memory)
        else:
            assert self.config.block_size is not None
            assert self.config.landmark_id is not None
            if memory is not None and not isinstance(memory, Memory):
                raise UserError(f"a landmark model reads with a Memory, not with a {type(memory).__name__}")
            if memory is not None and memory.block_size != self.config.block_size:
                raise UserError(
                    f"the memory has block_size={memory.block_size}, the model {self.config.block_size}: "
                    "make it with model.new_memory(…)"
                )
            position = memory.position if memory is not None else 0
            tokens, raw = insert_landmarks(tokens, position, self.config.block_size, self.config.landmark_id)
            hidden = self.hidden(tokens, memory=memory)[:, raw]
        if memory is not None:
            memory.commit()
        return self.head(hidden[:, -1:] if last else hidden)

    def generate(self, prompts: generation.Prompts, tokens: int, **settings) -> list[list[int]]:
        """What follows each prompt, at most so many tokens. settings: those of `landmark.models.generation.stream`."""
        return generation.generate(self, prompts, tokens, **settings)

    def stream(self, prompts: generation.Prompts, tokens: int, **settings) -> Iterator[list[int | None]]:
        """The same, a token of every prompt at a time; None for prompts that have ended."""
        return generation.stream(self, prompts, tokens, **settings)

    def hidden(
        self,
        tokens: Tensor,
        phase: Tensor | None = None,
        memory: Memory | RecurrentMemory | None = None,
        controlled: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, hidden) of ids as they stand, landmarks included.

        Without a memory: controlled, (B, layers, blocks), the landmarks that the context miss token controls (None:
        none); positions, (B, T) (None: 0…T−1).
        """
        factors = self._factors(tokens.shape[1], positions)
        x = self.embedding(tokens)
        cmt = None if self.cmt is None else self.cmt.weight  # attends to nothing: its state is that of an empty text
        for layer, block in enumerate(cast(Iterable[Block], self.blocks)):
            settings = {} if cmt is None else {"cmt": block.attention.key(block.attention_norm(cmt))}
            if memory is not None:
                x = block(x, partial(memory.attend, layer, **settings))
            elif self.config.kind == "landmark":
                settings |= {} if controlled is None else {"controlled": controlled[:, layer]}
                x = block(x, partial(self._attend_to_landmarks, factors=factors, phase=phase, **settings))
            else:
                x = block(x, partial(self._attend, factors=factors))
            cmt = None if cmt is None else block.feed_forward(cmt)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, through the embeddings (tied)."""
        return F.linear(hidden, self.embedding.weight)

    def _factors(self, length: int, positions: Tensor | None) -> Tensor:
        """Rotary factors (T, d/2), or (B, 1, T, d/2) where positions are given."""
        like = self.embedding.weight[:, : self.config.head_dim]
        if positions is None:
            return self._rotary(0, length, like)
        return rotary_factors(positions, self.config.head_dim, self.config.rope_base, like.dtype)[:, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, factors: Tensor) -> Tensor:
        """Plain attention over a whole window."""
        return causal_attention(rotate(q, factors), rotate(k, factors), v)

    def _attend_to_landmarks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        factors: Tensor,
        phase: Tensor | None,
        cmt: Tensor | None = None,
        controlled: Tensor | None = None,
    ) -> Tensor:
        """Landmark attention over a whole window; cmt: (H_kv, d), not rotated."""
        config = self.config
        assert config.block_size is not None
        return landmark_attention(
            rotate(q, factors),
            rotate(k, factors),
            v,
            block_size=config.block_size,
            phase=phase,
            cmt=None if cmt is None else rotate_cmt(cmt, self._rotary),
            controlled=controlled,
            backend=config.backend,
        )

    def window_losses(self, batch: Window) -> Iterator[tuple[Tensor, int]]:
        """Summed loss in nats, and the number of targets, of each window of a batch, in order.

        Plain and landmark models have one window. Transformer-XL reads a segment in windows that see the cached keys
        and values of the one before, detached: call backward on each loss before asking for the next.
        """
        if self.config.kind != "transformer_xl":
            hidden = self.hidden(batch.tokens, batch.phase, controlled=batch.controlled, positions=batch.positions)
            yield summed_loss(self.head(hidden), batch.targets, batch.weights)
            return
        assert self.config.window is not None
        memory = self.new_memory()
        assert memory is not None
        for start in range(0, batch.tokens.shape[1], self.config.window):
            window = slice(start, start + self.config.window)
            weights = None if batch.weights is None else batch.weights[:, window]
            hidden = self.hidden(batch.tokens[:, window], memory=memory)
            yield summed_loss(self.head(hidden), batch.targets[:, window], weights)
            memory.commit()


def new_decoder(config: DecoderConfig) -> Decoder:
    """A freshly initialised decoder: this module's, or the `Model` of the one that `architecture` names.

    Raises UserError where there is no such module.
    """
    name = config.architecture
    if name is None:
        return Decoder(config)
    return load_extension("landmark.models", name, "Model", key="model.architecture")(config)


def summed_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, int]:
    """Loss in nats over all targets but the ignored ones, each times its weight, and their number.

    logits: (B, T, vocabulary); targets, weights: (B, T).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    reduction = "sum" if weights is None else "none"
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
    if weights is not None:
        loss = (loss * weights.flatten()).sum()
    return loss, int((targets != IGNORED).sum())
