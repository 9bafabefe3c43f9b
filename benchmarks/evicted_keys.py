"""Pass keys read from a cache from which NVIDIA's kvpress has evicted keys, as many kept as a query reads with blocks.

1. `python -m benchmarks.evicted_keys prompts MODEL FILE`: the prompts of `+experiment=pretrained_passkey`, as JSON.
2. In an environment of its own, with kvpress 0.5.5 and transformers below 5.3:
   `python -m benchmarks.evicted_keys read MODEL FILE --press snapkv --question after --out FILE.csv`

Keys are evicted once, from layers with full attention, when the text has been read: with the question before that
(`--question within`), or without it, as where several questions follow (`--question after`).
"""

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from landmark.utils.hardware import hardware
from landmark.utils.source_tree import commit

KEPT = 32 * 32 + 512  # keys that a query reads with blocks: k blocks of ℓ, and the window
QUESTION = "What is the pass key?"
GENERATED = 8
PRESSES = {"snapkv": "SnapKVPress", "expected": "ExpectedAttentionPress", "tova": "TOVAPress", "none": None}


def write_prompts(model: str, path: Path, length: int, count: int) -> None:
    """Write ids, where the question begins among them, and the answer."""
    from landmark.data.passkey import Passkey
    from landmark.data.synthetic import SyntheticCorpus
    from landmark.data.tokenizers import PretrainedTokenizer
    from landmark.huggingface.safe_loading import open_tokenizer

    plain = open_tokenizer(model)
    prompts = []
    for prompt in SyntheticCorpus(Passkey(), PretrainedTokenizer(plain)).prompts("test", length, count):
        ids = prompt.tokens.tolist()
        last = range(len(ids) - 60, len(ids))
        begins = max(at for at in last if plain.decode(ids[at:]).lstrip().startswith(QUESTION))
        prompts.append({"ids": ids, "question": begins, "answer": prompt.answer})
    path.write_text(json.dumps(prompts), encoding="utf-8")


def answers(model: Any, tokenizer: Any, prompt: dict[str, Any], press: Any, within: bool) -> tuple[str, bool]:
    """What the model says, and whether the answer is in it. press: evicts keys; None: all are kept."""
    import torch
    from transformers import DynamicCache

    ids, cache = torch.tensor([prompt["ids"]]), DynamicCache(config=model.config)
    read = ids.shape[1] - 1 if within else prompt["question"]
    with torch.no_grad():
        if press is None:
            model.model(ids[:, :read], past_key_values=cache)
        else:
            press.compression_ratio = 1 - KEPT / read
            with evicting(model, press):
                model.model(ids[:, :read], past_key_values=cache)
        said: list[int] = []
        while len(said) < GENERATED:  # one at a time: masks would take the places of keys for positions
            at = torch.tensor([read])
            token = ids[:, read : read + 1] if read < ids.shape[1] else torch.tensor([said[-1:]])
            logits = model(token, past_key_values=cache, position_ids=at[None], cache_position=at).logits
            read += 1
            if read >= ids.shape[1]:
                said.append(int(logits[0, -1].argmax()))
    text = tokenizer.decode(said)
    return text, prompt["answer"] in text


@contextmanager
def evicting(model: Any, press: Any) -> Iterator[None]:
    """A context in which kvpress evicts keys of layers with full attention; it knows Gemma 3 with pictures alone."""
    press.post_init_from_model(model)
    rotary, hooks = model.model.rotary_emb, []
    for layer in model.model.layers:
        if getattr(layer.self_attn, "is_sliding", False):
            continue
        kind = ("full_attention",) if hasattr(layer.self_attn, "is_sliding") else ()
        layer.self_attn.__dict__["rotary_emb"] = lambda x, positions, kind=kind: rotary(x, positions, *kind)
        hooks.append(layer.self_attn.register_forward_hook(press.forward_hook, with_kwargs=True))
    yield
    for hook in hooks:
        hook.remove()


def read_prompts(arguments: argparse.Namespace) -> None:
    """Answer the prompts, and add a row to the CSV."""
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch

    from landmark.huggingface.safe_loading import open_model, open_tokenizer

    tokenizer = open_tokenizer(arguments.model)
    model = open_model(arguments.model, dtype=torch.float32).eval()
    name = PRESSES[arguments.press]
    press = None if name is None else getattr(kvpress, name)()
    prompts, right = json.loads(arguments.file.read_text(encoding="utf-8")), 0
    for number, prompt in enumerate(prompts, 1):
        text, is_right = answers(model, tokenizer, prompt, press, arguments.question == "within")
        right += is_right
        print(f"{number} of {len(prompts)}: {prompt['answer']}, said {text!r}; {right} right", flush=True)
    row = {
        "press": arguments.press,
        "question": arguments.question,
        "tokens": len(prompts[0]["ids"]),
        "keys kept": "all" if press is None else KEPT,
        "right": right,
        "prompts": len(prompts),
        "versions": f"kvpress {version('kvpress')}, transformers {version('transformers')}, torch {torch.__version__}",
        "hardware": f"{hardware()['cpu']}, {hardware()['cores']} cores",
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.evicted_keys", *sys.argv[1:]]),
    }
    is_new = not arguments.out.exists()
    with arguments.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("task", choices=["prompts", "read"])
    parser.add_argument("model", help="folder of a model of transformers")
    parser.add_argument("file", type=Path, help="of the prompts")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt (4096)")
    parser.add_argument("--count", type=int, default=20, help="prompts (20)")
    parser.add_argument("--press", choices=PRESSES, default="snapkv")
    parser.add_argument("--question", choices=["after", "within"], default="after")
    parser.add_argument("--out", type=Path, default=Path("evicted-keys.csv"), help="CSV that gets a row more")
    arguments = parser.parse_args()
    if arguments.task == "prompts":
        write_prompts(arguments.model, arguments.file, arguments.length, arguments.count)
    else:
        read_prompts(arguments)


if __name__ == "__main__":
    main()
