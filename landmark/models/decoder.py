"""One decoder for all three models of the paper: plain, landmark and Transformer-XL (Section 4.1).

GPT-2-like: pre-LayerNorm, GELU, no biases, embeddings tied to the head, rotary positions. The three differ only in
their attention.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.attention import ContextMiss, Grouped, Scoring, Window, has_kernel, landmark_attention, place_phase
from landmark.attention.keys import Keys, WindowBlocks, bias_landmarks
from landmark.attention.layout import blocks_and_landmarks, insert_landmarks
from landmark.attention.plain import causal_attention
from landmark.attention.rotary import rotary_factors, rotary_frequencies, rotate, rotate_cmt
from landmark.memory import Memory, RecurrentMemory, SinkMemory, UnlimitedMemory
from landmark.memory.landmarks.memory import memory_of
from landmark.memory.landmarks.settings import MemorySettings
from landmark.memory.landmarks.step import NextToken, Step, can_step
from landmark.models import head_loss
from landmark.models.config import DecoderConfig
from landmark.models.language_model import LanguageModel, summed_loss
from landmark.utils.constants import NO_LOSS, channels_of
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch

MEMORY_OBJECTS = ("keys", "gate", "scoring", "backend", "observer")  # arguments of `Memory` beside its settings


@dataclass(frozen=True)
class WindowInputs:
    """What all layers share that read windows at once.

    layout: None: the model has no landmarks. factors: rotary, (T, d/2) or (B, 1, T, d/2). is_landmark: (B or 1, T),
    bool; None: nothing asks for it. blocks: for means of keys. controlled: (B, layers, blocks), landmarks that the
    context miss token controls.
    """

    layout: Window | None
    factors: Tensor
    is_landmark: Tensor | None
    blocks: WindowBlocks | None
    controlled: Tensor | None


class SelfAttention(nn.Module):
    """The projections before attention, to queries, keys and values, and after it."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(config.hidden_dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.landmark_bias = None
        if config.keys.bias and config.landmarks is not None:
            # The rest of log ℓ is in the log-sum-exp of the block's scores.
            start = (1 - config.alpha) * math.log(config.landmarks.block_size)
            self.landmark_bias = nn.Parameter(torch.full((kv_heads,), start))
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim) if config.keys.norm else None for _ in range(2))

    def forward(self, x: Tensor, is_landmark: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, d) of x (B, T, hidden). is_landmark: (B or 1, T), for a landmark bias."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normalised(q, self.query_norm), _normalised(k, self.key_norm)
        if self.landmark_bias is not None:
            q, k = bias_landmarks(q, k, is_landmark, self.landmark_bias)
        return q, k, v

    def output(self, attended: Tensor) -> Tensor:
        """(B, H, T, d) → (B, T, hidden)."""
        return self.out(attended.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def begin_as_induction_heads(self, count: int, channels: int) -> None:
        """Give the last `count` heads of keys, in the last `channels` channels, the weights of one of their queries."""
        heads, kv_heads, _ = self.heads
        q, k, _ = self.qkv.weight.unflatten(0, (-1, self.head_dim)).split(self.heads)
        group = heads // kv_heads
        k[-count:, -channels:] = q[group - 1 :: group][-count:, -channels:]

    def key(self, x: Tensor) -> Tensor:
        """The keys of one hidden state, without queries and values: (1, hidden) → (H_kv, d)."""
        weight = self.qkv.weight.unflatten(0, (-1, self.head_dim)).split(self.heads)[1]
        key = F.linear(x, weight.flatten(0, 1)).unflatten(-1, (-1, self.head_dim))[0]
        return key if self.key_norm is None else self.key_norm(key)


def _normalised(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """As the norm, with weights of the type of x: with others PyTorch has no kernel for it, and makes many passes."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


class Layer(nn.Module):
    """Attention and a GELU perceptron, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.mlp_in = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(config.mlp_dim, config.hidden_dim, bias=False)

    def forward(
        self, x: Tensor, attend: Callable[..., Tensor], is_landmark: Tensor | None = None, cmt: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states (B, T, hidden), and the state (1, hidden) of the context miss token, after this block.

        The token attends to nothing, so no attention is added to its state; its key goes to `attend`, as an `extra`
        place. It is computed here because the weights of a block may be whole only while the block is called
        (`trainer=fsdp`).
        """
        if cmt is not None:
            attend = partial(attend, extra=ContextMiss(self.attention.key(self.attention_norm(cmt))))
        x = self.after_attention(x, attend(*self.before_attention(x, is_landmark)))
        return x, None if cmt is None else self.feed_forward(cmt)

    def before_attention(self, x: Tensor, is_landmark: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention(self.attention_norm(x), is_landmark)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.feed_forward(x + self.attention.output(attended))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Decoder(LanguageModel):
    """A decoder-only language model with plain attention, landmark attention or Transformer-XL's recurrence."""

    layer_type: type[Layer] = Layer

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.cmt = nn.Embedding(1, config.hidden_dim) if config.cmt else None
        self.blocks = nn.ModuleList(self.layer_type(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_dim, bias=False)
        keys = config.keys
        rope_base = rotary_frequencies(config.head_dim, keys.rope_base, keys.rotary_fraction)
        self.keys, self.gate = Keys(keys.offset, keys.landmark, rope_base), Grouped(config.alpha)
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02), or for linear layers N(0, 1/√inputs); output projections divided by √(2·layers).

        Induction heads are in all layers but the first, whose heads are needed for the tokens just before.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith("bias"):
                is_linear = name.startswith("blocks.")
                std = parameter.shape[1] ** -0.5 if is_linear and self.config.start.initialisation == "fan_in" else 0.02
                is_output = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=std / (2 * self.config.num_layers) ** 0.5 if is_output else std)
        if heads := self.config.start.induction_heads:
            channels = channels_of(self.config.keys.offset, self.config.head_dim)
            for block in self.blocks[1:]:
                assert isinstance(block, Layer)
                block.attention.begin_as_induction_heads(heads, channels)

    def input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def new_memory(self, **settings) -> Memory | RecurrentMemory | None:
        """An empty memory that fits this model.

        settings: of a landmark model `MemorySettings`, and MEMORY_OBJECTS; of a plain transformer those of
        `SinkMemory`, without which it keeps nothing (None). Raises UserError for one that does not fit.
        """
        config = self.config
        if config.landmarks is not None:
            given = {name: settings.pop(name) for name in MEMORY_OBJECTS if name in settings}
            reading = MemorySettings().updated(settings)
            if reading.cutoff and not config.cmt:
                raise UserError(f"{reading.shown('cutoff')}: this model has no context miss token")
            objects = {"keys": self.keys, "gate": self.gate, "backend": config.backend} | given
            memory = memory_of(config.landmarks.block_size, reading, **objects)
            assert isinstance(memory, Memory)
            memory.model = self.fingerprint
            return memory
        if config.recurrence is not None:
            return RecurrentMemory(config.recurrence.cache, keys=self.keys)
        return SinkMemory(**settings, keys=self.keys) if settings else None

    def unlimited_memory(self, tokens: int) -> UnlimitedMemory:
        return UnlimitedMemory(tokens, keys=self.keys)

    def token_forward(self, memory: Any) -> Callable[[Tensor], Tensor]:
        """As of all models; on a GPU, where the memory is the paper's, by CUDA graphs."""
        like, landmarks, keys = self.embedding.weight, self.config.landmarks, self.config.keys
        as_it_is = self.cmt is None and not keys.bias and not torch.is_autocast_enabled(like.device.type)
        if landmarks is None or landmarks.token is None or not (like.is_cuda and as_it_is):
            return super().token_forward(memory)
        if not memory.layers or not can_step(memory, like[:, : self.config.head_dim]):
            return super().token_forward(memory)
        return NextToken(self, memory, landmarks.token)

    def fingerprint(self) -> str:
        """Hex SHA-256 of configuration and weights. A saved memory can only be loaded by the model that made it."""
        digest = hashlib.sha256(self.config.fingerprint().encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | RecurrentMemory | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits (B, T, vocabulary) of the next raw token after each of raw ids (B, T), or of the last one alone.

        Landmarks are inserted here. memory: the tokens continue its text, and are committed to it. Raises UserError
        for a memory that does not fit.
        """
        hidden = self.read(tokens, memory)
        if memory is not None:
            memory.commit()
        return self.head(hidden[:, -1:] if last else hidden)

    def read(self, tokens: Tensor, memory: Memory | RecurrentMemory | None) -> Tensor:
        """Final hidden states (B, T, hidden_dim) of raw tokens, which are not committed. As `forward`."""
        landmarks = self.config.landmarks
        if landmarks is None:
            return self.hidden(tokens, memory=memory)
        if memory is not None and memory.block_size != landmarks.block_size:
            had = f"{type(memory).__name__} has block_size={memory.block_size}"
            raise UserError(f"the {had}, the model {landmarks.block_size}: take new_memory() of the model")
        position = 0 if memory is None else cast(Memory, memory).position
        assert landmarks.token is not None
        tokens, raw = insert_landmarks(tokens, position, landmarks.block_size, landmarks.token)
        return self.hidden(tokens, memory=memory)[:, raw]

    def hidden(
        self,
        tokens: Tensor,
        phase: Tensor | None = None,
        memory: Memory | RecurrentMemory | Step | None = None,
        controlled: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, hidden) of ids (B, T) that include landmarks already.

        memory: the tokens continue its text; the caller commits them. Without one: phase (B,), tokens missing from the
        first block of each window; controlled (B, layers, blocks), landmarks that the context miss token controls;
        positions (B, T), those of the tokens (None: 0…T−1).
        """
        if memory is None:
            window = self._window(tokens, phase, controlled, positions)
            attend, is_landmark = partial(self._attend_in_window, window), window.is_landmark
        else:
            attend, is_landmark, landmarks = memory.attend, None, self.config.landmarks
            at = None if landmarks is None else cast(Memory, memory).landmark_at
            if landmarks is not None and at is not None and at < tokens.shape[1]:
                first = torch.full((1,), landmarks.block_size - at, device=tokens.device)
                is_landmark = self._landmarks(tokens, first)
        x = self.embedding(tokens)
        cmt = None if self.cmt is None else self.cmt.weight
        for layer, block in enumerate(self.blocks):
            x, cmt = block(x, partial(attend, layer), is_landmark, cmt)
        return self.norm(x)

    def compile_parts(self, backend: str = "inductor") -> None:
        for block in self.blocks:  # all share what is compiled for the first
            for name in ("before_attention", "after_attention"):
                part = torch.compile(getattr(block, name), fullgraph=True, dynamic=False, backend=backend)
                setattr(block, name, part)

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight)

    def _window(
        self,
        tokens: Tensor,
        phase: Tensor | None,
        controlled: Tensor | None,
        positions: Tensor | None,
    ) -> WindowInputs:
        landmarks, keys, length = self.config.landmarks, self.keys, tokens.shape[1]
        like = self.embedding.weight[:, : self.config.head_dim]
        factors = keys.rotary(0)(0, length, like)
        if positions is not None:
            factors = rotary_factors(positions, self.config.head_dim, keys.rope_base, like.dtype)[:, None]
        is_landmark = self._landmarks(tokens, phase)
        if landmarks is None:
            return WindowInputs(None, factors, is_landmark, None, controlled)
        if phase is not None:
            computes = has_kernel(self.gate, Scoring())
            phase = place_phase(phase, self.config.backend, like[:1], landmarks.block_size, computes)
        blocks = None
        if keys.landmark == "mean":
            first = torch.zeros(1, dtype=torch.int64, device=tokens.device) if phase is None else phase
            blocks = WindowBlocks.of(first, length, landmarks.block_size, self.embedding.weight)
        return WindowInputs(Window(landmarks.block_size, phase), factors, is_landmark, blocks, controlled)

    def _landmarks(self, tokens: Tensor, phase: Tensor | None) -> Tensor | None:
        """Which of the tokens (B, T) are landmarks, (B or 1, T), bool. None: there are none, or no option asks."""
        landmarks, keys = self.config.landmarks, self.config.keys
        if landmarks is None or not (keys.offset or keys.bias):
            return None
        phase = torch.zeros(1, dtype=torch.int64, device=tokens.device) if phase is None else phase
        return blocks_and_landmarks(phase.to(tokens.device), tokens.shape[1], landmarks.block_size)[1]

    def _attend_in_window(
        self, window: WindowInputs, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: ContextMiss | None = None
    ) -> Tensor:
        """The attention of a layer over whole windows, with the other parameters of `Memory.attend`."""
        k = self.keys.shifted(k, window.is_landmark)
        q, k = rotate(q, window.factors), rotate(k, window.factors)
        if window.blocks is not None:
            k = window.blocks.add_means(k, self.gate.landmark_share)
        if extra is not None:
            controlled = None if window.controlled is None else window.controlled[:, layer]
            extra = ContextMiss(rotate_cmt(extra.key, self.keys.rotary(layer)), controlled)
        return self.attend_in_window(layer, q, k, v, window, extra)

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: WindowInputs, extra: ContextMiss | None
    ) -> Tensor:
        """Attention of a layer over whole windows, (B, H, T, d), of rotated queries and keys; subclasses replace it."""
        if window.layout is None:
            return causal_attention(q, k, v)
        return landmark_attention(q, k, v, window.layout, gate=self.gate, extra=extra, backend=self.config.backend)[0]

    def window_losses(self, batch: WindowBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Summed loss in nats, and the number of targets, of each window of a batch, in order.

        Plain and landmark models have one window. Transformer-XL reads a segment window by window. The keys and values
        of earlier windows carry no gradient, so backward can be called on each loss before the next is computed.
        """
        if self.config.recurrence is None:
            hidden = self.hidden(batch.tokens, batch.phase, None, batch.controlled, batch.positions)
            yield self.loss(hidden, batch.targets, batch.weights)
            return
        length, memory = self.config.recurrence.window, self.new_memory()
        assert isinstance(memory, RecurrentMemory)
        for start in range(0, batch.tokens.shape[1], length):
            window = slice(start, start + length)
            weights = None if batch.weights is None else batch.weights[:, window]
            hidden = self.hidden(batch.tokens[:, window], memory=memory)
            yield self.loss(hidden, batch.targets[:, window], weights)
            memory.commit()

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result of `summed_loss`, in parts where logits are many (`landmark.models.head_loss`).

        On the CPU only positions with a target get logits, where they are few; on a GPU counting them would wait.
        """
        if targets.device.type == "cpu" and 2 * int((scored := targets != NO_LOSS).sum()) < targets.numel():
            hidden, targets = hidden[scored][None], targets[scored][None]
            weights = None if weights is None else weights[scored][None]
        if targets.numel() * self.config.vocab_size > head_loss.AT_ONCE:
            return head_loss.head_loss(hidden, self.embedding.weight, targets, weights)
        return summed_loss(self.head(hidden), targets, weights)
