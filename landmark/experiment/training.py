"""Training a run: in this process, with others that were started beside it, or in processes started here."""

from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.config.saved import write_launch
from landmark.experiment.inputs import Inputs
from landmark.experiment.jobs import RUN, Run
from landmark.experiment.processes import device_count, for_team, tell, train_together
from landmark.experiment.processor import set_up_processor
from landmark.tracking.tracker import Tracker
from landmark.utils.files import write_json
from landmark.utils.team import started_together


def train_run(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Train a run, or go on from its newest checkpoint. Returns its results (see `landmark.training.train`)."""
    write_json(run.folder / RUN, run.settings)
    write_launch(run.folder, run.config)
    processes, config = device_count(run.config), run.config
    if (team := started_together()) is not None:
        config = for_team(config, team)
    given = config, run.folder.absolute(), run.id, run.start_from, run.settings
    if team is not None:
        tell(given)
    elif processes > 1:
        return train_together(train_here, given, processes)
    return train_here(*given, inputs)


def train_here(
    config: Config,
    folder: Path,
    run: str,
    start_from: str | None,
    settings: dict[str, Any],
    inputs: Inputs | None = None,
) -> dict[str, Any]:
    """Train in this process.

    Args:
        config: of the training.
        folder: of the run; its settings are there already.
        run: identity of the run.
        start_from: folder, or name on the hub, of the weights to start from; None draws them anew.
        settings: that decide the run's weights.
        inputs: opens the tokenizer and the corpus; None: anew.
    """
    import torch

    from landmark.models import build
    from landmark.training import train

    inputs = inputs or Inputs()
    tokenizer, corpus = inputs.tokenizer(config), inputs.corpus(config)
    set_up_processor(config)
    torch.manual_seed(config.seed)
    model = build(config.model, tokenizer, config.cmt.enabled, start_from)
    with Tracker().training(config, run, corpus, folder) as loggers:
        try:
            return train(model, corpus, tokenizer, config, folder, loggers, settings)
        except SystemExit as stop:
            if stop.code == 1:  # Lightning turns an interrupt into this exit
                raise KeyboardInterrupt from stop
            raise  # a signal's exit: the job may be queued again by now
