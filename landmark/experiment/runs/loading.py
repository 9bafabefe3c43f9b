"""A trained run, opened in Python: its model and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.experiment.config.saved import RUN, trained_with
from landmark.experiment.data import load_tokenizer
from landmark.models import load as load_model
from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.trust import name_modules

if TYPE_CHECKING:
    import torch

    from landmark.experiment.data import Tokenizer
    from landmark.models import LanguageModel


def load(
    folder: str | Path, device: "str | torch.device" = "cpu", *, modules: Sequence[str] = ()
) -> "tuple[LanguageModel, Tokenizer]":
    """The model of a run, in evaluation mode, and the tokenizer that it was trained with. folder: of the run; nothing
    in it is run. modules: of your own that the run may name, as `mine.gated` (docs/add_a_model.md). Raises UserError
    for a file that is missing or damaged, and for another module.
    """
    folder = Path(folder)
    name_modules(modules, outside=(folder,))
    model = load_model(folder, device=device)
    return model, tokenizer_of(folder)


def tokenizer_of(folder: Path) -> "Tokenizer":
    """The tokenizer that a run was trained with. Raises UserError where the folder does not say which one that is."""
    wanted = read_json(folder / RUN, {"tokenizer": str}, "train the run again, which writes it anew")["tokenizer"]
    config = trained_with(folder)
    if config is None:
        raise UserError(f"{folder} does not say which tokenizer it was trained with: open it with landmark.models.load")
    tokenizer = load_tokenizer(config.tokenizer.name, config.tokenizer.file, config.tokenizer.vocab_size)
    if tokenizer.hash != wanted:
        raise UserError(f"{folder}: tokenizer {tokenizer.name} is not the one that the run was trained with")
    return tokenizer
