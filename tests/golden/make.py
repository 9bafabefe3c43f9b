"""Makes the golden vectors of this folder, in the form of those of the authors' code: `python -m tests.golden.make`.

They are computed in float64 from the paper's equations, query by query (tests/oracle.py), by no code of the package;
a second program of other formulas gave the same. Weights and tokens are random. Covered, where the authors' vectors are
not: windows that begin on a landmark, landmarks of which the context miss token controls some, memories of fewer blocks
than are retrieved, and the ties of the first layer.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tests import oracle

Arrays = dict[str, np.ndarray]
FOLDER = Path(__file__).parent
SIZES = {"block_size": 4, "n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 24, "landmark_id": 22}
BLOCK, HEADS, LANDMARK, LAYERS, VECTOR = (
    SIZES[key] for key in ("block_size", "n_head", "landmark_id", "n_layer", "n_embd")
)
LENGTH = 23  # of windows, whose last block is incomplete


def reading(local: int, k: int, blocks: int | None, granularity: str = "per_token_and_head", **cutoff: float) -> dict:
    return {"local": local, "blocks": blocks, "k": k, "granularity": granularity, **cutoff}


SETTINGS = (
    SIZES
    | {"rope_base": 10000, "tolerance": 1e-10}
    | {
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
)


# ---- attention of a layer, (H, T, d): q, k, v (H, T, d), not rotated; cmt: (H, d), key of the context miss token


def in_window(phase, controlled, layer, q, k, v, cmt):
    """Of a window whose first block lacks `phase` tokens. controlled: (layers, blocks) bool."""
    out = np.zeros_like(q)
    for h, (queries, keys) in enumerate(zip(*(map(turned, x) for x in (q, k)))):
        given = {}
        if cmt is not None:
            extra = oracle.rotate(cmt[h], -1)
            given = {"extra": [oracle.SCORE(each, extra) for each in queries]}
            given["controlled"] = set(controlled[layer].nonzero()[0].tolist())
        out[h], _ = oracle.window(queries, keys, v[h], BLOCK, phase, **given)
    return out


def in_chunks(setting, chunks, tied, layer, q, k, v, cmt):
    """Of a text that is read in chunks with a memory. tied: whether landmarks of the first layer are one vector."""
    choice = oracle.Selector(setting["k"], setting["granularity"])
    given = {"max_blocks": setting["blocks"], "tied": tied and layer == 0, "cmt": cmt}
    return oracle.Memory(BLOCK, choice, **given, cutoff=setting.get("cutoff", 0.0)).read(q, k, v, chunks)


def recurrent(window, cache, layer, q, k, v, cmt):
    """Transformer-XL: a query sees the tokens before it in its window, and `cache` keys before the window."""
    out = np.zeros_like(q)
    for h, i in np.ndindex(q.shape[:2]):
        seen, query = range(max(0, i // window * window - cache), i + 1), oracle.rotate(q[h, i], i)
        out[h, i] = oracle.mean_of([(oracle.SCORE(query, oracle.rotate(k[h, j], j)), v[h, j]) for j in seen])
    return out


def turned(x: np.ndarray) -> np.ndarray:
    return np.stack([oracle.rotate(each, place) for place, each in enumerate(x)])


def chunks_of(length: int, local: int) -> list[int]:
    """Of a text of so many raw tokens, read `local` at a time: tokens with the landmarks behind complete blocks."""
    ends = [end + end // BLOCK for end in (*range(0, length, local), length)]
    return np.diff(ends).tolist()


# ---- the decoder, of one sample


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def heads_of(x: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    """Queries, keys and values (H, T, d) of inputs (T, width)."""
    return [each.reshape(len(x), HEADS, -1).transpose(1, 0, 2) for each in np.split(x @ weight.T, 3, -1)]


def joined(x: np.ndarray) -> np.ndarray:
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def logits_of(weights: Arrays, ids: np.ndarray, attend: Callable[..., np.ndarray]) -> np.ndarray:
    """Logits (T, vocabulary) of ids (T,), landmarks included."""
    w = {name.removeprefix("transformer."): x for name, x in weights.items()}
    x, cmt = w["wte.weight"][ids], w.get("rem_token_embedding.weight")
    for layer in range(LAYERS):
        norm_1, project, out, norm_2, up, down = (
            w[f"h.{layer}.{name}.weight"]
            for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        )
        key = None if cmt is None else heads_of(norm(cmt, norm_1), project)[1][:, 0]
        x = x + joined(attend(layer, *heads_of(norm(x, norm_1), project), key)) @ out.T
        x = x + gelu(norm(x, norm_2) @ up.T) @ down.T
        cmt = None if cmt is None else cmt + gelu(norm(cmt, norm_2) @ up.T) @ down.T  # it attends to nothing
    return norm(x, w["ln_f.weight"]) @ w["wte.weight"].T


def losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """In nats, (T,), of targets (T,)."""
    return np.array([oracle.logsumexp(row) - row[target] for row, target in zip(logits, targets)])


def predictions(name: str, logits: Sequence[np.ndarray], ids: np.ndarray) -> Arrays:
    nll = [losses(each[:-1], own[1:]) for each, own in zip(logits, ids)]
    return {f"{name}nll": np.stack(nll), f"{name}logits_last8": np.stack([each[-8:] for each in logits])}


# ---- the vectors


def draw() -> Arrays:
    """Weights by the authors' names, which float16 holds exactly."""
    random, width = np.random.default_rng(0), VECTOR
    shapes = {"wte": (SIZES["vocab_size"], width), "ln_f": (width,)}
    of_layer = {"ln_1": (width,), "ln_2": (width,), "attn.c_attn": (3 * width, width), "attn.c_proj": (width, width)}
    of_layer |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
    shapes |= {f"h.{n}.{name}": shape for n in range(LAYERS) for name, shape in of_layer.items()}
    shapes = {f"transformer.{name}.weight": shape for name, shape in shapes.items()}
    shapes["rem_token_embedding.weight"] = (1, width)
    return {name: random.normal(float("ln" in name), 0.4, s).astype(np.float16) for name, s in shapes.items()}


