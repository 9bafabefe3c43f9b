"""Search in documents by the landmarks of their blocks.

The paper suggests the highest landmark score inside a document as its relevance (Section 1). Here an index
keeps the landmarks of all blocks, and scores each block for a text in three steps:

1. For each head and each token of the text: the softmax of the query's scores over the landmarks of all blocks.
2. For each head: the mean of its logarithm over the tokens of the text.
3. The mean over the chosen heads.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from landmark.attention.rotary import rotate
from landmark.memory import Memory
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.data.tokenizer import Tokenizer

WINDOW = 10  # blocks of a document that are read together, and attend to each other as in training
BATCH_SIZE = 8  # windows


@dataclass(frozen=True)
class Block:
    """Part of a document: `text` is its bytes from `start` to `stop` (exclusive)."""

    document: str
    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class ScoredBlock(Block):
    """A block with its score for a text; a higher score is more relevant."""

    score: float


class Retriever:
    """An index of documents by the landmark keys of their blocks.

    model: a landmark model of `landmark.models`, or of transformers (`landmark.huggingface.wrap`). tokenizer: one of
    `landmark.data`, or of transformers. heads: the heads that score, each (layer, head) (None: all). Raises UserError
    for a model without landmarks and for a tokenizer that cannot be used.
    """

    def __init__(self, model: Any, tokenizer: Any, heads: Sequence[tuple[int, int]] | None = None):
        self.heads = heads
        self._model = model.eval()
        self._tokenizer = _as_landmark_tokenizer(tokenizer)
        self._memory_settings = _memory_settings(model)
        self.block_size: int = self._memory_settings["block_size"]
        self.blocks: list[Block] = []
        self._landmarks: dict[int, Tensor] = {}  # by layer, (H_kv, blocks, d)

    def __len__(self) -> int:
        """The number of blocks in the index."""
        return len(self.blocks)

    @torch.no_grad()
    def index(self, documents: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        """Add documents (name, text). The last block of each is padded with end of text.

        Raises UserError for a document without text.
        """
        windows: list[np.ndarray] = []
        named: Any = documents.items() if isinstance(documents, Mapping) else documents
        for name, text in named:
            blocks, ids = split_into_blocks(name, text, self._tokenizer, self.block_size)
            self.blocks += blocks
            windows += np.split(ids, range(WINDOW * self.block_size, len(ids), WINDOW * self.block_size))
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, window in enumerate(windows):
            by_length[len(window)].append(number)
        landmarks: list[dict[int, Tensor]] = [{} for _ in windows]  # of each window by layer, (H_kv, its blocks, d)
        for numbers in by_length.values():
            for start in range(0, len(numbers), BATCH_SIZE):
                batch = numbers[start : start + BATCH_SIZE]
                memory = self._read(np.stack([windows[number] for number in batch]))
                for layer in memory.queries:
                    for number, of_window in zip(batch, memory.landmarks(layer), strict=True):
                        landmarks[number][layer] = of_window
        parts = [self._landmarks, *landmarks] if self._landmarks else landmarks
        if parts:
            self._landmarks = {layer: torch.cat([part[layer] for part in parts], 1) for layer in parts[0]}

    @torch.no_grad()
    def head_scores(self, text: str) -> dict[tuple[int, int], Tensor]:
        """The score of every block (blocks,) by each head (layer, head): a mean of logarithms, at most 0.

        Raises UserError for an empty text or an empty index.
        """
        ids = self._tokenizer.encode(text)
        if not len(ids) or not len(self):
            raise UserError("the text is empty" if len(self) else "the index is empty: call index(documents) first")
        memory = self._read(ids.astype(np.int64)[None])
        scores = {}
        for layer, queries in memory.queries.items():
            landmarks = self._landmarks[layer]
            landmarks = landmarks.repeat_interleave(queries.shape[1] // len(landmarks), 0)
            logits = queries[0] @ landmarks.mT / math.sqrt(queries.shape[-1])
            for head, each in enumerate(logits.log_softmax(-1).mean(1)):
                scores[layer, head] = each
        return scores

    def scores(self, text: str) -> Tensor:
        """Relevance of each block for a text, (blocks,): the mean over the chosen heads."""
        by_head = self.head_scores(text)
        heads = list(by_head) if self.heads is None else self.heads
        if unknown := [head for head in heads if tuple(head) not in by_head]:
            raise UserError(f"heads={unknown}: the model has only the heads (layer, head) {list(by_head)}")
        return torch.stack([by_head[layer, head] for layer, head in heads]).mean(0)

    def query(self, text: str, count: int = 10) -> list[ScoredBlock]:
        """The `count` blocks that are most relevant for a text, best first."""
        best = self.scores(text).topk(min(count, len(self)))
        found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [ScoredBlock(**vars(self.blocks[number]), score=score) for score, number in found]

    def documents(self, text: str, count: int = 10) -> list[tuple[str, float]]:
        """The `count` most relevant documents, best first; the score of a document is the highest of its blocks."""
        best: dict[str, float] = {}
        for block, score in zip(self.blocks, self.scores(text).tolist(), strict=True):
            best[block.document] = max(score, best.get(block.document, -math.inf))
        return sorted(best.items(), key=lambda item: -item[1])[:count]

    def _read(self, ids: np.ndarray) -> _QueryRecorder:
        max_blocks = max(1, ids.shape[1] // self.block_size)
        memory = _QueryRecorder(max_blocks=max_blocks, k=0, **self._memory_settings)
        tokens = torch.from_numpy(ids).to(next(self._model.parameters()).device)
        if hasattr(self._model, "landmarks"):
            cache = self._model.new_memory()
            cache.memory = memory
            self._model(tokens, past_key_values=cache, local=tokens.shape[1], logits_to_keep=1)
        else:
            self._model(tokens, memory=memory, last=True)
        return memory


class _QueryRecorder(Memory):
    """A memory that also keeps the queries of the last chunk, in the type of landmarks."""

    def reset(self) -> None:
        super().reset()
        self.queries: dict[int, Tensor] = {}  # by layer: (B, H, T, d), rotated as if each landmark were at lag 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cmt: Tensor | None = None) -> Tensor:
        exact = q.to(torch.promote_types(q.dtype, torch.float32))
        self.queries[layer] = rotate(exact, self._rotary(self.block_size + 1, q.shape[2], q))
        return super().attend(layer, q, k, v, cmt)

    def landmarks(self, layer: int) -> Tensor:
        """Landmark keys (B, H_kv, blocks, d), oldest first."""
        store = self.layers[layer].store
        return store.landmarks[:, :, : len(store)]


def split_into_blocks(name: str, text: str, tokenizer: Tokenizer, block_size: int) -> tuple[list[Block], np.ndarray]:
    """Split a document into blocks.

    Args:
        name: name of the document.
        text: text of the document.
        tokenizer: one of `landmark.data`.
        block_size: ℓ, normal tokens of a block.

    Returns the blocks and the ids (blocks · ℓ,), int64, padded with end of text. Raises UserError for a document
    without text.
    """
    ids = tokenizer.encode(text).astype(np.int64)
    if not len(ids):
        raise UserError(f"{name}: the document has no text")
    ends = [0, *np.cumsum(tokenizer.byte_lengths[ids]).tolist()]
    bounds = [*range(0, len(ids), block_size), len(ids)]
    blocks = [
        Block(name, ends[start], ends[stop], tokenizer.decode(ids[start:stop]))
        for start, stop in itertools.pairwise(bounds)
    ]
    return blocks, np.pad(ids, (0, -len(ids) % block_size), constant_values=tokenizer.eot)


def _as_landmark_tokenizer(tokenizer: Any) -> Tokenizer:
    if hasattr(tokenizer, "byte_lengths"):
        return tokenizer
    from landmark.data.pretrained_tokenizer import PretrainedTokenizer

    return PretrainedTokenizer(tokenizer)


def _memory_settings(model: Any) -> dict[str, Any]:
    """The settings of `Memory` that say how the model's keys are made, its block size among them."""
    if hasattr(model, "landmarks"):
        from landmark.huggingface.families import inverse_frequencies

        return {"block_size": model.landmarks.block_size, "rope_base": inverse_frequencies(model)}
    config: Any = getattr(model, "config", None)
    if getattr(config, "kind", None) != "landmark":
        raise UserError(f"{type(model).__name__} has no landmarks to retrieve by: give a landmark model")
    return {"block_size": config.block_size, **model.key_settings()}
