"""Makes the golden vectors of this folder, in the form of those of the authors' code: `python -m tests.golden.make`.

They are computed from the paper's equations with NumPy in float64, query by query, by no code of the package. Weights
and tokens are random. Covered, where the authors' vectors are not: windows that begin on a landmark, landmarks of which
the context miss token controls some, memories of fewer blocks than are retrieved, and the ties of the first layer.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
FOLDER = Path(__file__).parent
SIZES = {"block_size": 4, "n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 24, "landmark_id": 22}
BLOCK, HEADS, LANDMARK = SIZES["block_size"], SIZES["n_head"], SIZES["landmark_id"]
WIDTH, DIM = BLOCK + 1, SIZES["n_embd"] // HEADS
BASE, EPSILON = 10000, 1e-5


def reading(local: int, k: int, blocks: int | None, granularity: str = "per_token_and_head", **cutoff: float) -> dict:
    return {"local": local, "blocks": blocks, "k": k, "granularity": granularity, **cutoff}


WINDOW = reading(0, 1, None)  # read at once: nothing is retrieved
SETTINGS = SIZES | {
    "rope_base": BASE,
    "tolerance": 1e-10,
    "memory_settings": {
        "k2": reading(12, 2, 3),
        "k2_all": reading(9, 2, None),
        "k2_heads": reading(12, 2, None, "per_token"),
        "k3_tokens": reading(10, 3, 5, "per_head"),
        "k1_unaligned": reading(7, 1, None),
    },
    "layer_settings": {
        "k2": reading(12, 2, None),
        "k2_newest5": reading(7, 2, 5),
        "k2_heads": reading(12, 2, None, "per_token"),
        "k2_tokens": reading(9, 2, None, "per_head"),
        "cmt_k2_cut00": reading(12, 2, None, cutoff=0.0),
        "cmt_k2_heads_cut01": reading(9, 2, 6, "per_token", cutoff=0.1),
    },
    "cmt_settings": {f"c{c}": reading(12, 2, None, cutoff=c) for c in (0.0, 0.2, 1.0)},
    "xl_settings": {"w16_c16": {"window": 16, "cache": 16}, "w12_c5": {"window": 12, "cache": 5}},
}


# ---- one query


def softmax(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def rotated(x: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """Vectors (…, d) at positions (…): each adjacent pair is a complex number that turns."""
    turn = np.multiply.outer(positions, BASE ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1]))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * turn)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


class Query:
    """The outer softmax of a query: local tokens, gates of free blocks, a context miss token, which controls others."""

    def __init__(self, q: np.ndarray):
        self.q = q / math.sqrt(len(q))
        self.scores, self.values, self.free, self.controlled = [], [], [], []
        self.extra: float | None = None

    def see(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.scores += [*(keys @ self.q)]
        self.values += [*values]

    def block(self, keys: np.ndarray, values: np.ndarray, controlled: bool = False) -> None:
        """A block, its landmark last: its value is the mean of its tokens' by a softmax of their own."""
        scores = keys @ self.q
        where = self.controlled if controlled else self.free
        where.append((scores[-1], softmax(scores[:-1]) @ values[:-1]))

    def weights(self) -> np.ndarray:
        extra = [] if self.extra is None else [self.extra]
        outer = [*self.scores, *(gate for gate, _ in self.free), *extra]
        return softmax(outer) if outer else np.zeros(0)

    def output(self) -> np.ndarray:
        weights = self.weights()
        found = sum((w * v for w, v in zip(weights, [*self.values, *(v for _, v in self.free)])), np.zeros_like(self.q))
        if self.controlled:
            shares = weights[-1] * softmax([gate for gate, _ in self.controlled])
            found = found + sum(share * value for share, (_, value) in zip(shares, self.controlled))
        return found


# ---- attention of a layer, (H, T, d): q, k, v (H, T, d), not rotated; cmt: (H, d), key of the context miss token


