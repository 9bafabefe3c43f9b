"""Landmark attention as a function of tensors (Mohtashami & Jaggi 2023, Section 3.1)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from landmark.attention.blockwise import landmark_attention_blockwise
from landmark.attention.blockwise_operator import landmark_attention_in_graph
from landmark.attention.context_miss_token import context_miss_scores
from landmark.attention.fused.operators import landmark_attention_fused
from landmark.attention.fused.tuning import DTYPES, HAS_TRITON, can_launch
from landmark.attention.hierarchy import Hierarchy, check_gates
from landmark.attention.inputs import AttentionInputs, as_autocast, without_autocast
from landmark.attention.layout import check_controlled, check_phase
from landmark.attention.packed import check_packed, longest, one_by_one
from landmark.attention.reference import landmark_attention_reference
from landmark.utils.backends import BACKENDS
from landmark.utils.fractions import joint_softmax_of

__all__ = ["backend_for", "check_kernel", "landmark_attention", "place_phase", "without_kernel"]


def without_kernel(**options: object) -> list[str]:
    """Those of these options of `landmark_attention` that are set: the fused kernels do not have them.

    options: top_k, local_blocks, bidirectional, softcap, hierarchy, gates, empty or landmark_values, by name. None,
    False and 0 are not set.
    """
    return [name for name, value in options.items() if isinstance(value, Tensor) or bool(value)]


def check_kernel(name: str, lacking: Sequence[str]) -> None:
    """Raise ValueError where the backend `name` is "triton" and there are options that the fused kernels lack."""
    if name == "triton" and lacking:
        raise ValueError(f"{'=, '.join(lacking)}=: the backend 'triton' does not have it")


def backend_for(name: str, like: Tensor, block_size: int, has_kernel: bool = True) -> str:
    """The backend to use: `name`, or for "auto" the best one for these queries.

    "auto" becomes "triton" on a GPU that can hold a block, else "blockwise", with a warning if the GPU is too small.

    Args:
        name: a backend, or "auto".
        like: (…, d), a tensor with the type, device and head dimension of the queries.
        block_size: ℓ, normal tokens of a block.
        has_kernel: whether the fused kernels have the options that are used.

    Raises ValueError for an unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
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
    """The phase where the backend reads it: on the device of the queries for Triton's kernels, else on the CPU.

    Called once for all layers, it spares each layer a copy, and a CUDA graph one that it forbids.

    Args:
        phase: (B,), tokens missing from the first block.
        name, like, block_size, has_kernel: as in `backend_for`.
    """
    (like,) = as_autocast(like)
    return phase.to(like.device if backend_for(name, like, block_size, has_kernel) == "triton" else "cpu")


