"""Methods of kvpress, which drop keys of a text before its last tokens are read: for the texts of `equal_keys`.

    python -m benchmarks.equal_keys_kvpress MODEL --data ../shared/data/pg19-mini/test --work DIR --export
    python benchmarks/equal_keys_kvpress.py MODEL --work DIR

The first command writes the model and the ids of its texts. The second needs kvpress and not this package, in an
environment of its own, because kvpress 0.5.5 wants an older transformers. It reads each text up to its last tokens. The
press drops all but so many keys of each head, in layers with full attention. Then the last tokens are read with what is
left. A query has 512 kept keys and on average 256 of the last tokens, so as many as with 8 blocks and a window of 512.
What was measured stays in DIR/kvpress, so that the command goes on where it stopped.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

PRESSES = ("none", "SnapKVPress", "TOVAPress", "StreamingLLMPress")


def export(given: argparse.Namespace, folder: Path) -> None:
    from benchmarks.equal_keys import texts
    from landmark.models.huggingface import load, unwrap

    model, tokenizer = load(given.model, dtype=torch.bfloat16)
    found = dict(texts(given.data, tokenizer, given.tokens, given.texts))
    unwrap(model).save_pretrained(folder)
    torch.save(found, folder / "ids.pt")


def losses(model: Any, press: Any, ids: torch.Tensor, last: int) -> np.ndarray:
    """Of the last tokens of a text (1, T + 1), in nats."""
    from transformers import DynamicCache

    before, cache = ids.shape[1] - 1 - last, DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :before], past_key_values=cache, logits_to_keep=1)
    masks, queries = {}, torch.arange(last)[:, None]
    for kind, layer in zip(getattr(model.config, "layer_types", ["full_attention"]), cache.layers):
        kept: Any = layer.keys
        age = queries - torch.arange(-kept.shape[2], last)  # of what is kept: all of it stands before
        near = model.config.sliding_window if kind == "sliding_attention" else age.max() + 1
        masks[kind] = ((age >= 0) & (age < near))[None, None]
    places = torch.arange(before, before + last)[None]
    logits = model(ids[:, before:-1], past_key_values=cache, position_ids=places, attention_mask=masks).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), ids[0, before + 1 :], reduction="none").numpy()


def new_press(name: str, kept: int, tokens: int) -> Any:
    """A context for a model."""
    import kvpress  # pyright: ignore[reportMissingImports]

    if name == "none":
        return lambda model: torch.inference_mode()

    class InFullLayers(getattr(kvpress, name)):
        def forward_hook(self, module, *given):
            return given[2] if getattr(module, "is_sliding", False) else super().forward_hook(module, *given)

    return InFullLayers(compression_ratio=1 - (kept + 0.5) / tokens)


@torch.inference_mode()
def measure(folder: Path, last: int, kept: int) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model, means = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), {name: [] for name in PRESSES}
    for text, ids in torch.load(folder / "ids.pt").items():
        for name in PRESSES:
            file = folder / f"{text}-{name}-{0 if name == 'none' else kept}.npy"
            if not file.is_file():
                np.save(file, losses(model, new_press(name, kept, ids.shape[1] - 1 - last), ids, last))
            means[name].append(np.load(file).mean())
        for name, each in means.items():
            above = np.array(each) - means["none"]
            error = above.std(ddof=1) / len(above) ** 0.5 if len(above) > 1 else np.nan
            print(
                f"{text}: {name}, {kept} kept keys: {above.mean():+.4f} ± {error:.4f} nats above all keys", flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--export", action="store_true")
    for name, value in {"texts": 12, "tokens": 4096, "last": 512, "kept": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    where = options.work / "kvpress" / Path(options.model).stem
    export(options, where) if options.export else measure(where, options.last, options.kept)