def continued(texts: dict, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """All keys and values of a layer with those of a chunk, which are kept, and where the chunk begins."""
    before = texts.get(layer, (k[:, :0], v[:, :0]))
    texts[layer] = np.concatenate([before[0], k], 1), np.concatenate([before[1], v], 1)
    return *texts[layer], before[0].shape[1]


class Reader:
    """Attention of a text that is read chunk by chunk: retrieval, and stingy positions. A window is a single chunk.

    phase: tokens missing from its first block. controlled: (blocks,) bool, which of its landmarks are.
    """

    def __init__(self, setting: dict, tied_layers=(0,), phase: int = 0, controlled: np.ndarray | None = None):
        self.k, self.most, self.granularity = setting["k"], setting["blocks"], setting["granularity"]
        self.cutoff, self.tied_layers = setting.get("cutoff", 0.0), tied_layers
        self.phase, self.controlled = phase, controlled
        self.texts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of each layer, all keys and values so far

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, cmt: np.ndarray | None) -> np.ndarray:
        k, v, start = continued(self.texts, layer, k, v)
        fed = start // WIDTH  # blocks that are complete before the chunk
        first, slots = fed * WIDTH, min(fed, self.k + 1)
        kept = [*range(max(0, fed - (self.most or fed)), fed)]
        places = np.arange(first, k.shape[1])  # of pending tokens and the chunk
        block, is_landmark = (self.phase + places) // WIDTH, (self.phase + places) % WIDTH == BLOCK
        shift = (slots - fed) * WIDTH  # from places to positions
        q, near = rotated(q, shift + places[start - first :]), rotated(k[:, first:], shift + places)
        chosen, out = self._choose(q, k, fed, slots, kept, layer in self.tied_layers), np.zeros_like(q)
        for h, i in np.ndindex(q.shape[:2]):
            query, last, values = Query(q[h, i]), start - first + i, v[h, first:]
            own = (block == block[last]) & ~is_landmark & (places <= places[last])
            query.see(near[h, own], values[own])
            for b in range(fed, block[last]):
                if (tokens := block == b).sum() > 1:  # a landmark at the window's start has no tokens
                    query.block(near[h, tokens], values[tokens], self.controlled is not None and self.controlled[b])
            if cmt is not None:
                query.extra = rotated(cmt[h], -1) @ query.q
            if cmt is None or query.weights()[-1] >= self.cutoff:
                for r, b in enumerate(chosen[h][i]):
                    slot = r if fed - b > self.k else r + slots - len(chosen[h][i])
                    stored = slice(b * WIDTH, (b + 1) * WIDTH)
                    query.block(rotated(k[h, stored], slot * WIDTH + np.arange(WIDTH)), v[h, stored], cmt is not None)
            out[h, i] = query.output()
        return out

    def _choose(self, q, k, fed: int, slots: int, kept: list[int], tied: bool) -> list[list[list[int]]]:
        """The blocks that each query of each head reads, oldest first."""
        heads, queries, _ = q.shape
        likely = np.zeros((heads, queries, len(kept)))
        for h, i in np.ndindex(heads, queries) if kept else ():
            scores = []
            for b in kept:
                is_old = fed - b > self.k
                slot = 0 if is_old else slots - (fed - b)
                place = (fed - self.k - 1 if is_old and tied else b) * WIDTH + BLOCK
                scores.append(rotated(k[h, place], slot * WIDTH + BLOCK) @ q[h, i] / math.sqrt(DIM))
            likely[h, i] = softmax(scores)
        if self.granularity != "per_token_and_head" and kept:
            together = 1 if self.granularity == "per_head" else 0
            likely = np.broadcast_to(likely.max(together, keepdims=True), likely.shape)
        best = [[sorted(zip(row, kept), reverse=True)[: self.k] for row in rows] for rows in likely]
        return [[sorted(b for _, b in pairs) for pairs in rows] for rows in best]


class Recurrent:
    """Transformer-XL: a query sees the tokens before it in its window, and `cache` keys before the window."""

    def __init__(self, cache: int):
        self.cache, self.texts = cache, {}

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, cmt: None) -> np.ndarray:
        k, v, start = continued(self.texts, layer, k, v)
        places, out = np.arange(k.shape[1]), np.zeros_like(q)
        q, keys = rotated(q, places[start:]), rotated(k, places)
        for h, i in np.ndindex(q.shape[:2]):
            seen, query = slice(max(0, start - self.cache), start + i + 1), Query(q[h, i])
            query.see(keys[h, seen], v[h, seen])
            out[h, i] = query.output()
        return out


