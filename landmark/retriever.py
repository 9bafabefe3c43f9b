"""Search in documents by the landmarks of their blocks, or by all their tokens.

The paper suggests the highest landmark score inside a document as its relevance (Section 1). Here an index
keeps the landmarks of all blocks, and scores each block for a text in three steps:

1. For each head and each token of the text: the softmax of the query's scores over the landmarks of all blocks.
2. For each head: the mean of its logarithm over the tokens of the text.
3. The mean over the chosen heads.

With the scorer "tokens" the index keeps the keys of all tokens, ℓ times as many numbers, and a block's score in step 1
is the log-sum-exp of its tokens' scores: by what it would weigh in full attention. Late interaction (ColBERT,
arXiv 2004.12832) sums highest scores instead. With "mean_key" it is the score of the mean of its keys: so a model that
reads without landmarks can be asked, too.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.attention import Extra
from landmark.attention.rotary import rotate
from landmark.data.document_blocks import Block, encoded, split_into_blocks
from landmark.memory import Memory, Store
from landmark.memory.select import Best, MeanKeys
from landmark.memory.select.scores import scored_at_once
from landmark.memory.store.tiers import DeviceBlocks
from landmark.memory.summaries import SummaryMemory
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic
from landmark.utils.hashes import check_once
from landmark.utils.leftovers import delete_leftovers
from landmark.utils.weights import weights_digest

if TYPE_CHECKING:
    from landmark.data.tokenizer import Tokenizer

WINDOW = 10  # blocks of a document that are read together, and attend to each other as in training
BATCH_SIZE = 8  # windows
SCORERS = ("landmark", "mean_key", "tokens")
FORMAT = "3"  # of the file of an index


@dataclass(frozen=True)
class ScoredBlock(Block):
    """A block with its score for a text; a higher score is more relevant."""

    score: float


class Retriever:
    """An index of documents by the landmark keys of their blocks, or by the keys of their tokens."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        heads: Sequence[tuple[int, int]] | None = None,
        scorer: str | None = None,
    ):
        """
        Args:
            model: a landmark model of `landmark.models`, or one of transformers (`landmark.huggingface.wrap`), with
                landmarks or without.
            tokenizer: one of `landmark.data`, or of transformers.
            heads: the heads that score, each (layer, head). None: all.
            scorer: "landmark", "mean_key" or "tokens": what of a block is scored. None: its landmark, or the mean of
                its keys where there are no landmarks.

        Raises UserError for a model without blocks, a tokenizer that cannot be used, and a scorer that is unknown or
        asks for landmarks where there are none.
        """
        if scorer is not None and scorer not in SCORERS:
            raise UserError(f"scorer={scorer}: must be one of {', '.join(SCORERS)}")
        self.heads, self._model = heads, model.eval()
        self._tokenizer = _as_landmark_tokenizer(tokenizer)
        self.block_size, self._of_model, with_landmarks = _memory_of_model(model)
        if scorer == "landmark" and not with_landmarks:
            raise UserError(f"{type(model).__name__} reads without landmarks: take scorer=mean_key, or tokens")
        self.scorer = scorer or ("landmark" if with_landmarks else "mean_key")
        self._memory: type[_QueryRecorder] = _QueryRecorder if with_landmarks else _SummaryRecorder
        self.blocks: list[Block] = []
        self._keys: dict[int, Tensor] = {}  # by layer, (H_kv, blocks, n, d): n is 1 or, with the scorer tokens, ℓ

    def __len__(self) -> int:
        """The number of blocks in the index."""
        return len(self.blocks)

    @property
    def names(self) -> list[str]:
        """The names of the documents, in the order in which they were added."""
        return list(dict.fromkeys(block.document for block in self.blocks))

    def index(self, documents: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        """Add documents (name, text): all of them, or none where an error is raised. The last block of each is padded
        with end of text.

        Raises UserError for a document without text, and for a name that is there already.
        """
        named = _named(documents)
        if known := sorted({name for name, _ in named} & set(self.names)):
            raise UserError(f"{known[0]}: a document of this name is in the index already: use replace(documents)")
        blocks, keys = self._keys_of(named)
        self._put(self.blocks + blocks, _joined([self._keys, keys]))

    add = index

    def replace(self, documents: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        """Add documents (name, text) in place of those of the same names; all or nothing, as `index`.

        Raises UserError for a document without text.
        """
        named = _named(documents)
        blocks, keys = self._keys_of(named)
        others, kept = self._without({name for name, _ in named})
        self._put(others + blocks, _joined([kept, keys]))

    def delete(self, *names: str) -> None:
        """Remove documents. Raises UserError, and removes none, where one of the names is not in the index."""
        known = set(self.names)
        if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
            raise UserError(f"{unknown[0]}: no document of this name is in the index")
        self._put(*self._without(set(names)))

    def save(self, path: str | Path) -> None:
        """Write the index to a file. A retriever with the same model and tokenizer can `load` it."""
        text = "\n".join(json.dumps(asdict(block), ensure_ascii=False) for block in self.blocks)
        content = torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8)
        tensors = {f"layer.{layer}": x.contiguous() for layer, x in self._keys.items()}
        tensors, path = {"blocks": content, **tensors}, Path(path)
        delete_leftovers(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))
        write_atomic(path, save_tensors(tensors, self._identity() | {"sha256": _sha256(tensors)}))

    def load(self, path: str | Path) -> None:
        """Replace the index by a saved one.

        Raises UserError, and leaves the index as it was, for a file that is missing or damaged, and for an index of
        another model, tokenizer, block size or scorer.
        """
        try:
            with safe_open(path, "pt") as file:
                found = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            expected = found.get("sha256")  # indices of early versions have none
            is_whole = lambda _: expected in (None, _sha256(tensors))  # noqa: E731
            check_once(Path(path), is_whole, "the one in it", "index the documents anew")
            lines = bytes(tensors.pop("blocks").numpy()).decode().split("\n")
            blocks = [Block(**json.loads(line)) for line in lines if line]
            keys = {int(name.removeprefix("layer.")): x.to(self._device, copy=True) for name, x in tensors.items()}
            if any(x.shape[1] != len(blocks) for x in keys.values()) or (blocks and not keys):
                raise ValueError("blocks are missing")
        except UserError:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: no index, or a damaged one ({' '.join(str(error).split())[:200]})") from error
        for name, value in self._identity().items():
            if found.get(name) != value:
                raise UserError(
                    f"{path} is the index of another {name} ({found.get(name)}, here {value}): index the documents anew"
                )
        self._put(blocks, keys)

    @torch.no_grad()
    def _keys_of(self, documents: Sequence[tuple[str, str]]) -> tuple[list[Block], dict[int, Tensor]]:
        """The blocks of documents, and their keys by layer, (H_kv, blocks, n, d)."""
        blocks: list[Block] = []
        windows: list[np.ndarray] = []
        for name, text in documents:
            of_document, ids = split_into_blocks(name, text, self._tokenizer, self.block_size)
            blocks += of_document
            windows += np.split(ids, range(WINDOW * self.block_size, len(ids), WINDOW * self.block_size))
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, window in enumerate(windows):
            by_length[len(window)].append(number)
        keys: list[dict[int, Tensor]] = [{} for _ in windows]
        for numbers in by_length.values():
            for start in range(0, len(numbers), BATCH_SIZE):
                batch = numbers[start : start + BATCH_SIZE]
                memory = self._read(np.stack([windows[number] for number in batch]))
                for layer in memory.queries:
                    for number, of_window in zip(batch, memory.stored(layer, self.scorer), strict=True):
                        keys[number][layer] = of_window
        return blocks, _joined(keys)

    def _without(self, names: set[str]) -> tuple[list[Block], dict[int, Tensor]]:
        """The blocks and keys of all documents but these."""
        kept = [number for number, block in enumerate(self.blocks) if block.document not in names]
        keys = {layer: x[:, kept] for layer, x in self._keys.items()} if kept else {}
        return [self.blocks[number] for number in kept], keys

    def _put(self, blocks: list[Block], keys: dict[int, Tensor]) -> None:
        self.blocks, self._keys = blocks, keys

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _identity(self) -> dict[str, str]:
        """What must be the same where a saved index is loaded."""
        return {
            "format": FORMAT,
            "model": weights_digest(self._model),
            "tokenizer": self._tokenizer.hash,
            "block_size": str(self.block_size),
            "scorer": self.scorer,
        }

    @torch.no_grad()
    def head_scores(self, text: str) -> dict[tuple[int, int], Tensor]:
        """The score of every block (blocks,) by each head (layer, head): a mean of logarithms, at most 0.

        Raises UserError for what is no text, for an empty text and an empty index.
        """
        return dict(self._head_scores(text, None))

    def _head_scores(
        self, text: str, heads: Sequence[tuple[int, int]] | None
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The scores of these heads (None: all). Raises UserError as `head_scores`, and for an unknown head."""
        encoded("text", text)
        ids = self._tokenizer.encode(text)
        if not len(ids) or not len(self):
            raise UserError("the text is empty" if len(self) else "the index is empty: call index(documents) first")
        memory = self._read(ids.astype(np.int64)[None])
        there = [(layer, head) for layer, queries in memory.queries.items() for head in range(queries.shape[1])]
        if unknown := [head for head in heads or [] if head not in there]:
            raise UserError(f"heads={unknown}: the model has only the heads (layer, head) {there}")
        for layer, head in heads or there:
            queries, keys = memory.queries[layer][0], self._keys[layer]
            yield (layer, head), _mean_log_softmax(queries[head], keys[head * len(keys) // len(queries)])

    @torch.no_grad()
    def scores(self, text: str) -> Tensor:
        """Relevance of each block for a text, (blocks,): the mean over the chosen heads."""
        heads = None if self.heads is None else [(layer, head) for layer, head in self.heads]
        return torch.stack([scores for _, scores in self._head_scores(text, heads)]).mean(0)

    def query(self, text: str, count: int | None = None) -> list[ScoredBlock]:
        """The `count` blocks that are most relevant for a text, best first. count: None, the best 10, or all if fewer.

        Raises UserError for an empty text or index, and where the index has fewer blocks.
        """
        scores = self.scores(text)
        best = scores.topk(_checked(count, len(self), "blocks"))
        found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [ScoredBlock(**vars(self.blocks[number]), score=score) for score, number in found]

    def documents(self, text: str, count: int | None = None) -> list[tuple[str, float]]:
        """The `count` most relevant documents, best first; the score of a document is the highest of its blocks.

        count: None, the best 10, or all if fewer. Raises UserError for an empty text or index, and where the index has
        fewer documents.
        """
        best: dict[str, float] = {}
        for block, score in zip(self.blocks, self.scores(text).tolist(), strict=True):
            best[block.document] = max(score, best.get(block.document, -math.inf))
        return sorted(best.items(), key=lambda item: -item[1])[: _checked(count, len(best), "documents")]

    def _read(self, ids: np.ndarray) -> _QueryRecorder:
        store = Store(max(1, ids.shape[1] // self.block_size))
        select = MeanKeys() if self.scorer == "mean_key" else Best()
        memory = self._memory(self.block_size, 0, store=store, select=select, **self._of_model)
        tokens = torch.from_numpy(ids).to(self._device)
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
        self.queries: dict[int, Tensor] = {}  # by layer: (B, H, T, d), rotated as if each block were at lag 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: Extra | None = None) -> Tensor:
        exact = q.to(torch.promote_types(q.dtype, torch.float32))
        self.queries[layer] = rotate(exact, self.keys.rotary(layer)(self.width, q.shape[2], q))
        return super().attend(layer, q, k, v, extra)

    def stored(self, layer: int, scorer: str) -> Tensor:
        """The keys of blocks (B, H_kv, blocks, n, d), oldest first: n = 1 summary, or those of their ℓ tokens."""
        store = self.layers[layer].store
        assert isinstance(store.blocks, DeviceBlocks)
        summaries = {"landmark": "landmarks", "mean_key": "means"}
        every = store.blocks.keys if scorer == "tokens" else store.summaries[summaries[scorer]][..., None, :]
        return every[:, :, : len(store)]


class _SummaryRecorder(_QueryRecorder, SummaryMemory):
    """The same for a text without landmarks."""


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _mean_log_softmax(queries: Tensor, keys: Tensor) -> Tensor:
    """The mean over queries (T, d) of the log-softmax over blocks of their scores for the keys (blocks, n, d)."""
    blocks, each, dim = keys.shape
    total, room = queries.new_zeros(blocks), scored_at_once(queries.device)
    for some in queries.split(max(1, room // blocks)):
        scores = queries.new_empty(blocks, len(some))
        step = max(1, room // (len(some) * each))
        for start in range(0, blocks, step):
            part = keys[start : start + step].to(queries.dtype)
            of_keys = part.reshape(-1, dim) @ (some / math.sqrt(dim)).T
            scores[start : start + step] = of_keys.view(len(part), each, -1).logsumexp(1)
        total += scores.log_softmax(0).sum(1)
    return total / len(queries)


def _named(documents: Mapping[str, str] | Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Documents as pairs of name and text. Raises UserError for anything else, and where a name comes twice."""
    named: Any = documents.items() if isinstance(documents, Mapping) else documents
    named = list(named) if isinstance(named, Iterable) and not isinstance(named, str) else [named]
    for each in named:
        if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[0], str):
            raise UserError(f"documents: {str(each)[:40]!r} is no pair of a name and a text: give {{name: text, …}}")
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise UserError(f"{twice[0]}: two documents have this name: give each its own")
    return named


