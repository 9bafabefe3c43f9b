"""What choosing costs each rule of `equal_keys` in one layer, beside mean keys.

    python -m benchmarks.equal_keys_costs MODEL --tokens 16384

`bytes`: what a rule keeps of a block for one head of keys, and reads to choose. `token`: seconds to choose blocks for a
token; `chunk`: for 512 tokens; `summaries`: to make what is kept of 512 tokens. `times` are multiples of the seconds of
mean keys. Rules take turns, and of each the fastest round counts. In plain PyTorch, with random keys.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.equal_keys import RULES, label, open_model
from benchmarks.settings import use_threads
from benchmarks.timing import interleave
from landmark.memory.blocks.attention import highest
from landmark.memory.blocks.scorer import BlockScorer, scorer_of
from landmark.models.huggingface.families import head_dim, text_config
from landmark.utils.files import write_atomic
from landmark.utils.source_tree import EXPERIMENTS

CHUNK, CHOSEN = 512, 8
LAYERS = {"token": 24, "chunk": 1, "summaries": 1}  # a token's in turn, so that each reads summaries anew


def _choose(scorer: BlockScorer, queries: Tensor, *layers: Tensor) -> None:
    for summaries in layers:
        shares = scorer.score(queries, summaries, None).flatten(2, 3).softmax(-1).amax(2)
        highest(shares, None, CHOSEN)


def works(scorer: BlockScorer, keys: Tensor, group: int) -> dict[str, Callable[[], Any]]:
    """What is timed. keys: (C, n, ℓ, d), of all blocks. group: heads that share keys."""
    summaries, (caches, _, size, dim) = scorer.summarise(keys, keys, 0), keys.shape
    queries, new = torch.randn(caches, CHUNK, group, 1, dim), keys[:, : CHUNK // size]
    return {
        "token": partial(_choose, scorer, queries[:, :1], *(summaries.clone() for _ in range(LAYERS["token"]))),
        "chunk": partial(_choose, scorer, queries, summaries),
        "summaries": partial(scorer.summarise, new, new, 0),
    }


@torch.inference_mode()
def costs(scorers: Mapping[str, BlockScorer], keys: Tensor, group: int, rounds: int = 15) -> Any:
    """A line a rule. scorers: of one layer, mean keys first."""
    kept = {rule: scorer.summarise(keys[:1, :1], keys[:1, :1], 0) for rule, scorer in scorers.items()}
    lines = {rule: {"bytes": float(x.nbytes)} for rule, x in kept.items()}
    timed = {rule: works(scorer, keys, group) for rule, scorer in scorers.items()}
    for name, layers in LAYERS.items():
        found = interleave({rule: own[name] for rule, own in timed.items()}, rounds=rounds)
        base = min(next(iter(found.values())))
        for rule, each in found.items():
            lines[rule] |= {name: min(each) / layers, f"{name}_times": min(each) / base}
    return pd.DataFrame(lines).T.astype({"bytes": int})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_keys_costs", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--tokens", type=int, default=16384, help="before the token that chooses")
    parser.add_argument("--landmarks", type=Path, help="file of learned landmarks, one rule more")
    parser.add_argument("--out", type=Path, default=EXPERIMENTS / "equal_keys" / "results", help="folder of the CSV")
    given = parser.parse_args()
    use_threads()
    model, _ = open_model(given.model, given.landmarks)
    config, size, last = text_config(model), model.landmarks.block_size, len(model.model.layers) - 1
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    keys = torch.randn(heads, given.tokens // size, size, head_dim(config)).to(model.dtype)
    learned = {"landmarks": model.landmarks.memory.scorer} if given.landmarks else {}
    scorers = {rule: scorer_of(said).in_layer(last) for rule, said in (RULES | learned).items() if said != "landmarks"}
    text = costs(scorers, keys, config.num_attention_heads // heads).to_csv(float_format="%.3g", index_label="rule")
    write_atomic(given.out / f"{label(given)}-costs.csv", text.encode())
    print(text)


if __name__ == "__main__":
    main()