def with_landmarks(random: np.random.Generator, phase: int) -> np.ndarray:
    ids = random.integers(0, LANDMARK - 1, (2, LENGTH))
    ids[:, (phase + np.arange(LENGTH)) % (BLOCK + 1) == BLOCK] = LANDMARK
    return ids


def windows(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Windows with each phase, their losses and gradients."""
    found = {}
    for phase in (0, 3, BLOCK):
        ids, attend = with_landmarks(random, phase), partial(in_window, phase, None)
        after = np.where(np.roll(ids, -1, 1) == LANDMARK, np.roll(ids, -2, 1), np.roll(ids, -1, 1))
        after[:, -1], after[ids == LANDMARK] = -1, -1  # no loss: the target is not in the window, or the input no token

        def loss(given: Arrays, ids=ids, targets=after, attend=attend) -> float:
            each = [losses(logits_of(given, own, attend), own_targets) for own, own_targets in zip(ids, targets)]
            return float(np.stack(each)[targets >= 0].mean())

        of_phase = {"tokens": ids, "targets": after, "loss": np.array(loss(weights))}
        for name in ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"):
            of_phase[f"grad_{name}"] = by_differences(loss, weights, name)
        of_phase |= predictions("", [logits_of(weights, own, attend) for own in ids], ids)
        found |= {f"train_phase{phase}_{name}": x for name, x in of_phase.items()}
    return found


def by_differences(loss: Callable[[Arrays], float], weights: Arrays, name: str, step: float = 1e-5) -> np.ndarray:
    """The gradient of a loss with respect to a vector of weights, by central differences."""
    turns = step * np.eye(len(weights[name]))
    ends = [[loss(weights | {name: weights[name] + sign * turn}) for sign in (1, -1)] for turn in turns]
    return np.array([(up - down) / (2 * step) for up, down in ends])


def windows_with_cmt(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Windows of which the context miss token controls no landmark, some, drawn for each layer, or all."""
    ids, some = with_landmarks(random, 0), random.random((2, LAYERS, LENGTH // BLOCK + 1)) < 0.5
    found = {"train_tokens": ids, "train_some_controlled_mask": some}
    for name, mask in {"none": some & False, "some": some, "all": some | True}.items():
        logits = [logits_of(weights, own, partial(in_window, 0, each)) for own, each in zip(ids, mask)]
        found |= predictions(f"train_{name}_controlled_", logits, ids)
    return found


def memories(weights: Arrays, raw: np.ndarray, settings: dict[str, dict]) -> Arrays:
    found, ids = {}, []
    for own in raw:
        ids.append(np.array([x for n, token in enumerate(own, 1) for x in (token, LANDMARK)[: 1 + (n % BLOCK == 0)]]))
    for name, setting in settings.items():
        attend = partial(in_chunks, setting, chunks_of(raw.shape[1], setting["local"]), True)
        logits = [logits_of(weights, own, attend)[own != LANDMARK] for own in ids]
        found |= predictions(f"memory_{name}_", logits, raw)
    return found


def layer(weights: Arrays, random: np.random.Generator) -> Arrays:
    """Attention of one layer, of inputs at every position, so that no two landmarks are alike."""
    x, cmt = random.normal(0, 1, (1, 57, VECTOR)), random.normal(0, 1, (1, VECTOR))
    project, out = (weights[f"transformer.h.1.attn.{name}.weight"] for name in ("c_attn", "c_proj"))
    found, raw = {"x": x, "cmt_x": cmt, "c_attn": project, "c_proj": out}, 57 - 57 // (BLOCK + 1)
    for name, setting in SETTINGS["layer_settings"].items():
        key = heads_of(cmt, project)[1][:, 0] if "cutoff" in setting else None
        chunks = chunks_of(raw, setting["local"])
        found[name] = (joined(in_chunks(setting, chunks, False, 0, *heads_of(x[0], project), key)) @ out.T)[None]
    return found


def make() -> dict[str, Arrays]:
    """All files by their names. Weights are float16, all else is float64 or integers."""
    stored, random = draw(), np.random.default_rng(1)
    cmt = {name: x.astype(np.float64) for name, x in stored.items()}
    weights = {name: x for name, x in cmt.items() if not name.startswith("rem_token")}
    raw = random.integers(0, LANDMARK - 1, (2, 46))
    tokens, bare = {"tokens": raw}, {name: x for name, x in stored.items() if name in weights}
    found = {"landmark_weights": bare, "transformer_weights": bare, "cmt_weights": stored}
    found["landmark_expected"] = tokens | windows(weights, random) | memories(weights, raw, SETTINGS["memory_settings"])
    found["cmt_expected"] = tokens | windows_with_cmt(cmt, random) | memories(cmt, raw, SETTINGS["cmt_settings"])
    found["transformer_expected"] = {**tokens}
    ways = {"plain": (raw.shape[1], 0)} | {f"xl_{name}": (*x.values(),) for name, x in SETTINGS["xl_settings"].items()}
    for name, way in ways.items():
        logits = [logits_of(weights, own, partial(recurrent, *way)) for own in raw]
        found["transformer_expected"] |= predictions(f"{name}_", logits, raw)
    return found | {"layer_expected": layer(weights, random)}


if __name__ == "__main__":
    (FOLDER / "settings.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    for name, arrays in make().items():
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
