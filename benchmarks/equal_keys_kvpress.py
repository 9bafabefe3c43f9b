"""Methods of kvpress, which drop keys of a text before its last tokens are read: for the texts of `equal_keys`.

    python -m benchmarks.equal_keys_kvpress MODEL --data ../shared/data/pg19-mini/test --work DIR --export
    python benchmarks/equal_keys_kvpress.py MODEL --work DIR

The first command writes the model and the ids of its texts. The second needs kvpress and not this package, in an
environment of its own, because kvpress 0.5.5 wants transformers below 5.3. It reads a text up to its last tokens. The
press drops all but so many keys of each head, in layers with full attention. Then the last tokens are read with what is
left. A query has 512 kept keys and on average 256 of the last tokens, so as many as with 8 blocks and a window of 512.
What was measured stays in DIR/kvpress, so that the command goes on where it stopped. A CSV there follows each text,
with what `equal_keys` has measured in DIR on the same texts.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

PRESSES = ("none", "SnapKVPress", "TOVAPress", "StreamingLLMPress")
OURS = ("all keys", "mean key", "last blocks")


def export(given: argparse.Namespace, folder: Path) -> None:
    from benchmarks.equal_keys import open_model, texts
    from landmark.models.huggingface import unwrap

    model, tokenizer = open_model(given.model, None)
    found = dict(texts(given.data, tokenizer, given.tokens, given.texts))
    unwrap(model).save_pretrained(folder)
    arrays: dict[str, Any] = {text: ids.numpy() for text, ids in found.items()}
    np.savez(folder / "ids.npz", **arrays)


def losses(model: Any, press: Any, ids: torch.Tensor, last: int) -> np.ndarray:
    """Of the last tokens of a text (1, T + 1), in nats."""
    from transformers import DynamicCache

    before, cache = ids.shape[1] - 1 - last, DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :before], past_key_values=cache, logits_to_keep=1)
    masks, queries, kinds = {}, torch.arange(last)[:, None], getattr(model.config, "layer_types", ["full_attention"])
    layers: Any = cache.layers
    for kind, layer in zip(kinds, layers):
        age = queries - torch.arange(-layer.keys.shape[2], last)  # of what is kept: all of it stands before
        reach = model.config.sliding_window if kind == "sliding_attention" else ids.shape[1]
        masks[kind] = ((age >= 0) & (age < reach))[None, None]
    given = {"position_ids": torch.arange(before, before + last)[None], "attention_mask": masks}
    logits = model(ids[:, before:-1], past_key_values=cache, **given).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, before + 1 :], reduction="none").numpy()


def new_press(name: str, ratio: float) -> Any:
    """A context for a model."""
    import kvpress  # pyright: ignore[reportMissingImports]

    class InFullLayers(getattr(kvpress, name)):
        def forward_hook(self, module: Any, *given: Any) -> Any:
            return given[2] if getattr(module, "is_sliding", False) else super().forward_hook(module, *given)

    return InFullLayers(compression_ratio=ratio)


@torch.inference_mode()
def measure(folder: Path, ours: Path, last: int, kept: int) -> None:
    """ours: folder of what `equal_keys` has measured."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    safely = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **safely)
    texts = np.load(folder / "ids.npz", allow_pickle=False)
    means: dict[str, list[float]] = {name: [] for name in (*PRESSES, *OURS)}
    for text in texts:
        ids = torch.from_numpy(texts[text])
        ratio = 1 - (kept + 0.5) / (ids.shape[1] - 1 - last)
        for name in PRESSES:
            file = folder / f"{text}-{name}-{0 if name == 'none' else kept}.npy"
            if not file.is_file():
                press = (lambda _: torch.inference_mode()) if name == "none" else new_press(name, ratio)
                np.save(file, losses(model, press, ids, last))
            means[name].append(float(np.load(file, allow_pickle=False).mean()))
        for name in OURS:
            file = ours / f"{text}-{name}-group-8.npz".replace(" ", "_")
            if file.is_file():
                means[name].append(float(np.load(file, allow_pickle=False)["losses"].mean()))
        with folder.with_suffix(".csv").open("w", newline="") as opened:
            csv.writer(opened).writerows(table(means))


def table(means: dict[str, list[float]]) -> list[list[object]]:
    """Lines of a CSV: nats above all keys of the same program, over the texts."""
    lines: list[list[object]] = [["method", "texts", "difference", "difference_error"]]
    for name, found in means.items():
        base = means[OURS[0] if name in OURS else PRESSES[0]]
        if found and found is not base and len(found) == len(base):
            above = np.array(found) - base
            error = above.std(ddof=1) / len(above) ** 0.5 if len(above) > 1 else float("nan")
            lines.append([name, len(above), f"{above.mean():.6f}", f"{error:.6f}"])
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--export", action="store_true")
    for option, value in {"texts": 12, "tokens": 4096, "last": 512, "kept": 512}.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    options = parser.parse_args()
    where = options.work / "kvpress" / Path(options.model).stem
    if options.export:
        export(options, where)
    else:
        measure(where, options.work / Path(options.model).stem, options.last, options.kept)
