"""task=plan: print what is missing and what it costs; make nothing."""

from collections import Counter
from collections.abc import Sequence

from landmark.cli.command import Command
from landmark.config.checks import large_vocabulary
from landmark.experiment import plan
from landmark.experiment.jobs import Job
from landmark.experiment.processes import device_count
from landmark.utils.hardware import count_gpus, hardware


def run(command: Command) -> None:
    """Print a line for each run and row with its cost, then the commands that spread them over a cluster."""
    config, runner, jobs = command.config, command.runner, command.runner.planned_jobs(command.rows)
    costs: dict[str, plan.Cost] = {}
    seeds = Counter(job.name for job in jobs)
    for job in jobs:
        vocab_size = runner.inputs.tokenizer(job.config).vocab_size
        is_evaluated = job.is_known and runner.records.find("rows", job.id) is not None
        if (run := job.run.training) is not None:
            name, is_trained = run.folder.name, job.is_known and runner.records.find("runs", run.id) is not None
            costs.setdefault(f"run {name}", plan.run_cost(name, run.config, vocab_size, is_trained))
        tokens = _split_tokens(command, job)
        title = job.name if seeds[job.name] == 1 else f"{job.name} seed {job.config.seed}"
        costs[f"row {title}"] = plan.row_cost(title, job.config, vocab_size, is_evaluated, tokens)
    gpus = 0 if config.trainer.accelerator == "cpu" else min(count_gpus(), device_count(config))
    machine = plan.Machine(hardware()["cores"], gpus, list(runner.records.read_all().runs.values()))
    unprepared = dict.fromkeys(job.config.data.name for job in jobs if not job.is_known)
    unusual = list(dict.fromkeys(filter(None, (large_vocabulary(job.config) for job in jobs))))
    notes = [f"corpus {name} is not prepared yet (task=prepare): its sizes are unknown" for name in unprepared]
    text = plan.describe(list(costs.values()), machine)
    print(f"plan of {config.name}, size {config.size}", *unusual, *notes, "", text, sep="\n")
    if not notes:
        _suggest_cluster(command, list(costs.values()))


def _split_tokens(command: Command, job: Job) -> int | None:
    """Tokens of the evaluated split; None where the corpus is not prepared, or has no text of its own."""
    from landmark.data import SyntheticCorpus

    if not job.is_known:
        return None
    corpus = command.runner.inputs.corpus(job.config)
    return None if isinstance(corpus, SyntheticCorpus) else len(corpus.split(job.config.eval.split))


def _suggest_cluster(command: Command, costs: Sequence[plan.Cost]) -> None:
    """Print the commands that train each missing run in a job of its own, and then evaluate each row in one."""
    cluster = "hydra/launcher=submitit_slurm"
    if runs := [cost.name for cost in costs if cost.kind == "run" and not cost.is_done]:
        print("on a cluster:", command.suggest("task=train", f"run={','.join(runs)}", cluster, multirun=True))
        if command.is_experiment:
            names = ",".join(row.name for row in command.rows)
            print("and then:    ", command.suggest(f"row={names}", cluster, multirun=True))
