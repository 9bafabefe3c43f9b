"""What the extensions that a configuration uses add to the program. Loads no torch.

A field of the schema that `of_extension` made belongs to the module of `landmark.extensions` that declares it. It may
have these functions:

- `check(config)`: raises UserError where settings do not fit it.
- `resolved(config)`: the configuration with settings filled in that null stands for.
- `row_settings(config)`: a part of a row's identity.
- `window_data(config, tokenizer)`: changes batches of windows, by `of_step(batch, seed, step, indices)` in training and
  `of_validation(batch, windows)`.
- `losses(model, batch)`: of a training batch, in place of the model's `window_losses`.
- `keys_per_query(length)`: mean number of keys that a query attends to in a window or text of so many tokens.
- `evaluate(model, stream, tokenizer, config, progress)`: in place of perplexity.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from landmark.config.schema import Config
from landmark.utils.extensions import extension_with


def hooks(config: Config, name: str) -> list[Callable[..., Any]]:
    """The functions of this name of the extensions whose settings are set.

    Raises UserError where there is no extension with a setting.
    """
    modules = []
    for group in ("model", "train"):
        settings = getattr(config, group)
        for item in fields(settings):
            if item.metadata.get("extension") and getattr(settings, item.name):
                module = extension_with(f"{group}.{item.name}")
                modules += [] if module in modules else [module]
    return [getattr(module, name) for module in modules if hasattr(module, name)]


def hook(config: Config, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function of this name of an extension whose setting is set; `usual` where there is none."""
    return [usual, *hooks(config, name)][-1]
