"""Landmark attention as a function of tensors (Mohtashami & Jaggi 2023, Section 3.1)."""

import functools
import warnings

import torch
from torch import Tensor

from landmark.attention.blockwise import landmark_attention_blockwise
from landmark.attention.fused.operators import landmark_attention_fused
from landmark.attention.fused.tuning import DTYPES, HAS_TRITON, can_launch
from landmark.attention.layout import (
    AttentionInputs,
    Layout,
    Packed,
    Window,
    as_autocast,
    check_controlled,
    check_packed,
    check_phase,
    longest,
    without_autocast,
)
from landmark.attention.reference import landmark_attention_reference
from landmark.attention.scoring import ContextMiss, Grouped, Scoring, Sinks
from landmark.utils.constants import BACKENDS

__all__ = [
    "ContextMiss",
    "Extra",
    "Grouped",
    "Layout",
    "Packed",
    "Scoring",
    "Sinks",
    "Window",
    "backend_for",
    "has_kernel",
    "landmark_attention",
    "place_phase",
]

Extra = ContextMiss | Sinks


def has_kernel(gate: Grouped, scoring: Scoring, extra: Extra | None = None) -> bool:
    """Whether the fused kernels compute this."""
    controls = isinstance(extra, ContextMiss)
    return not (gate.alpha and controls) and scoring.softcap is None


def backend_for(name: str, like: Tensor, block_size: int, has_kernel: bool = True) -> str:
    """The backend to use for queries like (…, d): `name`, or for "auto" the best one.

    "auto" becomes "triton" on a GPU that can hold a block, else "blockwise", with a warning if the GPU is too small.
    has_kernel: whether the fused kernels compute what is asked. Raises ValueError for an unknown name, and for "triton"
    where they do not.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "triton" and not has_kernel:
        raise ValueError(
            "backend='triton': the fused kernels have no softcap, and no α beside a context miss token: use "
            "backend='auto' or 'blockwise'"
        )
    if name != "auto":
        return name
    if not (has_kernel and HAS_TRITON and like.is_cuda and like.dtype in DTYPES):
        return "blockwise"
    if can_launch(block_size, like.shape[-1], like.element_size(), like.device):
        return "triton"
    _say_once(f"blocks of {block_size} tokens with heads of {like.shape[-1]} numbers of {like.dtype}")
    return "blockwise"


@functools.cache
def _say_once(what: str) -> None:
    warnings.warn(
        f"backend=auto: {what} do not fit into this GPU's shared memory and registers, or it is older than the kernels "
        "need: landmark attention is computed without them (blockwise), exact but slower",
        stacklevel=4,
    )


def place_phase(phase: Tensor, name: str, like: Tensor, block_size: int, has_kernel: bool = True) -> Tensor:
    """The phase (B,) where the backend reads it: on the device of the queries for Triton's kernels, else on the CPU.

    Called once for all layers, it spares each layer a copy, and a CUDA graph one that it forbids.
    """
    (like,) = as_autocast(like)
    return phase.to(like.device if backend_for(name, like, block_size, has_kernel) == "triton" else "cpu")


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    gate: Grouped = Grouped(),  # noqa: B008 (these are frozen)
    scoring: Scoring = Scoring(),  # noqa: B008
    extra: Extra | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention in which the landmark that closes a block gates the attention to it (Section 3.1).

    A window holds a landmark after every `block_size` normal tokens. A query attends to the tokens of its own block and
    of earlier blocks. The weight of an earlier block comes from the score of its landmark, and is shared out over the
    tokens of the block. A landmark's own weight is always 0.

    Args:
        q: (B, H, T, d), already rotated. Under autocast q, k and v are computed in its type.
        k, v: (B, H_kv, prefix + T, d), k rotated, H_kv a divisor of H. The queries belong to the last T keys.
        layout: where blocks are: `Window(block_size, phase, prefix)` or `Packed(block_size, phase, cu_seqlens)`.
        gate: how a block weighs: `Grouped()` as in the paper, or `Grouped(alpha)`.
        scoring: factor and cap of the scores.
        extra: one more place, without a value, in the outer softmax: `ContextMiss(key, controlled)` (Appendix D) or
            `Sinks(scores)`; None: there is none.
        backend: "reference" (explicit weights), "blockwise", "triton" (fused kernels, for GPUs) or "auto" (triton on a
            GPU where `has_kernel`, else blockwise).

    Returns (B, H, T, d), and the log-sum-exp (B, H, T) of each query's outer softmax, in nats; both have gradients. The
    outer softmax is over the tokens of the query's block, the earlier landmarks, but for those that a context miss
    token controls, and the extra place. A window that starts on a landmark (phase = block_size) has an empty first
    block: the output of that landmark is 0.

    Numbers must be finite. A NaN or ∞ reaches the outputs of all queries that see it, with every backend; it may reach
    earlier queries and gradients of its window or document too, as in other fused kernels, because 0 · NaN is NaN.

    Raises ValueError for shapes that do not fit, a phase outside 0…block_size, an unknown backend, and for what the
    backend does not compute.
    """
    if isinstance(extra, Sinks):
        options = {"gate": gate, "scoring": scoring, "backend": backend}
        return extra.merge(*landmark_attention(q, k, v, layout, **options))
    q, k, v = as_autocast(q, k, v)
    backend = backend_for(backend, q, layout.block_size, has_kernel(gate, scoring, extra))
    (batch, heads, queries, dim), kv_heads = q.shape, k.shape[1]
    prefix, cu_seqlens = (layout.prefix, None) if isinstance(layout, Window) else (0, layout.cu_seqlens)
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2] != prefix + queries or k.shape[3] != dim:
        raise ValueError(
            f"k and v must have shape ({batch}, heads, {prefix + queries}, {dim}), got {(*k.shape,)} and {(*v.shape,)}"
        )
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} key/value heads do not divide {heads} query heads")
    samples = batch if cu_seqlens is None else check_packed(cu_seqlens, batch, queries)
    phase = check_phase(layout.phase, samples, layout.block_size, q.device if backend == "triton" else "cpu")
    scores = controlled = None
    if extra is not None:
        if len(extra.key) != kv_heads:
            raise ValueError(f"a context miss token needs a key for each of {kv_heads} heads, got {len(extra.key)}")
        scores = extra.scores_of(q, scoring)
        length = prefix + queries if cu_seqlens is None or extra.controlled is None else longest(cu_seqlens)
        controlled = check_controlled(extra.controlled, samples, length, layout.block_size, q.device)
    if kv_heads != heads and backend != "triton":
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    options = phase, controlled, cu_seqlens, layout.block_size, prefix
    score_settings = scoring.scale_of(dim), scoring.softcap, gate.alpha
    inputs = AttentionInputs(q, k, v, scores, *options, *score_settings)
    with without_autocast(q):
        if q.numel() == 0:
            unused = sum(x.sum() for x in inputs[1:4] if x is not None)  # whose gradients are 0
            return q + 0 * unused, q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if backend == "triton":
            return landmark_attention_fused(inputs)
        attend = landmark_attention_reference if backend == "reference" else landmark_attention_blockwise
        return inputs.one_by_one(attend)  # pyright: ignore[reportArgumentType] (of `disable`)
