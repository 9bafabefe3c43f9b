"""Retrieval through a hierarchy of landmarks (gates.py): groups first, then the blocks in the best of them.

A node of level 0 is a block, one of level l+1 a group of m = `fan_out` consecutive nodes of level l. For each query:

1. Score the complete nodes of the highest level, and take the k best.
2. Score the m nodes inside each of them, and adjust their scores: a node's score, minus the log-sum-exp over its group,
   plus the adjusted score of the group. Beside them stand the *open* nodes of this level, the fewer than m that are in
   no complete group yet. Take the k best.
3. Go on like this to the blocks.

So a query computes n/m^levels + k·m·levels scores in place of n. Positions are those of scoring
(`landmark.memory.positions`): nodes of older blocks stand at the furthest lag, where one key serves all queries; each
of the last k blocks has its own lag, which changes the score of every group that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention import Given
from landmark.extensions.hierarchy.gates import Hierarchy, adjust, first_bias, landmark_scores
from landmark.memory.question import Question
from landmark.memory.select import Best, Choice
from landmark.memory.select.scores import scored_at_once
from landmark.memory.select.top_k import best_ages
from landmark.memory.store import BlockStore


@dataclass(frozen=True)
class BestOfGroups(Best):
    """Reads the k blocks that are best through their groups, each query and head by itself. The store drops no blocks.

    fan_out: m, nodes of a group. levels: of groups. bias: of a layer, (levels, H_kv), added to the scores of groups;
    None: log m in all layers.
    """

    fan_out: int = 2
    levels: int = 1
    bias: Callable[[int], Tensor] | None = None

    def local_gate(self, question: Question, q: Tensor, k: Tensor, pending: int) -> Given:
        """The adjusted scores of the landmarks of chunk and pending tokens. Args: as of `Selector.local_gate`."""
        search = self._search(question)
        return Given(search.local_gates(q, k, question.block_size, pending))

    def choose(self, question: Question) -> Choice:
        return Choice(*self._search(question).choose(question))

    def _search(self, question: Question) -> GroupSearch:
        """That of the chunk: its scores of open nodes, and what they become in groups that the chunk completes."""
        if "search" not in question.notes:
            groups = question.state.notes.setdefault("groups", GroupKeys(self.fan_out, self.levels))
            bias = first_bias(self.fan_out, self.levels, 1) if self.bias is None else self.bias(question.layer)
            q = question.queries.q
            bias = bias.to(q.device, torch.promote_types(q.dtype, torch.float32))
            hierarchy = Hierarchy(self.fan_out, bias).for_heads(q.shape[1])
            question.notes["search"] = GroupSearch(question, groups, hierarchy, self.is_tied(question))
        return question.notes["search"]


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
        queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        store, groups: of the layer.
        hierarchy: with a bias for each of H heads.
        own_lags: number of newest blocks that have a lag of their own.
        is_tied: whether the landmarks of all older blocks count as one and the same vector.
    """

    def __init__(
        self,
        queries: Tensor,
        store: BlockStore,
        groups: GroupKeys,
        hierarchy: Hierarchy,
        own_lags: int,
        is_tied: bool,
    ):
        blocks = len(store)
        self.fan_out, self.counts = hierarchy.fan_out, [blocks, *groups.counts]
        self._keys = [store.landmarks, *groups.keys]
        bias = hierarchy.bias.to(queries.dtype).cumsum(0)[:, :, None, None]
        self._bias = [None, *bias.unbind()]  # of the nodes of each level
        self._queries = queries[-1].transpose(1, 2)  # (B, H, T, d), for the furthest lag
        self._shared = self._of(self._keys[0][:, :, max(blocks - own_lags - 1, 0)][:, :, None]) if is_tied else None
        batch, kv_heads, heads = len(store.landmarks), store.kv_heads, queries.shape[3]
        sequences = torch.arange(batch * heads, device=queries.device) // (heads // kv_heads)
        self._sequences = sequences.view(batch, heads, 1, 1)
        # By level the first node with some of these blocks, and what the lags of these change in it and later ones.
        own = min(own_lags, blocks)
        keys = store.landmarks[:, :, blocks - own : blocks]
        keys = keys.repeat_interleave(heads // kv_heads, 1)[:, :, None] if heads != kv_heads else keys[:, :, None]
        lagged = queries[:own].flip(0).permute(1, 3, 2, 0, 4)  # a block of age n has lag n
        changes = (lagged * keys).sum(-1)
        changes = changes - (self._of(keys[:, :, 0]) if self._shared is None else self._shared)
        self._changes = [(blocks - own, changes)]
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
        return [self(level, above * self.fan_out, count) for level, (count, above) in enumerate(pairwise(self.counts))]

    def _of(self, keys: Tensor) -> Tensor:
        """Scores (B, H, T, n) of keys (B, H_kv, n, d) at the furthest lag."""
        batch, heads, queries, dim = self._queries.shape
        q = self._queries.reshape(batch, keys.shape[1], -1, dim)
        return (q @ keys.mT).view(batch, heads, queries, -1)


class GroupSearch:
    """The retrieval of one chunk in one layer.

    Args:
        question: of all queries of the chunk; there may be no blocks.
        groups: of the layer.
        hierarchy: with a bias for each of H heads.
        is_tied: whether the landmarks of all blocks without a lag of their own count as one and the same vector.
    """

    def __init__(self, question: Question, groups: GroupKeys, hierarchy: Hierarchy, is_tied: bool):
        self._groups, self._hierarchy, self._is_tied = groups, hierarchy, is_tied
        self._nodes: NodeScores | None = None  # of all queries of the chunk
        self._open: list[Tensor] = []  # scores of the open nodes of each level but the highest, oldest first
        if len(question.store):
            groups.update(question.store)
            self._nodes = self._scores(question, question.queries.exact)
            self._open = self._nodes.open()
        self._adjusted = self._open

    def local_gates(self, q: Tensor, k: Tensor, block_size: int, pending: int) -> Tensor:
        """The gates of the landmarks of chunk and pending tokens, (B, H, T, blocks), −∞ where they are not seen.

        The chunk's blocks complete groups that begin with open nodes, so the scores of these are adjusted too, for each
        query.

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

    def choose(self, question: Question) -> tuple[Tensor, Tensor]:
        """The ages of the blocks that each query reads, and the shifts of their gates, as in `Choice`.

        question: of the chunk, or of some of its queries.
        """
        adjusted, raw, selection = self._adjusted, self._open[0], question.selection
        if selection is not None:
            adjusted, raw = [selection.gather(x) for x in adjusted], selection.gather(raw)
        exact, k = question.queries.exact, question.k
        _, batch, queries, heads, dim = exact.shape
        at_once = self._groups.counts[-1] + k * self._hierarchy.fan_out * dim
        step = max(1, scored_at_once(exact.device) // (batch * heads * at_once))
        if step >= queries and self._nodes is not None and (selection is None or selection.indices is None):
            return _best_blocks(self._nodes, adjusted, raw, k)
        found = []
        for start in range(0, queries, step):
            part = slice(start, start + step)
            nodes = self._scores(question, exact[:, :, part])
            found.append(_best_blocks(nodes, [x[:, :, part] for x in adjusted], raw[:, :, part], k))
        ages, shift = (torch.cat(each, 2) for each in zip(*found, strict=True))
        return ages, shift

    def _scores(self, question: Question, queries: Tensor) -> NodeScores:
        own_lags = question.lags.own
        return NodeScores(queries, question.store, self._groups, self._hierarchy, own_lags, self._is_tied)


def _best_blocks(nodes: NodeScores, adjusted: list[Tensor], raw: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`GroupSearch.choose` of queries that are scored together.

    Nodes stand newest first, so that a stable sort decides ties.

    Args:
        nodes: the scores of nodes for these queries.
        adjusted: adjusted scores (B, H, T, r) of the open nodes of each level but the highest, oldest first.
        raw: the scores of the open blocks, not adjusted.
        k: nodes to take at each level.
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
