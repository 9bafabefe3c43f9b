"""One decoder for all three models of the paper: plain, landmark and Transformer-XL (Section 4.1).

GPT-2-like: pre-LayerNorm, GELU, no biases, embeddings tied to the head, rotary positions. The three differ only in
their attention.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.attention import landmark_attention, place_phase, without_kernel
from landmark.attention.causal import causal_attention, full_attention
from landmark.attention.hierarchy import Hierarchy, first_bias
from landmark.attention.key_offset import offset_keys
from landmark.attention.landmark_keys import WindowBlocks, bias_landmarks, with_bias
from landmark.attention.layout import blocks_and_landmarks, insert_landmarks, log_fullness, place_tokens
from landmark.attention.rotary import RotaryTable, rotary_factors, rotary_frequencies, rotate, rotate_cmt
from landmark.memory import Memory, RecurrentMemory, SinkMemory, UnlimitedMemory
from landmark.models.config import DecoderConfig
from landmark.models.language_model import LanguageModel, summed_loss
from landmark.models.short_convolution import AddEarlier, EarlierTokens, ShortConvolution
from landmark.utils.channels import channels_of
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class SelfAttention(nn.Module):
    """The projections of queries, keys, values and output; the attention function between them is an argument."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(config.hidden_dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.landmark_bias = None
        if config.landmark_bias:
            assert config.block_size is not None
            own = 0.0 if config.landmark_key == "pooled" else math.log(config.block_size)
            start = (1 - config.joint_softmax) * own  # the rest is in the log-sum-exp of the block's scores
            self.landmark_bias = nn.Parameter(torch.full((kv_heads,), start))
        self.group_bias = None
        if config.fan_out is not None:
            bias = first_bias(config.fan_out, config.levels, kv_heads)
            self.group_bias = nn.Parameter(bias, requires_grad=config.landmark_bias)
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim) if config.qk_norm else None for _ in range(2))

    def forward(self, x: Tensor, attend: Attend, is_landmark: Tensor | None = None) -> Tensor:
        """x: (B, T, hidden) → (B, T, hidden). is_landmark: (B or 1, T), for a landmark bias; None: none of them is."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.landmark_bias is not None:
            q, k = bias_landmarks(q, k, is_landmark, self.landmark_bias)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))

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


class Block(nn.Module):
    """Attention and a GELU perceptron, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self.mlp_in = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(config.mlp_dim, config.hidden_dim, bias=False)
        self.attention_convolution = self.mlp_convolution = None
        if (tokens := config.short_convolution) > 1:
            self.attention_convolution = ShortConvolution(config.hidden_dim, tokens)
            self.mlp_convolution = ShortConvolution(config.hidden_dim, tokens)

    def forward(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        is_landmark: Tensor | None = None,
        cmt: Tensor | None = None,
        add_earlier: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states (B, T, hidden), and the state (1, hidden) of the context miss token, after this block.

        The token attends to nothing, so no attention is added to its state; its key goes to `attend`. It is computed
        here because the weights of a block may be whole only while the block is called (`trainer=fsdp`).

        Args:
            x: (B, T, hidden).
            attend: attention of queries, keys and values (B, H, T, d); with the token its key as `cmt` too.
            is_landmark: (B or 1, T), bool; None: there are no landmarks.
            cmt: the state of the context miss token before this block; None: the model has none.
            add_earlier: `EarlierTokens.add` in this layer; None: there are no short convolutions.
        """
        if cmt is not None:
            attend = partial(attend, cmt=self.attention.key(self.attention_norm(cmt)))
        if self.attention.group_bias is not None:
            attend = partial(attend, group_bias=self.attention.group_bias)
        normed = self.attention_norm(x)
        if self.attention_convolution is None or add_earlier is None:
            x = self.feed_forward(x + self.attention(normed, attend, is_landmark))
        else:
            normed = self.attention_convolution(normed, partial(add_earlier, "attention"))
            x = self.feed_forward(x + self.attention(normed, attend, is_landmark), partial(add_earlier, "mlp"))
        return x, None if cmt is None else self.feed_forward(cmt)

    def feed_forward(self, x: Tensor, add_earlier: AddEarlier | None = None) -> Tensor:
        """The perceptron after attention: (…, hidden) → (…, hidden). add_earlier: as in `mlp_input`."""
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_input(x, add_earlier))))

    def mlp_input(self, x: Tensor, add_earlier: AddEarlier | None = None) -> Tensor:
        """What the perceptron reads of the residual stream: (…, hidden) → (…, hidden).

        add_earlier: of the short convolution before it; None: there is none, or no token before another.
        """
        normed = self.mlp_norm(x)
        if self.mlp_convolution is None or add_earlier is None:
            return normed
        return self.mlp_convolution(normed, add_earlier)


class Decoder(LanguageModel):
    """A decoder-only language model with plain attention, landmark attention or Transformer-XL's recurrence."""

    block: type[Block] = Block

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.cmt = nn.Embedding(1, config.hidden_dim) if config.cmt else None
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_dim, bias=False)
        self._rope_base = rotary_frequencies(config.head_dim, config.rope_base, config.rotary_fraction)
        self._rotary = RotaryTable(self._rope_base)
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02), or for linear layers N(0, 1/√inputs); output projections divided by √(2·layers).

        Induction heads are in all layers but the first, whose heads are needed for the tokens just before.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith("bias"):
                is_linear = name.startswith("blocks.")
                std = parameter.shape[1] ** -0.5 if is_linear and self.config.initialisation == "fan_in" else 0.02
                is_output = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=std / (2 * self.config.num_layers) ** 0.5 if is_output else std)
        if self.config.induction_heads:
            channels = channels_of(self.config.key_offset, self.config.head_dim)
            for block in self.blocks[1:]:
                assert isinstance(block, Block)
                block.attention.begin_as_induction_heads(self.config.induction_heads, channels)

    def input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self.config).items() if v is not None)

    def new_memory(self, **settings) -> Memory | RecurrentMemory | None:
        """An empty memory that fits this model.

        settings: of `Memory` for a landmark model; of `SinkMemory` for a plain transformer, which keeps nothing without
        settings (None); Transformer-XL has none. Raises UserError for a cutoff that does not fit the model, and for a
        masked model, which has no memory.
        """
        config = self.config
        self._check_memory()
        if config.kind == "landmark":
            assert config.block_size is not None
            cutoff = settings.get("cutoff")
            if cutoff and not config.cmt:
                raise UserError(f"cmt.cutoff={cutoff}: this model has no context miss token")
            if isinstance(cutoff, Sequence) and len(cutoff) != config.num_layers:
                raise UserError(f"cmt.cutoffs={cutoff}: must be {config.num_layers} numbers, one for each layer")
            settings = {"model": self.fingerprint, "backend": config.backend, **self.key_settings(), **settings}
            return Memory(config.block_size, **settings)
        if config.kind == "transformer_xl":
            assert config.cache is not None
            return RecurrentMemory(config.cache, **self.key_settings())
        return SinkMemory(**self.key_settings(), **settings) if settings else None

    def unlimited_memory(self, tokens: int) -> UnlimitedMemory:
        """An empty memory that keeps the keys and values of `tokens` tokens. Raises UserError for a masked model."""
        self._check_memory()
        return UnlimitedMemory(tokens, **self.key_settings())

    def _check_memory(self) -> None:
        if self.config.masked:
            raise UserError(
                "model.masked=true: the model reads whole texts in both directions, it has no memory and "
                "continues no text"
            )

    def key_settings(self) -> dict[str, Any]:
        """Settings of a memory that say how this model's keys are made."""
        settings = {
            "rope_base": self._rope_base,
            "key_offset": self.config.key_offset,
            "still_layers": self.config.still_layers,
        }
        if self.config.kind != "landmark":
            return settings
        names = "landmark_key", "local_blocks", "fan_out", "levels", "landmark_values", "joint_softmax"
        settings |= {name: getattr(self.config, name) for name in names}
        return settings | ({} if self.config.ends is None else {"uneven": True})

    def fingerprint(self) -> str:
        """Hex SHA-256 of configuration and weights. A saved memory can only be loaded by the model that made it."""
        digest = hashlib.sha256(repr(replace(self.config, backend="auto")).encode())
        if still := self.config.still_layers:
            digest.update(repr(sorted(still)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | RecurrentMemory | None = None,
        last: bool = False,
        top_k: int | None = None,
    ) -> Tensor:
        """Logits of the next raw token after each raw token, (B, T, vocabulary).

        A masked model returns the logits of each raw token itself.

        Args:
            tokens: (B, T) raw ids; landmarks are inserted here.
            memory: the tokens continue its text, and are committed to it (None: they are a text of their own).
            last: whether to return only the logits (B, 1, vocabulary) after the last token.
            top_k: blocks that a token attends to beside its own (None: all). Unused with a memory, which has its own k.

        Raises UserError for a memory of another kind or block size.
        """
        hidden = self._read(tokens, memory, top_k)
        if memory is not None:
            memory.commit()
        return self.head(hidden[:, -1:] if last else hidden)

    def _read(self, tokens: Tensor, memory: Memory | RecurrentMemory | None, top_k: int | None = None) -> Tensor:
        """Final hidden states (B, T, hidden_dim) of raw tokens, which are not committed. As `forward`."""
        if self.config.kind != "landmark":
            return self.hidden(tokens, memory=memory)
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
        if (ends := self.config.ends) is not None:
            if memory is not None and len(tokens) > 1:
                raise UserError(
                    f"model.block_ends={self.config.block_ends}: a memory reads one text, not {len(tokens)} together, "
                    "whose blocks end at other places"
                )
            tokens, places, empty = place_tokens(
                tokens, position % (ends.block_size + 1), ends, self.config.landmark_id
            )
            hidden = self.hidden(tokens, memory=memory, top_k=top_k, empty=empty)
            return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        tokens, raw = insert_landmarks(tokens, position, self.config.block_size, self.config.landmark_id)
        return self.hidden(tokens, memory=memory, top_k=top_k)[:, raw]

    def hidden(
        self,
        tokens: Tensor,
        phase: Tensor | None = None,
        memory: Memory | RecurrentMemory | None = None,
        controlled: Tensor | None = None,
        positions: Tensor | None = None,
        top_k: int | None = None,
        empty: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, hidden) of ids that include landmarks already.

        Args:
            tokens: (B, T) ids, landmarks included.
            phase: (B,) tokens missing from the first block of each window (None: 0). Unused with a memory.
            memory: the tokens continue its text; the caller commits them (None: attention within the window).
            controlled: (B, layers, blocks) landmarks that the context miss token controls (None: none). Unused with
                a memory.
            positions: (B, T) positions of the tokens (None: 0…T−1). Unused with a memory.
            top_k: gated blocks that a query attends to (None: all). Unused with a memory, which has its own k.
            empty: (B, T), bool, places without a token, whose hidden states have no meaning (None: there are none).
        """
        is_landmark = None
        if not isinstance(memory, Memory):
            is_landmark = self._landmarks(tokens, phase)
        elif (first := memory.position % (memory.block_size + 1)) + tokens.shape[1] > memory.block_size:
            is_landmark = self._landmarks(tokens, torch.full((1,), first, device=tokens.device))
        if memory is None:
            attend = self._window_attention(tokens, phase, is_landmark, controlled, positions, top_k, empty)
        else:
            attend = memory.attend if empty is None else partial(memory.attend, empty=empty)
        x = self.embedding(tokens)
        if empty is not None and is_landmark is not None and self.config.landmark_bias:
            assert self.config.block_size is not None
            bias = (1 - self.config.joint_softmax) * log_fullness(empty, self.config.block_size, x.dtype)
            attend = _with_bias_of_size(attend, bias * is_landmark)
        cmt = None if self.cmt is None else self.cmt.weight
        earlier = self._earlier_tokens(tokens, phase, memory)
        for layer, block in enumerate(self.blocks):
            convolution = {} if earlier is None else {"add_earlier": partial(earlier.add, layer)}
            x, cmt = block(x, partial(attend, layer), is_landmark, cmt, **convolution)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (…, vocabulary) of hidden states (…, hidden), by the tied embeddings."""
        return F.linear(hidden, self.embedding.weight)

    def _factors(self, length: int, positions: Tensor | None) -> Tensor:
        """Rotary factors (T, d/2), or (B, 1, T, d/2) where positions are given."""
        like = self.embedding.weight[:, : self.config.head_dim]
        if positions is None:
            return self._rotary(0, length, like)
        return rotary_factors(positions, self.config.head_dim, self._rope_base, like.dtype)[:, None]

    def _landmarks(self, tokens: Tensor, phase: Tensor | None) -> Tensor | None:
        """Which of the tokens (B, T) are landmarks, (B or 1, T), bool. None: there are none, or no option asks."""
        config = self.config
        if config.block_size is None or not (config.key_offset or config.landmark_bias):
            return None
        phase = torch.zeros(1, dtype=torch.int64, device=tokens.device) if phase is None else phase
        return blocks_and_landmarks(phase.to(tokens.device), tokens.shape[1], config.block_size)[1]

    def _earlier_tokens(
        self, tokens: Tensor, phase: Tensor | None, memory: Memory | RecurrentMemory | None
    ) -> EarlierTokens | None:
        """What short convolutions add to each of the tokens (B, T); None: the model has none.

        phase, memory: as in `hidden`.
        """
        count, is_landmark = self.config.short_convolution, None
        if count < 2:
            return None
        if (block_size := self.config.block_size) is not None:
            if isinstance(memory, Memory):
                phase = torch.full((1,), memory.position % (block_size + 1), device=tokens.device)
            elif phase is None:
                phase = torch.zeros(1, dtype=torch.int64, device=tokens.device)
            first = phase.to(tokens.device) + block_size + 1 - count  # that of the place `count` before the tokens
            is_landmark = blocks_and_landmarks(first, count + tokens.shape[1], block_size)[1]
        return EarlierTokens(is_landmark, count, None if memory is None else memory.carried)

    def _window_attention(
        self,
        tokens: Tensor,
        phase: Tensor | None,
        is_landmark: Tensor | None,
        controlled: Tensor | None,
        positions: Tensor | None,
        top_k: int | None,
        empty: Tensor | None,
    ) -> Callable[..., Tensor]:
        """The attention of all layers over a whole window, with the parameters of `Memory.attend`.

        Keys are made in three steps: some channels take the key of the normal token before; rotation; landmarks get the
        summary of their block.

        Args: as in `hidden`, and is_landmark as `_landmarks` returns it.
        """
        config, blocks = self.config, None
        factors = self._factors(tokens.shape[1], positions)
        still = config.still_layers
        channels = channels_of(config.key_offset, config.head_dim)
        if phase is not None and config.block_size is not None:
            options = {"top_k": top_k, "local_blocks": config.local_blocks, "bidirectional": config.masked}
            lacking = without_kernel(**options, hierarchy=config.fan_out)
            like = self.embedding.weight[:1, : config.head_dim]
            phase = place_phase(phase, config.backend, like, config.block_size, not lacking)
        if config.landmark_key != "token":
            assert config.block_size is not None
            first = torch.zeros(1, dtype=torch.int64, device=tokens.device) if phase is None else phase
            blocks = WindowBlocks.of(first, tokens.shape[1], config.block_size, self.embedding.weight, empty)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, cmt: Tensor | None = None, group_bias: Tensor | None = None
        ) -> Tensor:
            k = offset_keys(k, channels, is_landmark, empty=empty)
            if layer not in still:
                q, k = rotate(q, factors), rotate(k, factors)
                cmt = None if cmt is None else rotate_cmt(cmt, self._rotary)
            if blocks is not None:
                share = 1 - config.joint_softmax
                k = blocks.add_means(k, share) if config.landmark_key == "mean" else blocks.add_pooled(q, k, share)
            if config.kind != "landmark":
                return full_attention(q, k, v) if config.masked else causal_attention(q, k, v)
            assert config.block_size is not None
            return landmark_attention(
                q,
                k,
                v,
                block_size=config.block_size,
                phase=phase,
                cmt=cmt,
                controlled=None if controlled is None else controlled[:, layer],
                top_k=top_k,
                local_blocks=config.local_blocks,
                landmark_values=config.landmark_values,
                joint_softmax=config.joint_softmax,
                bidirectional=config.masked,
                hierarchy=None if group_bias is None else Hierarchy(config.fan_out or 0, group_bias),
                empty=empty,
                backend=config.backend,
            )

        return attend

    def window_losses(self, batch: WindowBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Summed loss in nats, and the number of targets, of each window of a batch, in order.

        Plain and landmark models have one window. Transformer-XL reads a segment window by window, and a landmark model
        a batch with `local` chunk by chunk. Each attends to the keys and values of earlier ones, cached or retrieved,
        which carry no gradient; so backward can be called on each loss before the next one is computed.
        """
        if self.config.kind != "transformer_xl" and batch.local is None:
            settings = {"controlled": batch.controlled, "positions": batch.positions, "top_k": batch.top_k}
            settings |= {"empty": batch.empty}
            hidden = self.hidden(batch.tokens, batch.phase, **settings)
            yield self._loss(hidden, batch.targets, batch.weights)
            return
        length = batch.local or self.config.window
        memory = self.new_memory(k=batch.top_k, gradient=True) if batch.local else self.new_memory()
        assert memory is not None
        assert length is not None
        for start in range(0, batch.tokens.shape[1], length):
            window = slice(start, start + length)
            weights = None if batch.weights is None else batch.weights[:, window]
            hidden = self._read(batch.tokens[:, window], memory)
            yield self._loss(hidden, batch.targets[:, window], weights)
            memory.commit()

    def _loss(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result of `summed_loss`. Where fewer than half of the positions have a target, only they get logits.

        That is so on the CPU; on a GPU counting them would wait for the device. Shapes: (B, T, hidden_dim), (B, T).
        """
        if targets.device.type == "cpu" and 2 * int((scored := targets != NO_LOSS).sum()) < targets.numel():
            hidden, targets = hidden[scored][None], targets[scored][None]
            weights = None if weights is None else weights[scored][None]
        return summed_loss(self.head(hidden), targets, weights)


def _with_bias_of_size(attend: Callable[..., Tensor], bias: Tensor) -> Callable[..., Tensor]:
    """Attention whose landmarks have their bias log ℓ, or what is learned in its place, lowered to that of n tokens.

    attend: with the parameters of `Memory.attend`. bias: (B, T), log(n / ℓ), less its part in a joint softmax, at
    landmarks, else 0.
    """

    def biased(layer: int, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        return attend(layer, q, with_bias(k, bias[:, None].to(k.dtype)), v, **others)

    return biased
