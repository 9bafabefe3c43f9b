"""The paper's definitions in plain loops over float64 numbers, one sample at a time, most of it one head: slow, and
independent of every path that is tested against it."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

Token = tuple[float, np.ndarray]  # score and value
Block = tuple[float, list[Token]]  # gate and tokens


def rotate(x: np.ndarray, position: int, fraction: float = 1.0) -> np.ndarray:
    """Rotary positions for one vector, of which the first `fraction` turns."""
    out = x.copy()
    turning = int(len(x) * fraction)
    for i in range(0, turning, 2):
        angle = position * 10000.0 ** (-i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        out[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return out


def score_by(scale: float | None = None, softcap: float | None = None) -> Callable[[np.ndarray, np.ndarray], float]:
    """Scoring: the score of a query and a key."""

    def score(query: np.ndarray, key: np.ndarray) -> float:
        raw = float(query @ key) * (len(query) ** -0.5 if scale is None else scale)
        return raw if softcap is None else softcap * math.tanh(raw / softcap)

    return score


SCORE = score_by()


def logsumexp(scores: Sequence[float]) -> float:
    top = max(scores, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(s - top) for s in scores))


def softmax(scores: Sequence[float]) -> list[float]:
    total = logsumexp(scores)
    return [math.exp(s - total) for s in scores]


def mean_of(tokens: list[Token]) -> np.ndarray:
    weights = softmax([score for score, _ in tokens])
    return sum((w * value for w, (_, value) in zip(weights, tokens, strict=True)), np.zeros(()))


def grouped(landmark: float, tokens: list[Token], alpha: float) -> Block:
    """A gate: the landmark's score, and a share α of what the block's tokens say themselves."""
    return landmark + alpha * logsumexp([score for score, _ in tokens]), tokens


def outer_softmax(
    local: list[Token], blocks: list[Block], controlled: Sequence[Block] = (), extra: float | None = None
) -> tuple[np.ndarray, float, list[float]]:
    """Output of one query, the log-sum-exp of its outer softmax, and the weights of the blocks, controlled ones last.
    extra: score of a place without a value. controlled: blocks that share its weight."""
    outer = [s for s, _ in local] + [gate for gate, _ in blocks] + ([] if extra is None else [extra])
    weights = softmax(outer) if outer else []
    shares = weights[len(local) : len(local) + len(blocks)]
    if controlled:
        shares = shares + [weights[-1] * share for share in softmax([gate for gate, _ in controlled])]
    parts = [w * value for w, (_, value) in zip(weights, local, strict=False)]
    parts += [share * mean_of(tokens) for share, (_, tokens) in zip(shares, [*blocks, *controlled], strict=True)]
    return sum(parts, np.zeros(())), logsumexp(outer), shares


def window(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block_size: int,
    phase: int = 0,
    *,
    score: Callable[[np.ndarray, np.ndarray], float] | None = None,
    gates: np.ndarray | None = None,
    alpha: float = 0.0,
    top_k: int | None = None,
    extra: Sequence[float] | None = None,
    controlled: Collection[int] = (),
    both_ways: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Output (T, d) and log-sum-exp (T,) of one head. q: (T, d), k, v: (prefix + T, d), rotated.

    gates: (T, blocks), in place of the landmarks' scores. extra: of each query. controlled: numbers of blocks.
    both_ways: a query sees its whole block, and later ones too.
    """
    score, width, prefix = score or score_by(), block_size + 1, len(k) - len(q)
    out, lse = np.zeros_like(q), np.zeros(len(q))
    for i in range(len(q)):
        own = (phase + prefix + i) // width
        tokens: dict[int, list[Token]] = {}
        landmarks: dict[int, float] = {}
        for j in range(len(k) if both_ways else prefix + i + 1):
            block, place = divmod(phase + j, width)
            if place < block_size:
                tokens.setdefault(block, []).append((score(q[i], k[j]), v[j]))
            elif block in tokens and (block < own or (both_ways and block > own)):
                landmarks[block] = score(q[i], k[j]) if gates is None else float(gates[i, block])
        best = sorted(landmarks, key=lambda b: landmarks[b], reverse=True)[:top_k]
        blocks = {b: grouped(landmarks[b], tokens[b], alpha) for b in best}
        free = [blocks[b] for b in best if b not in controlled]
        others = [blocks[b] for b in best if b in controlled]
        found, lse[i], _ = outer_softmax(tokens.get(own, []), free, others, None if extra is None else extra[i])
        out[i] = found
    return out, lse