# ---- the decoder, of one sample


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def heads_of(x: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    """Queries, keys and values (H, T, d) of inputs (T, width)."""
    return [each.reshape(len(x), HEADS, -1).transpose(1, 0, 2) for each in np.split(x @ weight.T, 3, -1)]


def joined(x: np.ndarray) -> np.ndarray:
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def logits_of(weights: Arrays, ids: np.ndarray, attends: Sequence[Callable[..., np.ndarray]]) -> np.ndarray:
    """Logits (T, vocabulary) of ids (T,), landmarks included. attends: attention of each layer."""
    w = {name.removeprefix("transformer."): x for name, x in weights.items()}
    x, cmt = w["wte.weight"][ids], w.get("rem_token_embedding.weight")
    for layer, attend in enumerate(attends):
        h = {name.removeprefix(f"h.{layer}."): each for name, each in w.items()}

        def forward(x: np.ndarray, h: Arrays = h) -> np.ndarray:
            return x + gelu(norm(x, h["ln_2.weight"]) @ h["mlp.c_fc.weight"].T) @ h["mlp.c_proj.weight"].T

        q, k, v = heads_of(norm(x, h["ln_1.weight"]), h["attn.c_attn.weight"])
        key = None
        if cmt is not None:  # it attends to nothing
            key = heads_of(norm(cmt, h["ln_1.weight"]), h["attn.c_attn.weight"])[1][:, 0]
            cmt = forward(cmt)
        x = forward(x + joined(attend(layer, q, k, v, key)) @ h["attn.c_proj.weight"].T)
    return norm(x, w["ln_f.weight"]) @ w["wte.weight"].T


def losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """In nats, (T,), of targets (T,)."""
    largest = logits.max(-1)
    return largest + np.log(np.exp(logits.T - largest).sum(0)) - logits[np.arange(len(logits)), targets]


def predictions(name: str, logits: Sequence[np.ndarray], ids: np.ndarray) -> Arrays:
    nll = [losses(each[:-1], own[1:]) for each, own in zip(logits, ids)]
    return {f"{name}nll": np.stack(nll), f"{name}logits_last8": np.stack([each[-8:] for each in logits])}


def read(weights: Arrays, raw: np.ndarray, setting: dict) -> np.ndarray:
    """Logits (T, vocabulary) of raw ids (T,), read `local` at a time with a memory."""
    reader, found = Reader(setting), []
    for start in range(0, len(raw), setting["local"]):
        ids: list[int] = []
        for place, token in enumerate(raw[start : start + setting["local"]], start + 1):
            ids += [int(token), *([LANDMARK] if place % BLOCK == 0 else [])]
        logits = logits_of(weights, np.array(ids), [reader] * SIZES["n_layer"])
        found.append(logits[np.array(ids) != LANDMARK])
    return np.concatenate(found)


# ---- the vectors


def draw(seed: int = 0) -> Arrays:
    """Weights by the authors' names, which float16 holds exactly, and the token ids and inputs that are read."""
    random, width, layers = np.random.default_rng(seed), SIZES["n_embd"], range(SIZES["n_layer"])
    shapes = {"wte": (SIZES["vocab_size"], width), "ln_f": (width,)}
    of_layer = {"ln_1": (width,), "ln_2": (width,), "attn.c_attn": (3 * width, width), "attn.c_proj": (width, width)}
    of_layer |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
    shapes |= {f"h.{n}.{name}": shape for n in layers for name, shape in of_layer.items()}
    drawn = {
        f"transformer.{name}.weight": random.normal(float("ln" in name), 0.4, shape) for name, shape in shapes.items()
    }
    drawn["rem_token_embedding.weight"] = random.normal(0, 0.4, (1, width))
    return {name: x.astype(np.float16) for name, x in drawn.items()}


def window_of(random: np.random.Generator, phase: int) -> np.ndarray:
    """Ids (2, 23) with landmarks, of which the last block is incomplete."""
    ids = random.integers(0, LANDMARK - 1, (2, 23))
    ids[:, (phase + np.arange(23)) % WIDTH == BLOCK] = LANDMARK
    return ids


def windows(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Windows with each phase, their losses and gradients."""
    found = {}
    for phase in (0, 3, BLOCK):
        ids = window_of(random, phase)
        after = np.where(np.roll(ids, -1, 1) == LANDMARK, np.roll(ids, -2, 1), np.roll(ids, -1, 1))
        after[:, -1], after[ids == LANDMARK] = -1, -1  # no loss: the target is not in the window, or the input no token

        def read_window(given: Arrays, ids=ids, phase=phase) -> list[np.ndarray]:
            return [logits_of(given, own, [Reader(WINDOW, phase=phase)] * SIZES["n_layer"]) for own in ids]

        def loss(given: Arrays, targets=after, read_window=read_window) -> float:
            each = [losses(x, own) for x, own in zip(read_window(given), targets)]
            return float(np.stack(each)[targets >= 0].mean())

        of_phase = {"tokens": ids, "targets": after, "loss": np.array(loss(weights))}
        for name in ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"):
            of_phase[f"grad_{name}"] = by_differences(loss, weights, name)
        of_phase |= predictions("", read_window(weights), ids)
        found |= {f"train_phase{phase}_{name}": x for name, x in of_phase.items()}
    return found


def windows_with_cmt(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Windows of which the context miss token controls no landmark, some, drawn for each layer, or all."""
    ids, some = window_of(random, 0), random.random((2, SIZES["n_layer"], 23 // BLOCK + 1)) < 0.5
    found = {"train_tokens": ids, "train_some_controlled_mask": some}
    for name, mask in {"none": some & False, "some": some, "all": some | True}.items():
        attends = [[Reader(WINDOW, controlled=of_layer) for of_layer in of_sample] for of_sample in mask]
        logits = [logits_of(weights, own, attend) for own, attend in zip(ids, attends)]
        found |= predictions(f"train_{name}_controlled_", logits, ids)
    return found


def by_differences(loss: Callable[[Arrays], float], weights: Arrays, name: str, step: float = 1e-5) -> np.ndarray:
    """The gradient of a loss with respect to a vector of weights, by central differences."""
    turns = step * np.eye(len(weights[name]))
    ends = [[loss(weights | {name: weights[name] + sign * turn}) for sign in (1, -1)] for turn in turns]
    return np.array([(up - down) / (2 * step) for up, down in ends])


def layer(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Attention of one layer, of inputs at every position, so that no two landmarks are alike."""
    x, cmt = random.normal(0, 1, (1, 57, SIZES["n_embd"])), random.normal(0, 1, (1, SIZES["n_embd"]))
    project, out = (weights[f"transformer.h.1.attn.{name}.weight"] for name in ("c_attn", "c_proj"))
    found = {"x": x, "cmt_x": cmt, "c_attn": project, "c_proj": out}
    for name, setting in SETTINGS["layer_settings"].items():
        reader, parts, start, local = Reader(setting, tied_layers=()), [], 0, setting["local"]
        key = heads_of(cmt, project)[1][:, 0] if "cutoff" in setting else None
        while start < x.shape[1]:
            read_so_far = start - start // WIDTH + local
            stop = read_so_far + read_so_far // BLOCK
            q, k, v = heads_of(x[0, start:stop], project)
            parts.append(joined(reader(0, q, k, v, key)) @ out.T)
            start = stop
        found[name] = np.concatenate(parts)[None]
    return found


def make() -> dict[str, Arrays]:
    """All files by their names. Weights are float16, all else is float64 or integers."""
    stored, random, layers = draw(), np.random.default_rng(1), SIZES["n_layer"]
    cmt = {name: x.astype(np.float64) for name, x in stored.items()}
    weights = {name: x for name, x in cmt.items() if not name.startswith("rem_token")}
    raw = random.integers(0, LANDMARK - 1, (2, 46))
    of_landmark = {"tokens": raw} | windows(weights, random)
    for name, setting in SETTINGS["memory_settings"].items():
        of_landmark |= predictions(f"memory_{name}_", [read(weights, own, setting) for own in raw], raw)
    of_cmt = {"tokens": raw} | windows_with_cmt(cmt, random)
    for name, setting in SETTINGS["cmt_settings"].items():
        of_cmt |= predictions(f"memory_{name}_", [read(cmt, own, setting) for own in raw], raw)
    of_plain, recurrences = {"tokens": raw}, {"plain": {"window": raw.shape[1], "cache": 0}}
    recurrences |= {f"xl_{name}": setting for name, setting in SETTINGS["xl_settings"].items()}
    for name, setting in recurrences.items():
        logits = []
        for own in raw:
            attends, cuts = [Recurrent(setting["cache"])] * layers, range(0, len(own), setting["window"])
            parts = [logits_of(weights, own[cut : cut + setting["window"]], attends) for cut in cuts]
            logits.append(np.concatenate(parts))
        of_plain |= predictions(f"{name}_", logits, raw)
    bare = {name: x for name, x in stored.items() if name in weights}
    found = {"landmark_weights": bare, "transformer_weights": bare, "cmt_weights": stored}
    found |= {"landmark_expected": of_landmark, "cmt_expected": of_cmt, "transformer_expected": of_plain}
    return found | {"layer_expected": layer(weights, random)}


if __name__ == "__main__":
    (FOLDER / "settings.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    for name, arrays in make().items():
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