@overload
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = ...,
    prefix: int = ...,
    cmt: Tensor | None = ...,
    controlled: Tensor | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    top_k: int | None = ...,
    local_blocks: int = ...,
    bidirectional: bool = ...,
    softcap: float | None = ...,
    hierarchy: Hierarchy | None = ...,
    gates: Tensor | None = ...,
    empty: Tensor | None = ...,
    landmark_values: bool = ...,
    joint_softmax: float = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = ...,
    prefix: int = ...,
    cmt: Tensor | None = ...,
    controlled: Tensor | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    top_k: int | None = ...,
    local_blocks: int = ...,
    bidirectional: bool = ...,
    softcap: float | None = ...,
    hierarchy: Hierarchy | None = ...,
    gates: Tensor | None = ...,
    empty: Tensor | None = ...,
    landmark_values: bool = ...,
    joint_softmax: float = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = None,
    prefix: int = 0,
    cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    top_k: int | None = None,
    local_blocks: int = 0,
    bidirectional: bool = False,
    softcap: float | None = None,
    hierarchy: Hierarchy | None = None,
    gates: Tensor | None = None,
    empty: Tensor | None = None,
    landmark_values: bool = False,
    joint_softmax: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which the landmark that closes a block gates the attention to it (Section 3.1), causal by default.

    A window holds a landmark after every `block_size` normal tokens. A query attends to the tokens of its own block and
    of earlier blocks. The weight of an earlier block comes from the score of its landmark, and is shared out over the
    tokens of the block. A landmark's own weight is always 0.

    Args:
        q: (B, H, T, d), already rotated. Under autocast q, k and v are computed in its type.
        k, v: (B, H_kv, prefix + T, d), k rotated, H_kv a divisor of H. The queries belong to the last T keys.
        block_size: ℓ, normal tokens of a block.
        phase: (B,), integer, tokens missing from the first block, 0…block_size; best where `place_phase` puts it.
            None: 0.
        prefix: keys before the first query.
        cmt: (H_kv, d), the rotated key of a context miss token (Appendix D), which has no value and no position in the
            window; None: there is no such token.
        controlled: (B, blocks or more), bool, whether the context miss token controls the landmark of each block
            (context_miss_token.py). None: no landmark is controlled.
        sinks: (H,), a learned score of each head for a place without a value, in the outer softmax; not together with
            cmt. None: there are none.
        cu_seqlens: (documents + 1,), integer, from 0 to T, the rows where packed documents begin and end. They are
            packed into a batch of one, and do not see each other; phase and controlled are then given for each
            document. None: nothing is packed.
        scale: factor of the scores; None: 1/√d.
        top_k: gated blocks that a query attends to, those whose landmarks have the highest scores (top_k.py); None:
            all. The fused kernels have none of top_k, local_blocks, bidirectional, softcap, hierarchy and gates, and
            empty only without cmt and sinks: "auto" then is "blockwise".
        local_blocks: blocks before the query's own whose tokens it sees as those of its own block, without their
            landmarks: a window of at least ℓ · local_blocks tokens.
        bidirectional: whether queries see later tokens and blocks as they see earlier ones (Appendix F). A last block
            whose landmark is not in the window then has no gate, and only its own tokens see it. Without a prefix and
            a context miss token.
        softcap: every score s, also of a landmark, becomes softcap·tanh(s / softcap) (softcap.py). Not together with
            cmt, hierarchy or gates. None: scores stay as they are.
        hierarchy: groups of landmarks that have gates too, with a bias for each of H_kv heads (hierarchy.py). None:
            there are none.
        gates: (B, H, T, blocks), scores of the landmarks in place of q·k/√d, as `hierarchy.adjust` makes them; −∞ for
            blocks that a query does not see. None: the landmarks' own. Not together with hierarchy.
        empty: (B, prefix + T), bool, places without a token, which a block that ends early has before its landmark.
            Nothing attends to them, and the outputs there have no meaning. Not together with
            bidirectional, cu_seqlens, hierarchy or gates. None: there are none.
        landmark_values: whether the blocks that top_k leaves out are read by their landmarks' values, each as one token
            (top_k.py). Not together with bidirectional, hierarchy, gates or cmt; without effect where top_k leaves out
            none.
        joint_softmax: α from 0 to 1, how much of the log-sum-exp L_ib of a block's scores is added to the score of its
            landmark: w_ij ∝ exp(s_i,lm(b) − (1 − α) L_ib + s_ij), and exp(s_ij) in the own and in local blocks. 0: the
            paper's weight; 1: all tokens share one softmax, in which the scores of a token and of its landmark add
            up. top_k goes by the landmarks' scores. Not together with hierarchy, gates, cmt or landmark_values.
        backend: "reference" (explicit weights), "blockwise", "triton" (fused kernels, for GPUs) or "auto" (triton on a
            GPU, else blockwise).
        return_lse: whether to return the log-sum-exp too; default: the output alone.

    Returns (B, H, T, d), and with `return_lse` also the log-sum-exp (B, H, T) of each query's outer softmax, in nats;
    it has a gradient with the backend "reference", and with "blockwise" where nothing is compiled and there is no
    context miss token. The outer softmax is over the tokens of the query's block, the earlier landmarks that are free,
    and the context miss token. A window that starts on a landmark (phase = block_size) has an empty first block: the
    output of that landmark is 0.

    Raises ValueError for shapes that do not fit, a phase outside 0…block_size, controlled landmarks without a context
    miss token, an unknown backend, and for options out of range, that exclude each other, or that the backend lacks.
    """
    q, k, v = as_autocast(q, k, v)
    if (top_k is not None and top_k < 1) or local_blocks < 0:
        raise ValueError(f"top_k={top_k}, local_blocks={local_blocks}: must be at least 1 and 0")
    if bidirectional and (prefix or cmt is not None):
        raise ValueError(f"bidirectional=True: a whole window without prefix={prefix} and context miss token is read")
    has_gates = hierarchy is not None or gates is not None
    if has_gates and (local_blocks or bidirectional):
        raise ValueError("hierarchy, gates: leave out local_blocks and bidirectional, which have no groups")
    if softcap is not None and (softcap <= 0 or has_gates or cmt is not None):
        raise ValueError(f"softcap={softcap}: must be above 0, and without cmt, hierarchy and gates, which have no cap")
    if empty is not None and (bidirectional or has_gates or cu_seqlens is not None):
        raise ValueError("empty: leave out bidirectional, cu_seqlens, hierarchy and gates")
    if landmark_values and (bidirectional or has_gates or cmt is not None):
        raise ValueError("landmark_values: leave out bidirectional, hierarchy, gates and cmt")
    joint_softmax = joint_softmax_of(joint_softmax, "joint_softmax")
    if joint_softmax and (has_gates or cmt is not None or landmark_values):
        raise ValueError("joint_softmax: leave out hierarchy, gates, cmt and landmark_values")
    landmark_values = landmark_values and top_k is not None
    options = {"top_k": top_k, "local_blocks": local_blocks, "bidirectional": bidirectional, "softcap": softcap}
    uneven = empty if cmt is not None or sinks is not None else None  # the kernels have one of the two
    lacking = without_kernel(**options, hierarchy=hierarchy, gates=gates, empty=uneven)
    check_kernel(backend, lacking)
    backend = backend_for(backend, q, block_size, not lacking)
    batch, heads, queries, dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2] != prefix + queries or k.shape[3] != dim:
        raise ValueError(
            f"k and v must have shape ({batch}, heads, prefix + T = {prefix + queries}, {dim}), "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if empty is not None and (empty.shape != (batch, prefix + queries) or empty.dtype != torch.bool):
        raise ValueError(f"empty must be bool of shape ({batch}, {prefix + queries}), got {tuple(empty.shape)}")
    if heads % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {heads} query heads")
    samples = batch if cu_seqlens is None else check_packed(cu_seqlens, batch, queries, prefix)
    phase = check_phase(phase, samples, block_size, q.device if backend == "triton" else "cpu")
    scale = 1 / math.sqrt(dim) if scale is None else scale
    if controlled is not None and cmt is None:
        raise ValueError("controlled landmarks need a context miss token: pass its key as cmt")
    if cmt is not None and sinks is not None:
        raise ValueError("sinks and a context miss token exclude each other: pass one of them")
    cmt_scores = None
    if cmt is not None:
        cmt_scores = context_miss_scores(q, cmt, k.shape[1]) * scale
    elif sinks is not None:  # a context miss token whose score is the same for all queries of a head
        of_heads = sinks.to(torch.promote_types(q.dtype, torch.float32))[None, :, None]
        cmt_scores = of_heads.expand(batch, heads, queries).contiguous()
    if cmt_scores is not None:
        length = prefix + queries if cu_seqlens is None or controlled is None else longest(cu_seqlens)
        controlled = check_controlled(controlled, samples, length, block_size, q.device)
    if k.shape[1] != heads and backend != "triton":
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    if has_gates:
        hierarchy = check_gates(hierarchy, gates, q, prefix, block_size, cu_seqlens)
    of_window = block_size, phase, prefix, scale, cmt_scores, controlled, cu_seqlens
    inputs = AttentionInputs(q, k, v, *of_window, top_k, local_blocks, bidirectional, softcap, hierarchy, gates)
    inputs = inputs._replace(empty=empty, landmark_values=landmark_values, joint_softmax=joint_softmax)
    is_in_operator = not (has_gates or landmark_values or joint_softmax) and empty is None
    with without_autocast(q):
        if q.numel() == 0:
            out, lse = _of_no_query(q, k, v, cmt_scores)
        elif backend == "triton":
            out, lse = landmark_attention_fused(inputs)
        elif backend == "blockwise" and torch.compiler.is_compiling() and is_in_operator:
            out, lse = landmark_attention_in_graph(inputs)
        else:
            attend = landmark_attention_reference if backend == "reference" else landmark_attention_blockwise
            out, lse = one_by_one(attend, inputs)
    return (out, lse) if return_lse else out


def _of_no_query(q: Tensor, k: Tensor, v: Tensor, cmt_scores: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, both empty, where there is no sample or no query; all gradients are 0."""
    unused = k.sum() + v.sum() + (0 if cmt_scores is None else cmt_scores.sum())
    return q + 0 * unused, q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
