"""Every causal language model of the installed transformers, tried as `wrap` tries a decoder that is not listed.

`python -m tests.models.huggingface.sweep` writes their table in docs/families.md; it takes about ten minutes. With
names of types it prints their rows.
"""

import logging
import multiprocessing
import queue
import sys
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from landmark.models.huggingface import families
from landmark.models.huggingface.wrapping import try_model
from landmark.utils.errors import UserError, in_one_line

PAGE, HEADING = Path(__file__).parents[3] / "docs" / "families.md", "## All causal language models of transformers"
SECONDS, LAYERS = 120, 8  # most of a trial; of a model, where its settings allow so few
# Settings that a configuration of the family needs: its defaults are of no model, or have no layer with full attention.
SETTINGS = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4} for kind in ("lfm2", "lfm2_moe")},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "mistral": {"sliding_window": None},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "num_hidden_layers": 4},
}


TEXT = """A model whose type is in no table above is tried before it is read. `wrap` makes a tiny model of its class,
with all its layers, in float64, and measures how keys turn. With all blocks it must be the original; with few, the
original under a mask of the keys that a plain loop chooses; and the same however the text is cut. If it passes, the
log says that the type was tried. Otherwise `wrap` refuses it, and says why.

`python -m tests.models.huggingface.sweep` tries all causal language models of transformers in this way, with the
settings that their configurations have by default. Of transformers {version}, {works} of {all} work.

| model type | layers | result |
|---|---|---|"""


def model_of(kind, **changes):
    """A model of a type, without weights: of LAYERS layers, if these are of all kinds that it has."""
    settings, found = SETTINGS.get(kind, {}) | changes, {}
    for fewer in ({"num_hidden_layers": LAYERS}, {}):
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fewer | settings))
            found[len(fewer)] = model, set(families.layer_types(model))
        except Exception:
            if not fewer:
                raise
    return found[1][0] if 1 in found and found[1][1] == found[0][1] else found[0][0]


def kinds(model):
    """What the layers of a model are, in words."""
    config, shared = families.text_config(model), set(families.shared_key_layers(model))
    types = [f"{kind}_of_shared_keys" if n in shared else kind for n, kind in enumerate(families.layer_types(model))]
    said = [", ".join(dict.fromkeys(types)).replace("_", " ")]
    rotation, layers = families.rotation_of(model), families.landmark_layers(model)
    if layers - rotation.unrotated:
        heads = families.head_dim(config.per_layer_config[min(layers)])
        part = " of a part of each head" if 2 * len(families.inverse_frequencies(model)) < heads else ""
        said.append(f"{'neighbouring channels' if rotation.neighbours else 'halves'}{part} rotate")
    if rotation.scales:
        said.append("a norm behind the rotation")
    if rotation.unrotated & layers:
        said.append("full attention without positions" + (" in some layers" if layers - rotation.unrotated else ""))
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        said.append("experts")
    return "; ".join(said)


def row(kind):
    """A type, its layers, and whether it works, or why not."""
    try:
        model = model_of(kind)
    except Exception as error:
        config = CONFIG_MAPPING[kind]()
        try:
            families.check_layers(kind, getattr(config.get_text_config(), "layer_types", None) or ())
        except UserError as refused:
            return f"| `{kind}` | | {str(refused).removeprefix(f'{kind}: ')} |"
        return f"| `{kind}` | | not tried: no model can be made of its settings here ({in_one_line(error)[:100]}) |"
    try:
        families.check_model(model, is_free=True)
        try_model(model)
        return f"| `{kind}` | {kinds(model)} | works |"
    except UserError as error:
        return f"| `{kind}` | | {str(error).removeprefix(f'{model.config.model_type}: ')} |"


def _put(kind, results):
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results.put(row(kind))


def rows(types):
    """The rows of types, each in a process of its own."""
    forking = multiprocessing.get_context("fork")
    for kind in types:
        results = forking.Queue()
        process = forking.Process(target=_put, args=(kind, results))
        process.start()
        try:
            yield results.get(timeout=SECONDS)
        except queue.Empty:
            yield f"| `{kind}` | | not tried: no result within {SECONDS} seconds |"
        finally:
            process.kill()
            process.join()


def section(lines):
    """The part of the page that has all types. lines: their rows."""
    version, works = transformers.__version__, sum(line.endswith("| works |") for line in lines)
    said = TEXT.format(version=version, works=works, all=len(lines))
    return "\n".join([HEADING, "", said, *lines, ""])


if __name__ == "__main__":
    found = []
    for line in rows(sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(line, flush=True)
        found.append(line)
    if not sys.argv[1:]:
        head = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
        PAGE.write_text(head + section(found), encoding="utf-8")