def _joined(parts: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Keys by layer, one part after the other."""
    parts = [part for part in parts if part]
    return {layer: torch.cat([part[layer] for part in parts], 1) for layer in parts[0]} if parts else {}


def _checked(count: int | None, there: int, what: str) -> int:
    """The number of results to give. Raises UserError where it is no number from 1 to those there are."""
    if count is None:
        return min(10, there)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= there:
        raise UserError(f"count={count}: must be from 1 to {there}, the number of {what} in the index")
    return count


def _as_landmark_tokenizer(tokenizer: Any) -> Tokenizer:
    if hasattr(tokenizer, "byte_lengths"):
        return tokenizer
    from landmark.data.pretrained_tokenizer import PretrainedTokenizer

    return PretrainedTokenizer(tokenizer)


def _memory_of_model(model: Any) -> tuple[int, dict[str, Any], bool]:
    """The model's block size, the arguments of its memory that belong to it, and whether it reads with landmarks."""
    if hasattr(model, "landmarks"):
        memory, has_landmarks = model.new_memory().memory, model.landmarks.token is not None
        settings = {"keys": memory.keys, "scoring": memory.scoring} | ({} if has_landmarks else {"window": 0})
        return memory.block_size, settings, has_landmarks
    config: Any = getattr(model, "config", None)
    if getattr(config, "kind", None) != "landmark":
        raise UserError(f"{type(model).__name__} has no landmarks to retrieve by: give a landmark model")
    if config.options:
        raise UserError(f"model.{next(iter(config.options))}: a retriever ranks single blocks, give a model without it")
    return config.block_size, model.memory_objects(), True