def offset_keys(k: np.ndarray, channels: int, block_size: int | None, phase: int = 0) -> np.ndarray:
    """Keys (T, d) whose last channels are those of the normal token before. block_size: None: no landmarks."""
    out, before = k.copy(), None
    for j in range(len(k)) if channels else ():
        if block_size is not None and (phase + j) % (block_size + 1) == block_size:
            continue
        if before is not None:
            out[j, -channels:] = k[before, -channels:]
        before = j
    return out


def with_means(k: np.ndarray, block_size: int, phase: int = 0, share: float = 1.0) -> np.ndarray:
    """Rotated keys (T, d) with a share of the mean of its block's keys added to each landmark."""
    out = k.copy()
    for j in range(len(k)):
        first = max(0, j - block_size)
        if (phase + j) % (block_size + 1) == block_size and first < j:
            out[j] += share * k[first:j].mean(0)
    return out


@dataclass
class Selector:
    """Which of n blocks each query reads. granularity, second_look (m): as the settings of these names."""

    k: int
    granularity: str = "per_token_and_head"
    second_look: int | None = None

    def choose(self, scores: np.ndarray, exact: np.ndarray, kv_heads: int) -> list[list[list[int]]]:
        """Numbers of blocks, ascending, of each head and query. scores: (H, Q, n), of the landmarks, oldest first.
        exact: (H, Q, n), of landmark and tokens together, at the block's own position. kv_heads: groups of heads."""
        heads, queries, count = scores.shape
        looks = self.second_look is not None and min(self.second_look, count) > self.k
        likely = np.array([[softmax(row) for row in of_head] for of_head in scores]).reshape(scores.shape)
        chosen = []
        for h in range(heads):
            together = {"per_token": range(heads), "per_token_and_group": self._group(h, heads, kv_heads)}
            of_heads, of_head = list(together.get(self.granularity, [h])), []
            for i in range(queries):
                first = 0 if self.granularity == "per_head" else i
                last = queries if self.granularity == "per_head" else i + 1
                rank = likely[of_heads, first:last].max((0, 1)) if count else likely[0, 0]
                if looks:
                    rank = np.full(count, -np.inf)
                    for other in range(first, last):
                        own = self._best(likely[of_heads, other].max(0), self.second_look)
                        for head in of_heads:
                            rank[own] = np.maximum(rank[own], np.log(softmax(exact[head, other, own])))
                of_head.append(sorted(self._best(rank, self.k)))
            chosen.append(of_head)
        return chosen

    @staticmethod
    def _best(rank: np.ndarray, count: int) -> list[int]:
        """Blocks with the highest rank; among equal ones the newer."""
        return sorted(range(len(rank)), key=lambda n: (rank[n], n), reverse=True)[:count]

    @staticmethod
    def _group(head: int, heads: int, kv_heads: int) -> list[int]:
        return [other for other in range(heads) if other * kv_heads // heads == head * kv_heads // heads]


@dataclass
class Memory:
    """A memory of one layer for one sample. tied: whether blocks older than the last k have one score. mean: what share
    of the mean of its block each landmark's key has. cmt: (H, d), not rotated. sinks: (H,). found: of each head and
    query the weights of the blocks that it reads, by number, and of a context miss token."""

    block_size: int
    select: Selector
    max_blocks: int | None = None
    true_positions: bool = False
    tied: bool = False
    mean: float = 0.0
    rotary_fraction: float = 1.0
    score: Callable[[np.ndarray, np.ndarray], float] = SCORE
    alpha: float = 0.0
    cmt: np.ndarray | None = None
    cutoff: float = 0.0
    sinks: np.ndarray | None = None
    kv_heads: int = 1
    found: dict[tuple[int, int], tuple[dict[int, float], float | None]] = field(default_factory=dict)

    def _block(self, query: np.ndarray, k: np.ndarray, v: np.ndarray, number: int, slot: int) -> Block:
        """Score of the landmark and tokens of a complete block in a slot. k, v: (T, d), k not rotated."""
        width = self.block_size + 1
        keys = [rotate(k[number * width + o], slot * width + o, self.rotary_fraction) for o in range(width)]
        landmark = keys[-1] + self.mean * np.mean(keys[:-1], 0)
        tokens = [(self.score(query, key), v[number * width + o]) for o, key in enumerate(keys[:-1])]
        return self.score(query, landmark), tokens

    def read(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, chunks: list[int]) -> np.ndarray:
        """Output (H, T, d). q, k, v: (H, T, d), not rotated, keys offset already, landmarks included."""
        (heads, _, _), width, out, start = q.shape, self.block_size + 1, np.zeros_like(q), 0
        for chunk in chunks:
            stop, fed = start + chunk, start // width
            blocks = range(max(0, fed - (self.max_blocks or fed)), fed)
            slots = fed if self.true_positions else min(fed, self.select.k + 1)
            queries = {
                (h, i): rotate(q[h, i], (slots - fed) * width + i, self.rotary_fraction)
                for h in range(heads)
                for i in range(start, stop)
            }
            scores = np.zeros((heads, stop - start, len(blocks)))
            exact = scores.copy()
            for (h, i), query in queries.items():
                for n, b in enumerate(blocks):
                    recent = self.true_positions or fed - b <= self.select.k
                    slot = slots - (fed - b) if recent else 0
                    landmark, tokens = self._block(query, k[h], v[h], b, slot)
                    exact[h, i - start, n] = grouped(landmark, tokens, 1.0)[0]
                    same = fed - self.select.k - 1 if self.tied and not recent else b
                    scores[h, i - start, n] = self._block(query, k[h], v[h], same, slot)[0]
            chosen = self.select.choose(scores, exact, self.kv_heads)
            for h in range(heads):
                for i in range(start, stop):
                    numbers = [blocks[n] for n in chosen[h][i - start]]
                    out[h, i] = self._query(queries[h, i], h, i, k[h], v[h], numbers, fed, slots)
            start = stop
        return out

    def _query(self, query, head, i, k, v, numbers, fed, slots) -> np.ndarray:
        width, read, inside, local = self.block_size + 1, [], [], []
        for r, b in enumerate(numbers):
            stingy = r if fed - b > self.select.k else r + slots - len(numbers)
            block = self._block(query, k, v, b, b if self.true_positions else stingy)
            read.append(grouped(*block, self.alpha))
        for b in range(fed, i // width):
            inside.append(grouped(*self._block(query, k, v, b, slots + b - fed), self.alpha))
        for j in range(i // width * width, min(i + 1, i // width * width + self.block_size)):
            key = rotate(k[j], (slots - fed) * width + j, self.rotary_fraction)
            local.append((self.score(query, key), v[j]))
        if self.cmt is None:
            sink = None if self.sinks is None else float(self.sinks[head])
            out, _, shares = outer_softmax(local, read + inside, extra=sink)
            self.found[head, i] = dict(zip(numbers, shares, strict=False)), None
            return out
        extra = self.score(query, rotate(self.cmt[head], -1, self.rotary_fraction))
        missed = softmax([s for s, _ in local] + [gate for gate, _ in inside] + [extra])[-1]
        read = [] if missed < self.cutoff else read
        out, _, shares = outer_softmax(local, inside, read, extra)
        self.found[head, i] = dict(zip(numbers, shares[len(inside) :], strict=False)), missed
        return out
