"""What there is and what is missing: the page shown without a task, `plan`, `status`, `dashboard`."""

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from landmark.cli.command import Command
from landmark.experiment.config import Config
from landmark.experiment.config.command_line import override_key, program
from landmark.experiment.config.schema import TASKS
from landmark.experiment.runs import plan
from landmark.experiment.runs.jobs import Job
from landmark.experiment.runs.launches import describe, done, launch_title, lines_of, states_of, unfinished
from landmark.experiment.runs.processes import device_count
from landmark.experiment.tracking.wandb_run import mode, upload_command
from landmark.utils.checkpoints import step_kept
from landmark.utils.errors import UserError
from landmark.utils.files import open_written
from landmark.utils.hardware import count_gpus, hardware
from landmark.utils.source_tree import CONF

EXAMPLES = {
    "+experiment=quickstart": "minutes on two CPU cores, no download",
    "+experiment=quickstart task=plan": "its runs and rows, and what they cost here",
    "+experiment=table1_pg19 size=nano tokenizer=gpt2_1024 data.path=DIR": "a table of the paper, small, books in DIR",
    "task=status": "what has been done so far",
    "task=generate run=latest prompt_file=FILE": "the last model continues a text",
    "task=chat model=pretrained model.name=DIR prompt_file=FILE": "ask a pretrained model about a text",
    "--help": "this page, and every setting with its default",
}
_GROUPS = {"paper": "The paper", "beyond": "Beyond the paper", "check": "Checks of this program"}  # `about`
_OF_A_TASK = ("task", "output", "logger", "trainer")  # with these alone, it is about everything in the output folder


def experiments(own: Path | None = None) -> dict[str, dict[str, str]]:
    """The first sentence on each experiment, by the group that its `about` names, and its name. own: more settings."""
    files = [file for folder in (CONF, own) if folder for file in sorted((folder / "experiment").glob("*.yaml"))]
    texts = {}
    for file in files:
        with open_written(file, "name another --config-dir") as content:
            texts[file.stem] = content.read().decode(errors="replace")
    about = {name: re.search(r"^about: *(\w+)", text, re.MULTILINE) for name, text in texts.items()}
    groups = {name: found[1] if found else Config.about for name, found in about.items()}
    return {
        key: {name: _first_sentence(text) for name, text in texts.items() if groups[name] == key} for key in _GROUPS
    }


def overview(own: Path | None = None) -> str:
    """The page. own: as for `experiments`."""
    said = {f"task={name}": text for name, text in sorted(TASKS.items())}
    first = shlex.join(program())
    groups = experiments(own)
    width = max((len(f"+experiment={name}") for group in groups.values() for name in group), default=0)
    listed = []
    for key, group in groups.items():
        if group:
            named = {f"+experiment={name}": text for name, text in group.items()}
            listed += [f" {_GROUPS[key]}:", *_lines(named, width)]
    return "\n".join(
        [
            f"{first} trains and evaluates models with landmark attention. Name an experiment or a task:",
            *("", "Experiments (each trains what is missing, evaluates its rows and writes a table):", *listed),
            *("", "Tasks (in place of training and evaluating):", *_lines(said)),
            *("", "Examples:", *_lines({f"{first} {words}": text for words, text in EXAMPLES.items()})),
        ]
    )


def _lines(texts: Mapping[str, str], width: int = 0) -> list[str]:
    width = max([width, *map(len, texts)])
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in texts.items()]


def _first_sentence(text: str) -> str:
    comments = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comments.append(line.lstrip("# "))
    sentence = re.split(r"(?<=[.?])\s", " ".join(comments), maxsplit=1)[0].removesuffix(".")
    return textwrap.shorten(sentence, 90, placeholder=" …")


