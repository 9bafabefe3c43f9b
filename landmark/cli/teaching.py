"""Landmarks are learned from a pretrained model (`task=teach`), and written to a file that `model.landmarks` names."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from landmark.cli.command import Command
from landmark.experiment.config import Config
from landmark.experiment.runs.jobs import Inputs, folder_of
from landmark.experiment.runs.runner import load_trained
from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors
from landmark.utils.progress import new_bar

if TYPE_CHECKING:
    from landmark.experiment.data import Corpus

KEPT_EVERY = 20  # steps between states from which a teaching that was stopped goes on
WINDOWS = 8  # of the validation split, on which the loss is said


def teach(command: Command) -> None:
    """Learn landmarks from the text of a corpus, of each seed a file. Stopped, and started again, it goes on."""
    config, configs = command.only_config(), command.rows[0].configs
    if not config.model.as_is or config.model.landmarks is None:
        raise UserError("task=teach: needs model=pretrained model.name=MODEL model.landmarks=FILE, the file to be made")
    files = {Path(str(each.model.landmarks)): each for each in configs}
    if len(files) < len(configs):
        raise UserError(f"seeds: model.landmarks={config.model.landmarks} is one file: name one with ${{seed}} in it")
    missing = [file for file in files if not _is_taught(file)]
    if not missing:
        raise UserError(f"model.landmarks={config.model.landmarks}: exists already, delete it or name another file")
    for file in missing:
        _teach(files[file], file, command.runner.inputs)


def _state_of(file: Path) -> Path:
    """The file from which a teaching goes on; it is deleted last."""
    return file.with_name(f".{file.name}.teaching")


def _is_taught(file: Path) -> bool:
    return file.exists() and not _state_of(file).exists()


def _teach(config: Config, file: Path, inputs: Inputs) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    corpus = cast("Corpus", inputs.corpus(config))
    from landmark.models.huggingface.teaching import Teaching, TeachSettings, window

    model, tokenizer = load_trained(config, folder_of(config, inputs), inputs)
    teaching = Teaching(cast(Any, model).bare, TeachSettings(**asdict(config.teach)), config.seed)
    state = _state_of(file)

    def encode(number: str) -> list[int]:
        return tokenizer.encode(number).tolist()

    def text(split: str, step: int) -> list[int]:
        tokens, number = corpus.split(split).tokens, config.seed if split == "train" else 0
        return window(tokens, step, teaching.settings, tokenizer.beginning, encode, number)

    with name_in_errors(file):
        if state.exists() and not teaching.load_state(state):
            raise UserError(f"{state} is of another model or of other settings: delete it, or name another file")
        with new_bar("teaching", unit="window", total=teaching.settings.steps, initial=teaching.step) as bar:
            while teaching.step < teaching.settings.steps:
                losses = teaching.learn(text("train", teaching.step))
                bar.update()
                bar.set_postfix_str(f"loss {sum(losses.values()):.3f} nats in {len(losses)} layers")
                if teaching.step % KEPT_EVERY == 0:
                    teaching.save_state(state)
        found = [teaching.validate(text("validation", step)) for step in range(WINDOWS)]
        teaching.done.save(file)
        state.unlink(missing_ok=True)
    each = ", ".join(f"{number}: {sum(x[number] for x in found) / len(found):.3f}" for number in found[0])
    print(f"{file}: loss of each layer on the validation split, nats: {each}")
