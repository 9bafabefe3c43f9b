"""Every causal language model of the installed transformers, tried as `wrap` tries a decoder that is not listed.

`python -m tests.huggingface.sweep` prints the rows of the table in docs/families.md, one process for each type.
"""

import logging
import multiprocessing
import sys
from collections import Counter

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from landmark.huggingface import families
from landmark.huggingface.wrapping import try_model
from landmark.utils.errors import UserError, in_one_line

SECONDS, LAYERS = 120, 8  # most of a trial; of a model, where its settings allow so few
# Settings that a configuration of the family needs: its defaults are of no model, or have no layer with full attention.
SETTINGS = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}


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
    config, said = families.text_config(model), []
    shared = set(families.givers(model))
    types = [f"{kind} of shared keys" if n in shared else kind for n, kind in enumerate(families.layer_types(model))]
    counted = Counter(types)
    said.append(", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counted.items()))
    rotation, layers = families.rotation_of(model), families.landmark_layers(model)
    if rotation.frequencies is not None:
        said.append("neighbouring channels rotate" if rotation.neighbours else "halves rotate")
    if unrotated := len(rotation.unrotated & layers):
        said.append(f"{unrotated} of full attention without positions")
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        said.append("experts")
    return "; ".join(said)


def row(kind):
    """A type, its layers, and whether it works, or why not."""
    try:
        model = model_of(kind)
    except Exception as error:
        return f"| `{kind}` | | not tried: no model can be made of its settings here ({in_one_line(error)[:100]}) |"
    try:
        families.check_model(model, is_free=True)
        if kind not in families.FAMILIES:
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
    for kind in types:
        results = multiprocessing.get_context("fork").Queue()
        process = multiprocessing.get_context("fork").Process(target=_put, args=(kind, results))
        process.start()
        try:
            yield results.get(timeout=SECONDS)
        except Exception:
            yield f"| `{kind}` | | not tried: no result within {SECONDS} seconds |"
        finally:
            process.kill()
            process.join()


if __name__ == "__main__":
    for line in rows(sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(line, flush=True)