def show_plan(command: Command) -> None:
    """Print a line for each run and row with its cost, then the commands that spread them over a cluster."""
    config, runner, jobs = command.config, command.runner, command.runner.jobs(command.rows, prepare=False)
    costs: dict[str, plan.Cost] = {}
    seeds = Counter(job.name for job in jobs)
    for job in jobs:
        vocab_size = runner.inputs.tokenizer(job.config).vocab_size
        is_evaluated = job.is_known and runner.records.find("rows", job.id) is not None
        for run in reversed(job.run.trainings):
            name, is_trained = run.folder.name, job.is_known and runner.records.find("runs", run.id) is not None
            begun = 0 if is_trained else step_kept(run.folder)
            costs[f"run {name}"] = plan.run_cost(name, run.config, vocab_size, is_trained, begun)
        tokens = _split_tokens(command, job)
        title = job.name if seeds[job.name] == 1 else f"{job.name} seed {job.config.seed}"
        costs[f"row {title}"] = plan.row_cost(title, job.config, vocab_size, is_evaluated, tokens)
    gpus = 0 if config.trainer.accelerator == "cpu" else min(count_gpus(), device_count(config))
    machine = plan.Machine(hardware()["cores"], gpus, list(runner.records.read_all().runs.values()))
    unprepared = dict.fromkeys(job.config.data.name for job in jobs if not job.is_known)
    notes = [f"corpus {name} is not prepared yet (task=prepare): its sizes are unknown" for name in unprepared]
    text = plan.describe(list(costs.values()), machine)
    print(f"plan of {config.name}, size {config.size}", *notes, "", text, sep="\n")
    if not notes:
        _suggest_cluster(command, list(costs.values()))


def _split_tokens(command: Command, job: Job) -> int | None:
    """Tokens of the evaluated split; None where the corpus is not prepared, or has no text of its own."""
    from landmark.experiment.data import SyntheticCorpus

    if not job.is_known:
        return None
    corpus = command.runner.inputs.corpus(job.config)
    return None if isinstance(corpus, SyntheticCorpus) else len(corpus.split(job.config.eval.split))


def _suggest_cluster(command: Command, costs: Sequence[plan.Cost]) -> None:
    """Print the commands that train each missing run in a job of its own, and then evaluate each row in one."""
    cluster = "hydra/launcher=slurm"
    if runs := [cost.name for cost in costs if cost.kind == "run" and not cost.is_done]:
        print("on a cluster:", command.suggest("task=train", f"run={','.join(runs)}", cluster, multirun=True))
        if command.is_experiment:
            names = ",".join(row.name for row in command.rows)
            print("and then:    ", command.suggest(f"row={names}", cluster, multirun=True))


def show_status(command: Command) -> None:
    """Of what the command line names, each run and row; else of the output folder, by experiment. Makes nothing."""
    runner, contents = command.runner, command.runner.records.read_all()
    if command.is_experiment or any(
        override_key(word).partition(".")[0] not in _OF_A_TASK for word in command.overrides
    ):
        jobs = runner.jobs(command.rows, prepare=False)
        title = launch_title(command.config, command.overrides, runner.inputs.tokenizer(jobs[0].config).name)
        print(describe(title, states_of(jobs, runner.records, contents), command.suggest()))
    else:
        finished, begun = done(contents), unfinished(runner.records, contents)
        for name in sorted({*finished, *begun}):
            print(*finished.get(name, [f"{name}: no row is done"]), *lines_of(begun.get(name, [])), sep="\n")
        new = sorted({name for group in experiments().values() for name in group} - {*finished, *begun})
        first = shlex.join(program())
        print(f"not begun: {', '.join(new)}; {first} +experiment=NAME begins one, with task=status it names each row")
    print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")


def show_dashboard(command: Command) -> None:
    """Publish the workspace where a key is configured, else write it below the output folder."""
    from landmark.experiment.tracking import dashboard

    config, output = command.config, command.runner.output
    identities: dict[str, None] = {}
    for job in command.runner.jobs(command.rows, prepare=False) if command.is_experiment else []:
        if not job.is_known:
            corpus = job.config.data.name
            raise UserError(f"task=dashboard: corpus {corpus} is not prepared: run task=prepare first")
        identities |= dict.fromkeys((job.run.id, job.id))
    workspace = dashboard.build(config, list(identities))
    if mode(config.logger) == "online":
        print(f"published: {dashboard.publish(workspace)}")
        return
    path = output / "dashboards" / f"{config.name if identities else 'project'}.json"
    dashboard.write(workspace, path)
    print(f"written: {path}")
    print(f"W&B: `wandb login`, {upload_command(config)}, then this command again publishes it")
