"""Every pair of a memory's settings is refused, or each of the two changes what is read: none is ignored."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from landmark.attention import ContextMiss
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings, Settings
from landmark.utils.errors import UserError
from tests.memory.reading import feed, new_memory, texts

# Without those that decide no number: tier, folder and cache.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "k": (1, 3),
    "granularity": ("per_token", "per_head", "per_token_and_group", "per_token_and_head"),
    "scorer": ("recent", "random", "mean_key"),
    "rerank": (6,),
    "first": (1, 2),
    "max_blocks": (6,),
    "index": ("faiss",),
    "window": (16, 0),
    "dense": (40,),
    "mapping": ("true", "auto", "stingy"),
    "cutoff": (0.05,),
    "seed": (3,),
}
# The values of an option with which another, or a value of it, need change nothing: the last blocks are not those that
# are dropped, and all heads choose them; `seed` is also the training's; an index may find what an exact search finds; a
# text may fit the trained length. (): any.
HARMLESS: dict[Any, tuple[tuple[str, Any], ...]] = {
    "max_blocks": (("scorer", "recent"),),
    "scorer": (("k", 1),),
    ("granularity", "per_token"): (("k", 1), ("scorer", "recent")),
    "seed": (),
    "index": (),
    "mapping": (),
}


def read_with_landmarks(given: dict[str, Any]) -> Tensor:
    q, k, v, miss = texts(150, batch=1)
    memory = new_memory(**MemorySettings().updated({"k": 2, **given}).saved())
    return feed(memory, q, k, v, [50, 50, 50], extra=ContextMiss(miss) if "cutoff" in given else None)


def read_without_landmarks(given: dict[str, Any]) -> Tensor:
    from landmark.models.huggingface import wrap
    from tests.models.huggingface.conftest import make_model, make_tokenizer

    torch.manual_seed(0)
    model = wrap(make_model("llama"), make_tokenizer(), 4, {"k": 4, "window": 8, "dense": 0, **given}, landmarks="none")
    ids = torch.randint(3, 200, (1, 600), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=model.new_memory()).logits


@pytest.mark.parametrize(
    ("read", "usual"), [(read_with_landmarks, MemorySettings()), (read_without_landmarks, BlockCacheSettings())]
)
def test_no_option_is_ignored_beside_another(read: Callable[[dict[str, Any]], Tensor], usual: Settings):
    chosen = [
        (name, value) for name, values in OPTIONS.items() for value in values if value != getattr(usual, name, None)
    ]
    found: dict[tuple[Any, ...], Tensor | None] = {}
    for pair in [(), *itertools.combinations(chosen, 1), *itertools.combinations(chosen, 2)]:
        if len({name for name, _ in pair}) == len(pair):
            try:
                found[pair] = read(dict(pair))
            except UserError:
                found[pair] = None
    ignored = []
    for pair, result in found.items():
        for name, value in pair if result is not None else ():
            others = tuple(each for each in pair if each[0] != name)
            alone = found[others]
            harmless = HARMLESS.get((name, value), HARMLESS.get(name))
            is_harmless = harmless is not None and (not harmless or not {*harmless}.isdisjoint(others))
            if alone is not None and torch.equal(result, alone) and not is_harmless:
                ignored.append((name, value, *others))
    assert len(found) > 60
    assert ignored == []
