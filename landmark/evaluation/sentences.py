"""The paper's remark that the landmark scores inside a document measure its relevance (Section 3.2), measured.

Sentences of some books are asked for, and all blocks are ranked. A model reads the books, WINDOW blocks at a time, and
of each block keeps the key of the landmark, or of every token. A head's score of a block is a softmax over blocks of
the query's scores, where a block of tokens has their log-sum-exp. Its logarithm is averaged over tokens and heads.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from landmark.attention.rotary import rotate
from landmark.config import Config
from landmark.data import Stream, Tokenizer
from landmark.evaluation.measurement import Progress
from landmark.utils.errors import UserError
from landmark.utils.hardware import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import clopper_pearson

SENTENCE = r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]"
WORDS = range(16, 41)  # of a sentence that may be a query
AT = 10  # rank up to which a block counts as found
WINDOW, BATCH = 10, 8  # blocks that attend to each other, as in training; windows that are read together
AT_ONCE = 1 << 25  # scores of tokens in memory


def evaluate_sentences(
    model: Any, streams: dict[str, Stream], tokenizer: Tokenizer, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """accuracy (the share of `eval.prompts` sentences with a block among the first ten), accuracy_low, accuracy_high
    (Clopper–Pearson, 95 %), prompts, ranks (of the first block that counts, from 1; none for chance), blocks, heads
    [[layer, head]], and the cost. streams: the split `eval.split`, and `validation`, where the heads are chosen.
    """
    reset_peak_memory()
    started, stream, method = time.perf_counter(), streams[config.eval.split], config.eval.retriever
    asked = asked_blocks(stream, tokenizer, config, model.config.block_size)
    count, results = len(asked.texts), {"prompts": len(asked.queries), "blocks": len(asked.texts), "heads": None}
    if method == "chance":
        chances = [1 - math.comb(count - len(each), AT) / math.comb(count, AT) for each in asked.wanted]
        share = low = high = float(np.mean(chances))
    else:
        if method == "bm25":
            score = _bm25(asked.texts)
        else:
            scored = partial(scorer, model, tokenizer, method == "tokens")
            validation = asked_blocks(streams["validation"], tokenizer, config, model.config.block_size)
            heads = results["heads"] = _best_heads(scored(validation.ids), validation)
            by_head = scored(asked.ids, heads)

            def score_of_heads(text: str) -> Tensor:
                return torch.stack([*by_head(text).values()]).mean(0)

            score = score_of_heads
        ranks = results["ranks"] = []
        for query, wanted in zip(asked.queries, asked.wanted, strict=True):
            ranks.append(_rank(score(query), wanted))
            if progress is not None:
                progress(len(ranks), len(asked.queries))
        found = sum(rank <= AT for rank in ranks)
        share, (low, high) = found / len(ranks), clopper_pearson(found, len(ranks))
    results |= {"accuracy": share, "accuracy_low": low, "accuracy_high": high, "tokens": len(stream)}
    seconds = time.perf_counter() - started
    cost = {"seconds": seconds, "tokens_per_second": len(stream) / seconds, "peak_memory_bytes": peak_memory_bytes()}
    return results | cost


def scorer(
    model: Any, tokenizer: Tokenizer, of_tokens: bool, ids: Iterable[np.ndarray], heads: Any = None
) -> Callable[[str], dict[tuple[int, int], Tensor]]:
    """Scores (blocks,) of a text by each head (layer, head), or some: means of logarithms. ids: of documents."""
    model, parts = model.eval(), defaultdict(list)
    for document in ids:
        *whole, last = torch.from_numpy(document).split(WINDOW * model.config.block_size)
        for batch in (*(torch.stack(whole).split(BATCH) if whole else ()), last[None]):
            for layer, state in _read(model, batch)[1].layers.items():
                store = state.store
                each = store.blocks.keys if of_tokens else store.landmarks[..., None, :]
                parts[layer].append(each[:, :, : len(store)].transpose(0, 1).flatten(1, 2))
    keys = {layer: torch.cat(each, 1) for layer, each in parts.items()}  # (H_kv, blocks, 1 or ℓ, d)

    def by_head(text: str) -> dict[tuple[int, int], Tensor]:
        queries, _ = _read(model, torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None])
        found = {}
        for layer, head in heads or [(layer, head) for layer, q in queries.items() for head in range(q.shape[1])]:
            q = queries[layer][0]
            of_head, asking = keys[layer][head * len(keys[layer]) // len(q)], q[head] / math.sqrt(q.shape[-1])
            pieces = of_head.split(max(1, AT_ONCE // (len(asking) * of_head.shape[1])))
            scores = torch.cat([(piece.to(q.dtype) @ asking.T).logsumexp(1) for piece in pieces])
            found[layer, head] = scores.log_softmax(0).mean(1)  # a softmax over blocks for each token of the text
        return found

    return by_head


@torch.no_grad()
def _read(model: Any, ids: Tensor) -> tuple[dict[int, Tensor], Any]:
    """The queries (B, H, T, d) of each layer, rotated as if every block were just before them, and the memory."""
    cache, queries = model.new_memory(k=0), {}
    memory = getattr(cache, "memory", cache)  # of a model of transformers
    attend = memory.attend

    def noting(layer: int, q: Tensor, *others: Any, **extra: Any) -> Tensor:
        exact = q.to(torch.promote_types(q.dtype, torch.float32))
        queries[layer] = rotate(exact, memory.keys.rotary(layer)(memory.width, q.shape[2], q))
        return attend(layer, q, *others, **extra)

    memory.attend = noting
    model(ids.to(next(model.parameters()).device), memory=cache, last=True)
    return queries, memory


def _best_heads(by_head: Callable[[str], dict[tuple[int, int], Tensor]], asked: AskedBlocks) -> list[list[int]]:
    """The heads whose summed scores rank the wanted blocks best: the first n, by the ranks that each alone gives."""
    found = [by_head(query) for query in asked.queries]

    def distance(scores: Iterable[Tensor]) -> float:
        return sum(math.log(_rank(each, wanted)) for each, wanted in zip(scores, asked.wanted, strict=True))

    order = sorted(found[0], key=lambda head: distance(scores[head] for scores in found))
    sums = [torch.stack([scores[head] for head in order]).cumsum(0) for scores in found]
    together = np.array([distance(each[n] for each in sums) for n in range(len(order))])
    return [list(head) for head in order[: int(together.argmin()) + 1]]


def _rank(scores: Tensor, wanted: Sequence[int]) -> int:
    """The rank, from 1, of the best of some blocks; other blocks with the same score rank higher."""
    best = scores[wanted].max()
    return 1 + int((scores >= best).sum() - (scores[wanted] >= best).sum())


class AskedBlocks(NamedTuple):
    """Blocks of ℓ tokens, and queries for some. ids: of each document, (blocks · ℓ,) int64, padded with end of text.
    texts: of all blocks; a character of several belongs to the last. wanted: for each query numbers of blocks.
    """

    ids: list[np.ndarray]
    texts: list[str]
    queries: list[str]
    wanted: list[list[int]]


def asked_blocks(stream: Stream, tokenizer: Tokenizer, config: Config, block_size: int) -> AskedBlocks:
    """The blocks of a stream's documents, and those that hold `eval.prompts` random sentences, which are asked for: of
    16 to 40 words, once in their document. Raises UserError for too few.
    """
    tokens, count = np.asarray(stream.tokens), config.eval.prompts
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot) + 1)[:-1]
    texts = [tokenizer.decode(document) for document in documents if len(document) > 1]
    known = [
        (number, match.start(), match.group())
        for number, text in enumerate(texts)
        for match in re.finditer(SENTENCE, text)
        if len(match.group().split()) in WORDS and text.count(match.group()) == 1
    ]
    if len(known) < count:
        raise UserError(f"eval.prompts={count}: the split has only {len(known)} sentences of 16 to 40 words")
    asked = sorted(known[n] for n in np.random.default_rng(config.seed).choice(len(known), count, replace=False))
    found = AskedBlocks([], [], [sentence for *_, sentence in asked], [[] for _ in asked])
    for number, text in enumerate(texts):
        ids, ends = tokenizer.encode_with_ends(text)
        characters = np.cumsum([len(character.encode()) for character in text])  # the byte at which each ends
        cuts = [0, *np.searchsorted(characters, ends[block_size - 1 : -1 : block_size], "right"), len(text)]
        for wanted, (of_text, start, sentence) in zip(found.wanted, asked, strict=True):
            if of_text == number:
                low, high = np.searchsorted(cuts[:-1], [start, start + len(sentence) - 1], "right") - 1
                wanted += range(len(found.texts) + int(low), len(found.texts) + int(high) + 1)
        found.ids.append(np.pad(ids.astype(np.int64), (0, -len(ids) % block_size), constant_values=tokenizer.eot))
        found.texts.extend(text[start:stop] for start, stop in pairwise(cuts))
    return found


def _bm25(texts: list[str]) -> Callable[[str], Tensor]:
    import bm25s

    words: Any = partial(bm25s.tokenize, stopwords="en", show_progress=False)
    ranker = bm25s.BM25()
    ranker.index(words(texts), show_progress=False)
    return lambda text: torch.from_numpy(ranker.get_scores(words([text], return_ids=False)[0]))
