"""How far from attention to all keys what chosen blocks give is, in each layer: for the texts of `equal_keys`.

    python -m benchmarks.equal_keys_why MODEL --data ../shared/data/pg19-mini/test --work DIR

Every layer reads all keys. Beside that, each rule chooses blocks for every eighth of the last tokens. Measured is how
much of the attention these and the window hold, and how far the output is from that of all keys, divided by its size:
with one softmax over what is read, and without one, so that unread keys count as zeros. `distance` chooses by the exact
share times how far the block's value is from the output. `all attention` is the exact share of all keys, not of far
ones alone, which counts where heads choose together. One CSV has a line for each layer, rule and who chooses.
Another, `-predictions`, has the divergence of each rule's predictions from those with all keys, in nats a token.
"""

from itertools import islice
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.equal_keys import ALL, HEADS, Reading, Row, label, new_parser, open_model, texts
from benchmarks.settings import use_threads
from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import scorer_of
from landmark.memory.blocks.shares import InPlace
from landmark.utils.files import write_atomic

RULES = ("mean_key", "quest", "exact", "recent")
STEP = 8


class Compared(InPlace):
    """A cache of blocks that reads all keys, and sees what k blocks would give."""

    def __init__(self, memory: Any, k: int):
        super().__init__(memory)
        self.k, self.found = k, list[dict[str, Any]]()

    def attend_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Any, sinks: Any = None) -> Tensor:
        out = self.memory.attend_in(layer, q, k, v, scoring, sinks)
        state, start, kv = self.memory.layers[layer], self.memory.position, k.shape[1]
        queries = q[0].unflatten(0, (kv, -1)).float() * scoring.scale_of(q.shape[3])
        for at in range(STEP - 1, q.shape[2], STEP):
            end = start + at + 1
            self._compare(layer, queries[:, :, at], state.keys[:, :end].float(), state.values[:, :end].float(), scoring)
        return out

    def _compare(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scoring: Any) -> None:
        """Of one query of each head (C, G, d), keys and values (C, n, d)."""
        size = self.memory.block_size
        far = ((keys.shape[1] - 1) // size * size - self.memory.window) // size
        weights = capped(q @ keys.mT, scoring.softcap).softmax(-1)  # (C, G, n)
        near, blocks = weights[..., far * size :], weights[..., : far * size].unflatten(-1, (far, size))
        shares = blocks.sum(-1)
        parts = torch.einsum("cgfs,cfsd->cgfd", blocks, values[:, : far * size].unflatten(1, (far, size)))
        local = near @ values[:, far * size :]
        whole = parts.sum(2) + local
        away = (parts / shares[..., None].clamp(min=1e-30) - whole[:, :, None]).norm(dim=-1)
        cut = keys[:, : far * size].unflatten(1, (far, size))
        ranked = {"distance": shares * away}
        for rule in RULES:
            scorer = scorer_of(rule)
            scores = scorer.score(q[:, :, None], scorer.summarise(cut, cut, 0), scoring.softcap)[:, :, 0]
            ranked[rule] = scores.softmax(-1)
        ranked["all attention"] = shares
        for rule, each in ranked.items():
            together = {"head": each, "group": each.amax(1, keepdim=True), "group, summed": each.sum(1, keepdim=True)}
            for heads, best in together.items():
                best = best.expand_as(each).clone()
                best[..., : self.memory.first] = torch.inf
                chosen = best.topk(self.k, -1).indices
                mass = shares.gather(-1, chosen).sum(-1) + near.sum(-1)
                read = parts.gather(2, chosen[..., None].expand(-1, -1, -1, parts.shape[-1])).sum(2) + local
                errors = [(x - whole).norm() / whole.norm() for x in (read / mass[..., None], read)]
                line = {"layer": layer, "rule": rule, "heads": heads, "attention": mass.mean().item()}
                self.found.append(line | dict(zip(("error", "error_of_zeros"), map(float, errors), strict=True)))


def divergences(reading: Reading, name: str, ids: Tensor, blocks: int) -> list[dict[str, Any]]:
    """Of the last tokens: a line a rule and who chooses."""
    rows = [Row(ALL), *(Row(rule, heads, blocks) for heads in HEADS for rule in ("mean key", "exact share"))]
    every, lines, following = torch.empty(0), list[dict[str, Any]](), ids[0, 1 + reading.tokens - reading.last :]
    for row in [*rows, Row("last blocks", "group", blocks)]:
        memory = reading.memory(**row.settings)
        memory.load(reading.saved(name, ids))
        read = reading.model.read_text(ids[:, reading.tokens - reading.last : -1], memory, kept=reading.last)
        logs = torch.cat([logits[0] for _, logits in read]).float().log_softmax(-1)
        every = logs if row.rule == ALL else every
        away = (every.exp() * (every - logs)).sum(-1)
        nats = -logs.gather(1, following[:, None]).mean().item()
        lines.append({"text": name, "rule": row.rule, "heads": row.heads, "nats": nats})
        lines[-1] |= {"divergence": away.mean().item(), "median": away.median().item()}
        print(*lines[-1].values(), flush=True)
    return lines


def main() -> None:
    parser = new_parser("equal_keys_why", __doc__)
    parser.add_argument("--few", type=int, default=2, help="of these texts, the first")
    parser.add_argument("--blocks", type=int, default=8)
    given = parser.parse_args()
    use_threads()
    stem, found, predicted = label(given), list[dict[str, Any]](), list[dict[str, Any]]()
    model, tokenizer = open_model(given.model, given.landmarks)
    work = given.work / stem
    reading = Reading(model, given.tokens, given.last, work)
    for name, ids in islice(texts(given.data, tokenizer, given.tokens, given.texts), given.few):
        memory = reading.memory(**Row("all keys").settings)
        memory.load(reading.saved(name, ids))
        memory.memory = compared = Compared(memory.memory, given.blocks)
        for _ in model.read_text(ids[:, given.tokens - given.last : -1], memory, kept=1):
            pass
        found += compared.found
        predicted += divergences(reading, name, ids, given.blocks)
        frame: Any = pd.DataFrame(found)
        made = frame.groupby(["layer", "rule", "heads"], sort=False).mean().reset_index()
        for about, each in (("layers", made), ("predictions", pd.DataFrame(predicted))):
            text = each.to_csv(index=False, float_format="%.5f")
            write_atomic(given.out / f"{stem}-{about}.csv", text.encode())
        print(made.groupby(["rule", "heads"], sort=False)[["attention", "error", "error_of_zeros"]].mean())


if __name__ == "__main__":
    main()
