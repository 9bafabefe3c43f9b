"""Retrieval by descent through a hierarchy of landmarks (`landmark.attention.hierarchy`).

A node of level 0 is a block, one of level l+1 a group of m = `fan_out` consecutive nodes of level l. For each query:

1. Score the complete nodes of the highest level, and keep the k best.
2. Score the m nodes inside each of them, and adjust their scores: a node's score, minus the log-sum-exp over its group,
   plus the adjusted score of the group. Beside them stand the *open* nodes of this level, the fewer than m that are in
   no complete group yet. Keep the k best.
3. Go on like this to the blocks.

So a query computes n/m^levels + k·m·levels scores in place of n. Positions are those of scoring (positions.py): nodes
of older blocks stand at the furthest lag, where one key serves all queries; each of the last k blocks has its own lag,
which changes the score of every group that it is in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.hierarchy import Hierarchy, adjust, landmark_scores
from landmark.memory.block_store import BlockStore
from landmark.memory.cutoff import QuerySelection
from landmark.memory.retrieval import best_ages, scored_at_once


class GroupKeys:
    """Keys of a layer's complete groups: means of the keys of their nodes, at the furthest lag.

    Made from the store's landmarks when they are first needed, so a store that is loaded or copied needs nothing else.

    keys: for each level from 1 on (B, H_kv, capacity, d). counts: complete groups of each of these levels.
    """

    def __init__(self, fan_out: int, levels: int):
        self.fan_out = fan_out
        self.counts = [0] * levels
        self.keys = [torch.empty(0)] * levels

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes for keys in self.keys)

    def update(self, store: BlockStore) -> None:
        """Add the groups that are complete by now. The store drops no blocks: block n is in row n."""
        below, count = store.landmarks, len(store)
        for level, done in enumerate(self.counts):
            count //= self.fan_out
            if count > done:
                new = below[:, :, done * self.fan_out : count * self.fan_out].unflatten(2, (-1, self.fan_out)).mean(3)
                self._reserve(level, count, new)
                self.keys[level][:, :, done:count] = new
                self.counts[level] = count
            elif not count:
                self.keys[level] = below[:, :, :0]
            below = self.keys[level]

    def _reserve(self, level: int, count: int, like: Tensor) -> None:
        old, done = self.keys[level], self.counts[level]
        if not done or count > old.shape[2]:
            room = count + count // 8
            self.keys[level] = like.new_empty(*like.shape[:2], room, like.shape[3])
            if done:
                self.keys[level][:, :, :done] = old[:, :, :done]


class NodeScores:
    """Scores of a layer's nodes for some queries, not adjusted.

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        store, groups: of the layer.
        hierarchy: with a bias for each of H heads.
        num_recent: number of newest blocks that have their own lag.
        tie: whether the landmarks of all older blocks count as one and the same vector.
    """

    def __init__(
        self,
        rotated_queries: Tensor,
        store: BlockStore,
        groups: GroupKeys,
        hierarchy: Hierarchy,
        num_recent: int,
        tie: bool,
    ):
        blocks = len(store)
        self.fan_out, self.counts = hierarchy.fan_out, [blocks, *groups.counts]
        self._keys = [store.landmarks, *groups.keys]
        bias = hierarchy.bias.to(rotated_queries.dtype).cumsum(0)[:, :, None, None]
        self._bias = [None, *bias.unbind()]  # of the nodes of each level
        self._queries = rotated_queries[-1].transpose(1, 2)  # (B, H, T, d), for the furthest lag
        self._shared = self._of(self._keys[0][:, :, max(blocks - num_recent - 1, 0)][:, :, None]) if tie else None
        batch, kv_heads, heads = len(store.landmarks), store.kv_heads, rotated_queries.shape[3]
        sequences = torch.arange(batch * heads, device=rotated_queries.device) // (heads // kv_heads)
        self._sequences = sequences.view(batch, heads, 1, 1)
        # By level the first node with some of the last blocks, and what the lags of these change in it and later ones.
        recent = min(num_recent, blocks)
        keys = store.landmarks[:, :, blocks - recent : blocks]
        keys = keys.repeat_interleave(heads // kv_heads, 1)[:, :, None] if heads != kv_heads else keys[:, :, None]
        lagged = rotated_queries[:recent].flip(0).permute(1, 3, 2, 0, 4)  # a block of age n has lag n
        changes = (lagged * keys).sum(-1)
        changes = changes - (self._of(keys[:, :, 0]) if self._shared is None else self._shared)
        self._changes = [(blocks - recent, changes)]
        for _ in groups.counts:
            first, changes = self._changes[-1]
            if width := changes.shape[-1]:
                changes = F.pad(changes, (first % self.fan_out, -(first + width) % self.fan_out))
                changes = changes.unflatten(-1, (-1, self.fan_out)).mean(-1)
            self._changes.append((first // self.fan_out, changes))

    def __call__(self, level: int, start: int, stop: int) -> Tensor:
        """The scores (B, H, T, stop − start) of neighbouring nodes."""
        if self._shared is None:
            scores = self._of(self._keys[level][:, :, start:stop])
        else:
            scores = self._shared.repeat(1, 1, 1, stop - start)
        first, changes = self._changes[level]
        low, high = max(start, first), min(stop, first + changes.shape[-1])
        if low < high:
            scores[..., low - start : high - start] += changes[..., low - first : high - first]
        return self._biased(level, scores)

    def at(self, level: int, numbers: Tensor) -> Tensor:
        """The scores of nodes by their numbers (B, H, T, n), in the same shape."""
        batch, heads, queries, count = numbers.shape
        keys, dim = self._keys[level], self._queries.shape[-1]
        if self._shared is None:
            places = numbers + self._sequences * keys.shape[2]
            chosen = keys.flatten(0, 2).index_select(0, places.flatten()).view(batch * heads * queries, count, dim)
            scores = torch.bmm(chosen, self._queries.reshape(-1, dim, 1)).view(numbers.shape)
        else:
            scores = self._shared.repeat(1, 1, 1, count)
        first, changes = self._changes[level]
        if changes.shape[-1]:  # the column before them, of 0, is that of all earlier nodes
            scores = scores + F.pad(changes, (1, 0)).gather(-1, (numbers - (first - 1)).clamp_(min=0))
        return self._biased(level, scores)

    def _biased(self, level: int, scores: Tensor) -> Tensor:
        bias = self._bias[level]
        return scores if bias is None else scores.add_(bias)

    def open(self) -> list[Tensor]:
        """For each level but the highest, the scores of the nodes that are in no complete group, oldest first."""
        return [
            self(level, above * self.fan_out, count)
            for level, (count, above) in enumerate(zip(self.counts[:-1], self.counts[1:], strict=True))
        ]

    def _of(self, keys: Tensor) -> Tensor:
        """Scores (B, H, T, n) of keys (B, H_kv, n, d) at the furthest lag."""
        batch, heads, queries, dim = self._queries.shape
        q = self._queries.reshape(batch, keys.shape[1], -1, dim)
        return (q @ keys.mT).view(batch, heads, queries, -1)


class Descent:
    """The retrieval of one chunk in one layer.

    1. `score_open`: the nodes of the memory that are in no complete group yet.
    2. `local_gates`: the adjusted scores of the chunk's own landmarks. Its blocks complete groups that begin with open
       nodes, so the scores of these are adjusted too, for each query.
    3. `retrieve`: the descent.

    Args:
        store, groups: of the layer.
        hierarchy: with a bias for each of H heads.
        num_recent: number of newest blocks that have their own lag.
        tie: whether the landmarks of all older blocks count as one and the same vector.
    """

    def __init__(self, store: BlockStore, groups: GroupKeys, hierarchy: Hierarchy, num_recent: int, tie: bool):
        if len(store):
            groups.update(store)
        self._store, self._groups, self._hierarchy = store, groups, hierarchy
        self._num_recent, self._tie = num_recent, tie
        self._nodes: NodeScores | None = None  # of all queries of the chunk
        self._open: list[Tensor] = []  # scores of the open nodes of each level but the highest, oldest first
        self._adjusted: list[Tensor] = []

    def score_open(self, rotated_queries: Tensor) -> None:
        """rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S."""
        self._nodes = self._scores(rotated_queries)
        self._open = self._adjusted = self._nodes.open()

    def local_gates(self, q: Tensor, k: Tensor, block_size: int, pending: int) -> Tensor:
        """The gates of the landmarks of chunk and pending tokens, (B, H, T, blocks), −∞ where they are not seen.

        Args:
            q: (B, H, T, d).
            k: (B, H_kv, pending + T, d). Both at their positions.
            block_size: ℓ.
            pending: number of pending tokens.
        """
        exact, heads = self._hierarchy.bias.dtype, q.shape[1]
        wide = k.to(exact).repeat_interleave(heads // k.shape[1], 1)
        phase = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        scores, own = landmark_scores(q.to(exact), wide, block_size, phase, pending, q.shape[-1] ** -0.5)
        gates, self._adjusted = adjust(scores, own, self._hierarchy, self._open)
        return gates

    def retrieve(self, rotated_queries: Tensor, k: int, selection: QuerySelection | None) -> tuple[Tensor, Tensor]:
        """Choose the blocks that each query retrieves.

        Args:
            rotated_queries: (S, B, n, H, d), of the selected queries.
            k: blocks to retrieve, and nodes to keep at each level.
            selection: the queries; None: all.

        Returns the ages of the retrieved blocks, oldest first, int64 (B, H, n, q) with q = min(k, blocks kept), and
        what is added to the scores of their landmarks to adjust them, (B, H, n, q). Among equal scores the newer nodes
        are chosen.
        """
        adjusted, raw = self._adjusted, self._open[0]
        if selection is not None:
            adjusted, raw = [selection.gather(x) for x in adjusted], selection.gather(raw)
        _, batch, queries, heads, dim = rotated_queries.shape
        room = scored_at_once(rotated_queries.device)
        at_once = self._groups.counts[-1] + k * self._hierarchy.fan_out * dim
        step = max(1, room // (batch * heads * at_once))
        if step >= queries and self._nodes is not None and (selection is None or selection.indices is None):
            return _descend(self._nodes, adjusted, raw, k)
        found = []
        for start in range(0, queries, step):
            part = slice(start, start + step)
            nodes = self._scores(rotated_queries[:, :, part])
            found.append(_descend(nodes, [x[:, :, part] for x in adjusted], raw[:, :, part], k))
        ages, shift = (torch.cat(each, 2) for each in zip(*found, strict=True))
        return ages, shift

    def _scores(self, rotated_queries: Tensor) -> NodeScores:
        return NodeScores(rotated_queries, self._store, self._groups, self._hierarchy, self._num_recent, self._tie)


def _descend(nodes: NodeScores, adjusted: list[Tensor], raw: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`Descent.retrieve` of queries that are scored together.

    Nodes are kept newest first, so that a stable sort decides ties.

    Args:
        nodes: the scores of nodes for these queries.
        adjusted: adjusted scores (B, H, T, r) of the open nodes of each level but the highest, oldest first.
        raw: the scores of the open blocks, not adjusted.
        k: as in `Descent.retrieve`.
    """
    fan_out, highest = nodes.fan_out, len(nodes.counts) - 1
    scores = nodes(highest, 0, nodes.counts[-1])
    count = scores.shape[-1]
    ages = torch.arange(count, 0, -1, device=scores.device)
    chosen = count - best_ages(scores, ages, min(k, count)).sort(-1).values
    scores, shift = scores.gather(-1, chosen), scores
    for level in range(highest - 1, -1, -1):
        inside = torch.arange(fan_out - 1, -1, -1, device=scores.device)
        numbers = (chosen[..., None] * fan_out + inside).flatten(-2)
        own = nodes.at(level, numbers).unflatten(-1, (chosen.shape[-1], fan_out))
        within = own.log_softmax(-1) + scores[..., None]  # one operation, logsumexp is ten
        first = nodes.counts[level + 1] * fan_out
        newest = torch.arange(nodes.counts[level] - 1, first - 1, -1, device=scores.device)
        numbers = torch.cat([newest.expand(*numbers.shape[:3], -1), numbers], -1)
        of_open = adjusted[level].flip(-1)
        scores = torch.cat([of_open, within.flatten(-2)], -1)
        if level == 0:
            shift = torch.cat([of_open - raw.flip(-1), (within - own).flatten(-2)], -1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
        chosen, scores = numbers.gather(-1, best), scores.gather(-1, best)
        shift = shift.gather(-1, best) if level == 0 else shift
    return nodes.counts[0] - chosen.flip(-1), shift.flip(-1)
