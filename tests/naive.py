"""Landmark attention and its memory in plain loops over float64 numbers, written apart from the library.

One sample and one head at a time, from the definitions of the paper: slow, and independent of every path that is tested
against it.
"""

from __future__ import annotations

import math

import numpy as np


def rotate(x: np.ndarray, position: int, fraction: float = 1.0) -> np.ndarray:
    """Rotary positions for one vector, of which the first `fraction` turns."""
    out = x.copy()
    turning = int(len(x) * fraction)
    for i in range(0, turning, 2):
        angle = position * 10000.0 ** (-i / turning)
        out[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        out[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return out


def scaled(query: np.ndarray, key: np.ndarray, softcap: float | None = None) -> float:
    """The score of a key, with a cap if there is one."""
    score = float(query @ key) / math.sqrt(len(query))
    return score if softcap is None else softcap * math.tanh(score / softcap)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def grouped_attention(
    local: list,
    blocks: list[tuple[float, list]],
    dim: int,
    cmt_score: float | None = None,
    controlled: tuple | list = (),
) -> np.ndarray:
    """Output (d,) of one query.

    Args:
        local: [(score, value)] of the tokens of the query's own block.
        blocks: (landmark score, [(score, value)]) of each free block.
        dim: d.
        cmt_score: score of the context miss token; None: there is none.
        controlled: as blocks, those that share the weight of the context miss token.
    """
    blocks, controlled = ([b for b in some if b[1]] for some in (blocks, controlled))
    if not local and not blocks and cmt_score is None:
        return np.zeros(dim)
    outer, gates = outer_weights(local, blocks, cmt_score, controlled)
    out = np.zeros(dim)
    for weight, (_, value) in zip(outer, local):
        out += weight * value
    for gate, (_, tokens) in zip(gates, blocks + controlled, strict=True):
        for weight, (_, value) in zip(softmax([s for s, _ in tokens]), tokens):
            out += gate * weight * value
    return out


def joint(local: list, blocks: list, share: float) -> list:
    """Score and value of every token, in one list. In the softmax of all a block weighs as its landmark's score and
    `share` of the log-sum-exp of its tokens' scores say."""
    joined = list(local)
    for gate, tokens in blocks:
        of_tokens = math.log(sum(math.exp(score) for score, _ in tokens))
        joined += [(gate - (1 - share) * of_tokens + score, value) for score, value in tokens]
    return joined


def outer_weights(local, blocks, cmt_score=None, controlled=()) -> tuple[list[float], list[float]]:
    """Weights of the outer softmax, and weights of the blocks, the controlled ones last."""
    outer = softmax([s for s, _ in local] + [gate for gate, _ in blocks] + ([] if cmt_score is None else [cmt_score]))
    gates = outer[len(local) : len(local) + len(blocks)]
    if controlled:
        gates += [outer[-1] * share for share in softmax([gate for gate, _ in controlled])]
    return outer, gates


def block_weights(local, blocks: dict, own: int, fan_out: int, bias: list[float]) -> tuple[list[float], dict]:
    """Weights of the tokens of a query's own block, and by number those of earlier blocks in a hierarchy of landmarks.

    Args:
        local: [(score, value)] of the tokens of the query's own block.
        blocks: by number the score of each earlier block that has tokens.
        own: number of the query's own block.
        fan_out: nodes of a group.
        bias: of the groups of each level.
    """
    levels = [dict(blocks)]
    for level, of_level in enumerate(bias, 1):
        complete = range(own // fan_out**level)
        children = [[s for n, s in levels[-1].items() if n // fan_out == group] for group in complete]
        levels.append({group: sum(c) / len(c) + of_level for group, c in zip(complete, children, strict=True)})
    levels.append({})
    roots = [
        (level, n) for level in range(len(bias) + 1) for n in levels[level] if n // fan_out not in levels[level + 1]
    ]
    outer = softmax([s for s, _ in local] + [levels[level][n] for level, n in roots])

    def weight(level: int, n: int) -> float:
        if (level, n) in roots:
            return outer[len(local) + roots.index((level, n))]
        siblings = [other for other in levels[level] if other // fan_out == n // fan_out]
        gate = softmax([levels[level][other] for other in siblings])[siblings.index(n)]
        return weight(level + 1, n // fan_out) * gate

    return outer[: len(local)], {b: weight(0, b) for b in blocks}


def offset_keys(k: np.ndarray, channels: int, block_size: int | None, phase: int = 0) -> np.ndarray:
    """Keys (T, d) of a text or window whose last channels are those of the normal token before. None: no landmarks."""
    out, before = k.copy(), None
    for j in range(len(k)):
        if block_size is not None and (phase + j) % (block_size + 1) == block_size:
            continue
        if before is not None:
            out[j, len(k[j]) - channels :] = k[before, len(k[j]) - channels :]
        before = j
    return out


def summary(kind: str, query: np.ndarray, keys: list[np.ndarray], share: float) -> tuple[list[float], float]:
    """The weights of a block's keys in its landmark's key, and the bias that goes with them.

    kind: "token", "mean" or "pooled". query: the landmark's; it and the keys are rotated. share: of both.
    """
    if kind == "token" or not keys:
        return [0.0] * len(keys), 0.0
    if kind == "mean":
        return [share / len(keys)] * len(keys), 0.0
    weights = softmax([scaled(query, key) for key in keys])
    return [share * w for w in weights], -share * sum(w * math.log(w) for w in weights)


def with_summary(gate: float, tokens: list, found: tuple[list[float], float], query: np.ndarray) -> float:
    """A landmark's score, plus the weighed scores [(score, value)] of its block's tokens and the bias."""
    weights, bias = found
    return gate + sum(w * s for w, (s, _) in zip(weights, tokens, strict=True)) + bias * query[-1]


def landmark_attention(
    q,
    k,
    v,
    block_size: int,
    phase: int,
    prefix: int = 0,
    cmt=None,
    controlled=None,
    landmark_key: str = "token",
    top_k=None,
    local_blocks: int = 0,
    bidirectional: bool = False,
    fan_out: int = 0,
    bias: tuple | list = (),
    softcap: float | None = None,
    landmark_values: bool = False,
    joint_softmax: float = 0.0,
) -> np.ndarray:
    """Output (T, d) of one head of a whole window.

    Args:
        q: (T, d), rotated.
        k, v: (prefix + T, d), rotated.
        block_size: ℓ, normal tokens of a block.
        phase: tokens missing from the first block.
        prefix: keys before the first query.
        cmt: (d,), rotated key of the context miss token; None: there is none.
        controlled: (blocks,), bool, landmarks that it controls.
        landmark_key: what landmarks' keys have added to them; not "token" only without a prefix.
        top_k: gated blocks that a query attends to; None: all.
        local_blocks: blocks beside the query's own that it sees without landmarks.
        bidirectional: whether later tokens are seen too; then a block whose landmark is not there has no gate.
        fan_out, bias: of a hierarchy of landmarks (`block_weights`); an empty bias: there is none.
        softcap: cap of the scores; only with landmark_key="token".
        landmark_values: whether other blocks than the best are one token each, with the landmark's value.
        joint_softmax: how much of the log-sum-exp of a block's scores is added to its landmark's score.
    """
    width, dim = block_size + 1, q.shape[1]
    out = np.zeros_like(q)
    summaries = {}
    for j in range(len(k)):
        if (phase + j) % width == block_size:
            keys = list(k[max(0, j - block_size) : j])
            summaries[(phase + j) // width] = summary(landmark_key, q[max(j - prefix, 0)], keys, 1 - joint_softmax)
    for i in range(prefix, len(k)):
        seen = range(len(k) if bidirectional else i + 1)
        score = {j: scaled(q[i - prefix], k[j], softcap) for j in seen}
        own_block = (phase + i) // width
        local, blocks = [], {}
        for j in seen:
            block, is_landmark = (phase + j) // width, (phase + j) % width == block_size
            if abs(block - own_block) <= local_blocks:
                if not is_landmark:
                    local.append((score[j], v[j]))
            elif is_landmark:
                block = blocks.setdefault(block, [None, []])
                block[0] = with_summary(score[j], block[1], summaries[(phase + j) // width], q[i - prefix])
            else:
                blocks.setdefault(block, [None, []])[1].append((score[j], v[j]))
        if len(bias):
            seen = {b: gate for b, (gate, tokens) in blocks.items() if tokens}
            if not local and not seen:
                continue
            own, gates = block_weights(local, seen, own_block, fan_out, list(bias))
            for weight, (_, value) in zip(own, local, strict=True):
                out[i - prefix] += weight * value
            for b, gate in gates.items():
                for weight, (_, value) in zip(softmax([s for s, _ in blocks[b][1]]), blocks[b][1], strict=True):
                    out[i - prefix] += gate * weight * value
            continue
        gated = [(gate, b) for b, (gate, tokens) in blocks.items() if tokens and gate is not None]
        best = {b for _, b in sorted(gated, reverse=True)[:top_k]}
        short = {b: (gate, [(0.0, v[(b + 1) * width - 1 - phase])]) for gate, b in gated if b not in best}
        blocks = {b: blocks[b] for b in blocks if b in best} | (short if landmark_values else {})
        free = [(g, t) for b, (g, t) in blocks.items() if cmt is None or not controlled[b]]
        controlled_blocks = [(g, t) for b, (g, t) in blocks.items() if cmt is not None and controlled[b]]
        cmt_score = None if cmt is None else scaled(q[i - prefix], cmt)
        if joint_softmax:
            local, free = joint(local, free, joint_softmax), []
        out[i - prefix] = grouped_attention(local, free, dim, cmt_score, controlled_blocks)
    return out


def proposals(rank, numbers: list[int], count: int) -> list[int]:
    """The `count` blocks with the highest rank, of those with these ascending numbers; among equals the newer."""
    return sorted(numbers, key=lambda n: (rank[n], n), reverse=True)[: max(0, count)]


def memory_attention(
    q,
    k,
    v,
    chunks: list[int],
    block_size: int,
    k_blocks: int,
    max_blocks: int | None,
    granularity: str,
    tie: bool,
    cmt=None,
    cutoff: float = 0.0,
    mapping: str = "stingy",
    found: dict | None = None,
    landmark_key: str = "token",
    rotary_fraction: float = 1.0,
    pooling=None,
    local_blocks: int = 0,
    kv_heads: int | None = None,
    softcap: float | None = None,
    rerank: int | None = None,
    recent: int = 0,
    joint_softmax: float = 0.0,
    query_window: int = 1,
) -> np.ndarray:
    """Output (H, T, d) of one sample.

    Args:
        q, k, v: (H, T, d), not rotated, landmarks included.
        chunks: how many positions are fed at a time.
        block_size: ℓ, normal tokens of a block.
        k_blocks: blocks retrieved.
        max_blocks: most blocks kept; None: all.
        granularity: as that of `landmark.memory.Memory`.
        tie: whether the blocks older than the last k have one score.
        cmt: (H, d), key of the context miss token, not rotated; None: there is none.
        cutoff: weight of the context miss token below which a query retrieves nothing.
        mapping: "stingy" or "true".
        found: is filled, by (head, query), with the weights of the retrieved blocks and of the context miss token.
        landmark_key: what landmarks' keys have added to them.
        rotary_fraction: the part of a head's channels that turns.
        pooling: (H, T, d), queries, not rotated, of which those of landmarks pool; None: q.
        local_blocks: blocks before a query's own that it sees without landmarks, and that are not in the memory yet.
        kv_heads: groups of heads that choose together with "per_token_and_group"; None: as many as heads.
        softcap: cap of the scores; only with landmark_key="token".
        rerank: blocks with the best landmarks, of which the k with the best landmark and tokens are retrieved; None: k.
        recent: newest blocks that are always among the k.
        joint_softmax: as in `landmark_attention`; without a context miss token.
        query_window: queries, the own one and those before it, for the best of which blocks are chosen.
    """
    heads, total, dim = q.shape
    kv_heads = kv_heads or heads
    width = block_size + 1
    out = np.zeros_like(q)
    pooling = q if pooling is None else pooling

    def turned(x, position):
        return rotate(x, position, rotary_fraction)

    summaries = {}
    for h in range(heads):
        for end in range(block_size, total, width):
            keys = [turned(k[h, end - block_size + o], o) for o in range(block_size)]
            summaries[h, end // width] = summary(
                landmark_key, turned(pooling[h, end], block_size), keys, 1 - joint_softmax
            )
    start = 0
    for chunk in chunks:
        stop = min(start + chunk, total)
        fed = max(0, start // width - local_blocks)
        kept = list(range(max(0, fed - max_blocks) if max_blocks is not None else 0, fed))
        slots = min(fed, k_blocks + 1) if mapping == "stingy" else fed
        first = max(0, start - query_window + 1)
        probability, second_look = np.zeros((heads, stop - first, len(kept))), {}
        for h in range(heads):
            for i in range(first, stop):
                query = turned(q[h, i], slots * width + i - fed * width)
                scores = []
                for n, b in enumerate(kept):
                    age = fed - b
                    slot = slots - age if age <= k_blocks or mapping == "true" else 0
                    own = [turned(k[h, b * width + o], slot * width + o) for o in range(width)]
                    *tokens, gate = ((scaled(query, key, softcap), None) for key in own)
                    mass = np.log(sum(np.exp(s) for s, _ in tokens))
                    second_look[h, i, n] = with_summary(gate[0], tokens, summaries[h, b], query) + mass
                    source = b if not tie or age <= k_blocks else fed - k_blocks - 1
                    keys = [turned(k[h, source * width + o], slot * width + o) for o in range(width)]
                    *tokens, gate = ((scaled(query, key, softcap), None) for key in keys)
                    scores.append(with_summary(gate[0], tokens, summaries[h, source], query))
                probability[h, i - first] = softmax(scores) if scores else []
        newest = [b for b in kept if fed - b <= recent]
        older = [n for n, b in enumerate(kept) if b not in newest]
        looks_again = rerank is not None and min(rerank, len(kept)) > k_blocks
        shares = probability
        if looks_again and query_window > 1:
            shares = np.full_like(probability, -np.inf)
            for h in range(heads):
                for i in range(first, stop):
                    own = proposals(probability[h, i - first], older, rerank - len(newest))
                    own += map(kept.index, newest)
                    shares[h, i - first, own] = np.log(softmax([second_look[h, i, n] for n in own]))
        windowed = np.stack(
            [shares[:, max(0, i + 1 - query_window - first) : i + 1 - first].max(1) for i in range(start, stop)], 1
        )
        for h in range(heads):
            for i in range(start, stop):
                group = [each for each in range(heads) if each * kv_heads // heads == h * kv_heads // heads]
                rank = {
                    "per_token_and_head": windowed[h, i - start],
                    "per_token_and_group": windowed[group, i - start].max(0) if len(kept) else [],
                    "per_head": windowed[h].max(0) if len(kept) else [],
                    "per_token": windowed[:, i - start].max(0) if len(kept) else [],
                }[granularity]
                query = turned(q[h, i], slots * width + i - fed * width)
                proposed = rerank if looks_again and query_window == 1 else k_blocks
                best = proposals(rank, older, proposed - len(newest))
                if looks_again and query_window == 1:
                    best = sorted(best, key=lambda n: (second_look[h, i, n], kept[n]), reverse=True)
                chosen = sorted([kept[n] for n in best[: max(0, k_blocks - len(newest))]] + newest)
                blocks = []
                for r, b in enumerate(chosen):
                    slot = r if fed - b > k_blocks else r + slots - len(chosen)
                    slot = slot if mapping == "stingy" else b

                    def score(offset, b=b, slot=slot, h=h, query=query):
                        key = turned(k[h, b * width + offset], slot * width + offset)
                        return scaled(query, key, softcap)

                    tokens = [(score(o), v[h, b * width + o]) for o in range(block_size)]
                    blocks.append((with_summary(score(block_size), tokens, summaries[h, b], query), tokens))
                local = [[], {}]
                for j in range(fed * width, i + 1):
                    key = turned(k[h, j], slots * width + j - fed * width)
                    s = scaled(query, key, softcap)
                    if i // width - j // width <= local_blocks:
                        if j % width != block_size:
                            local[0].append((s, v[h, j]))
                    elif j % width == block_size:
                        block = local[1].setdefault(j // width, [None, []])
                        block[0] = with_summary(s, block[1], summaries[h, j // width], query)
                    else:
                        local[1].setdefault(j // width, [None, []])[1].append((s, v[h, j]))
                inside = [(g, t) for g, t in local[1].values()]
                if joint_softmax:
                    out[h, i] = grouped_attention(joint(local[0], blocks + inside, joint_softmax), [], dim)
                    continue
                if cmt is None:
                    out[h, i] = grouped_attention(local[0], blocks + inside, dim)
                    if found is not None and blocks:
                        found[h, i] = dict(zip(chosen, outer_weights(local[0], blocks + inside)[1])), None
                    continue
                cmt_score = scaled(query, turned(cmt[h], -1))
                seen = [s for s, _ in local[0]] + [gate for gate, tokens in inside if tokens] + [cmt_score]
                dropped = softmax(seen)[-1] < cutoff
                read = [] if dropped else blocks
                out[h, i] = grouped_attention(local[0], inside, dim, cmt_score, read)
                if found is not None:
                    inside = [block for block in inside if block[1]]
                    outer, gates = outer_weights(local[0], inside, cmt_score, read)
                    found[h, i] = dict(zip(chosen, gates[len(inside) :])), outer[-1]
        start = stop
    return out
