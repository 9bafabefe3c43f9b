"""Training a run: in this process, with others that were started beside it, or in processes started here."""

import os
import sys
from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.config.trained_with import read_launch, write_launch
from landmark.experiment.devices import device_count
from landmark.experiment.inputs import Inputs
from landmark.experiment.jobs import RUN, Run
from landmark.experiment.processes import errors_left_in, train_together
from landmark.experiment.processor import set_up_processor
from landmark.experiment.team import for_team, join, tell
from landmark.tracking.tracker import Tracker
from landmark.utils.files import read_json, write_json
from landmark.utils.team import started_together

_Told = tuple[Config, Path, str, str | None, dict[str, Any]]  # arguments of `train_here`

SUMMARY = "summary.json"  # in a run's folder: the results, written by the first of the processes that train together


def train_run(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Train a run, or go on from its newest checkpoint. Returns its results (see `landmark.training.train`)."""
    write_json(run.folder / RUN, run.settings)
    write_launch(run.folder, run.config, id=run.id, start_from=run.start_from)
    processes = device_count(run.config)
    if (team := started_together()) is not None:
        told: _Told = for_team(run.config, team), run.folder.absolute(), run.id, run.start_from, run.settings
        tell(told)
        return train_here(*told, inputs)
    if processes == 1:
        return train_here(run.config, run.folder, run.id, run.start_from, run.settings, inputs)
    train_together(__name__, run.folder, processes)
    return read_json(run.folder / SUMMARY)


def train_as_told(told: _Told) -> None:
    """Train with the first of several processes, which told what (`landmark.experiment.team`)."""
    train_here(*told, Inputs())


def train_here(
    config: Config, folder: Path, run: str, start_from: str | None, settings: dict[str, Any], inputs: Inputs
) -> dict[str, Any]:
    """Train in this process.

    Args:
        config: of the training.
        folder: of the run; its settings are there already.
        run: identity of the run.
        start_from: folder, or name on the hub, of the weights to start from; None draws them anew.
        settings: that decide the run's weights.
        inputs: opens the tokenizer and the corpus.
    """
    import torch

    from landmark.models import build
    from landmark.training import train

    tokenizer, corpus = inputs.tokenizer(config), inputs.corpus(config)
    set_up_processor(config, folder)
    torch.manual_seed(config.seed)
    model = build(config.model, tokenizer, config.cmt.enabled, start_from)
    with Tracker().training(config, run, corpus, folder) as loggers:
        try:
            return train(model, corpus, tokenizer, config, folder, loggers, settings)
        except SystemExit as stop:
            if stop.code == 1:  # Lightning turns an interrupt into this exit
                raise KeyboardInterrupt from stop
            raise  # a signal's exit: the job may be queued again by now


def _train_with_others(folder: Path) -> None:
    """One of several processes that train a run together, started by `train_run`."""
    launch = read_launch(folder)
    if (team := started_together()) is not None:
        join(team, launch["config"].trainer.patience)
    settings = read_json(folder / RUN)
    results = train_here(launch["config"], folder, launch["id"], launch["start_from"], settings, Inputs())
    if os.environ["RANK"] == "0":
        write_json(folder / SUMMARY, results)


if __name__ == "__main__":
    with errors_left_in(Path(sys.argv[1])):
        _train_with_others(Path(sys.argv[1]))
