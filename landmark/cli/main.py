"""The tasks of run.py: what is missing is made, what has a record is read, then the table is rendered."""

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from landmark.cli import overview
from landmark.cli.exit_codes import reported
from landmark.config import Config, rows, to_config
from landmark.config.checks import check_task
from landmark.config.command_line import launcher, launching, typed
from landmark.config.composer import parse
from landmark.config.rows import Row
from landmark.experiment import identity, plan
from landmark.experiment.provenance import hardware
from landmark.experiment.runner import Workshop, device_count
from landmark.results import paper, render, tables
from landmark.results.figures import check_figure
from landmark.tracking.wandb_runs import log_table, mode
from landmark.utils.errors import UserError
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.evaluation.asking import Account


def main(composed: DictConfig) -> None:
    """One job of run.py. A launcher gathers what the jobs it started raise, and run.py says it."""
    with nullcontext() if launcher() else reported():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise UserError("run.py starts the processes of a training itself: leave out torchrun and set trainer=ddp")
        run(to_config(composed), list(HydraConfig.get().overrides.task))


class TableAtEnd(Callback):
    """Hydra's: after a multirun over an experiment's rows, or its grid's keys, the table of what has a record."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        with reported():
            overrides = list(config.hydra.overrides.task)
            parsed = parse(overrides)
            one = to_config(rows.compose_job([o.input_line or "" for o in parsed if not o.is_sweep_override()]))
            swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
            if one.task == "auto" and rows.named(one) and swept <= {"row", *one.grid.axes}:
                run(replace(one, task="table"), overrides)


def run(config: Config, overrides: list[str], composer: rows.Compose = rows.compose_job) -> None:
    """Do a configuration's task over its rows. overrides: those of the command line."""
    check_task(config)
    check_figure(config.figure)
    selected, workshop = rows.select(config, overrides, composer), Workshop(config.output)
    if config.task == "report":
        overview.report(config, selected, workshop, composer)
        return
    if config.task == "status":
        overview.status(config, selected, workshop, composer, _command(config))
        return
    if config.task != "auto":
        _TASKS[config.task](config, selected, workshop)
        return
    started = time.monotonic()
    made = _evaluate(config, selected, workshop)
    if rows.named(config) and not rows.is_part(config, overrides):
        table(config, selected, workshop)
        total = sum(len(row.configs) for row in selected)
        print(f"{made} of {total} rows evaluated now, the others read from records; {_duration(started)}")


def prepare(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Tokenise the corpora."""
    seen = set()
    for row in selected:
        for one in row.configs:
            corpus = workshop.corpus(one)
            if corpus.folder not in seen:
                seen.add(corpus.folder)
                splits = corpus.manifest["splits"].items()
                counts = ", ".join(f"{name} {split['tokens']:,} tokens" for name, split in splits)
                print(f"{corpus.folder}: {counts or 'nothing to prepare'}")


def train(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Train the runs that the rows need, or the one of them that `run` names."""
    selected = [replace(row, configs=[replace(one, run=None) for one in row.configs]) for row in selected]
    _check_all(selected, workshop)
    runs = {workshop.run_folder(one).name: (one, row.overrides) for row in selected for one in row.configs}
    if config.run is not None:
        name = Path(config.run).name
        if name not in runs:
            raise UserError(f"run={config.run}: no run of {config.name} (one of {', '.join(runs)})")
        runs = {name: runs[name]}
    for one, overrides in runs.values():
        folder, new = workshop.ensure_run(one, config.name, overrides)
        print(f"{folder}: {'trained now' if new else 'trained before'}")


def evaluate(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Evaluate the rows, training what they need."""
    _evaluate(config, selected, workshop)


def table(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Print and draw the table of the rows that have a record; name those that have none."""
    found = {row.name: [workshop.find_row(one) for one in row.configs] for row in selected}
    records = {name: [each for each in made if each is not None] for name, made in found.items() if None not in made}
    missing = [name for name in found if name not in records]
    told = f"{len(missing)} of {len(found)} rows have no record yet, `{_command(config)}` makes them: "
    told += ", ".join(missing)
    if not records:
        raise UserError(told)
    built = tables.build(
        config.name,
        records,
        paper=paper.read_paper(config.name),
        comparisons=config.compare,
        figure=config.figure,
        cells={row.name: row.cell for row in selected if row.cell is not None},
    )
    print(f"\n{render.as_text(built)}")
    folder = workshop.output / "tables"
    changed = not render.is_written(built, folder)
    paths = render.write(built, folder)
    print(f"written: {', '.join(str(path) for path in paths.values())}")
    if changed:
        key = hashlib.sha256(f"{built.name} {built.stem}".encode()).hexdigest()[:10]
        kept = [workshop.records.path("rows", each["id"]) for made in records.values() for each in made]
        log_table(config, key, *render.plain(built), list(paths.values()), kept)
        if mode(config.logger) == "offline":
            print(f"W&B: kept offline; `wandb sync {workshop.output}/wandb/offline-run-*` uploads it")
    if missing:
        print(told)


def plan_ahead(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Print what is missing and what it costs; make nothing."""
    from landmark.data import SyntheticCorpus

    jobs: dict[str, plan.Job] = {}
    notes: dict[str, None] = {}
    for row in selected:
        for one in row.configs:
            tokenizer, corpus = workshop.tokenizer(one), workshop.prepared(one)
            label = row.name if len(row.configs) == 1 else f"{row.name} seed {one.seed}"
            vocab_size = tokenizer.vocab_size
            if corpus is None:
                notes[f"corpus {one.data.name} is not prepared yet (task=prepare): its sizes are unknown"] = None
                settings = identity.run_settings(one, tokenizer.hash, "")
                name = identity.run_name(one, "?" + identity.digest(settings)[:4])
                run_done, row_done, split_tokens = False, False, None
            else:
                name = workshop.run_folder(one).name
                run_done = one.run is not None or workshop.find_run(one) is not None
                row_done = workshop.find_row(one) is not None
                prompts = one.eval.prompts * one.eval.length
                split_tokens = prompts if isinstance(corpus, SyntheticCorpus) else len(corpus.split(one.eval.split))
            jobs.setdefault(f"run {name}", plan.run_job(name, one, vocab_size, run_done))
            jobs[f"row {label}"] = plan.row_job(label, one, vocab_size, row_done, split_tokens)
    gpus = 0 if config.trainer.accelerator == "cpu" else min(plan.gpus(), device_count(config))
    speed = plan.Machine(hardware()["cores"], gpus, workshop.records.all("runs"))
    print(
        f"plan of {config.name}, size {config.size}",
        *notes,
        "",
        plan.report(list(jobs.values()), speed),
        sep="\n",
    )
    if not notes:
        _say_how_to_spread(config, selected, list(jobs.values()))


def publish_dashboard(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Build a W&B workspace of the experiment's runs and rows, or of the whole project; publish it where W&B is."""
    from landmark.tracking import dashboard

    identities: dict[str, None] = {}
    for one in [one for row in selected for one in row.configs if rows.named(config)]:
        if workshop.prepared(one) is None:
            raise UserError(f"task=dashboard: corpus {one.data.name} is not prepared (task=prepare): no row has a name")
        settings = workshop.row_settings(one)
        identities |= dict.fromkeys((settings["run"], identity.digest(settings)))
    workspace = dashboard.build(config, list(identities))
    if mode(config.logger) == "online":
        print(f"published: {dashboard.publish(workspace)}")
        return
    path = workshop.output / "dashboards" / f"{config.name if identities else 'project'}.json"
    dashboard.write(workspace, path)
    print(f"written: {path}")
    print(
        f"W&B: `wandb login`, `wandb sync {workshop.output}/wandb/offline-run-*`, then this command again publishes it"
    )


def generate(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Print what follows a prompt, as it comes."""
    from landmark.evaluation.asking import Account, answer

    one = _only(config, selected)
    model, tokenizer = workshop.trained_model(one)
    account = Account()
    with ProgressBar("reading") as progress:
        pieces = answer(model, tokenizer, one, account, progress)
        print(next(pieces, ""), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    print(_accounted(account), file=sys.stderr)


def inspect(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Write a page that shows what was retrieved for each token of a text."""
    from landmark.inspector.task import inspect_text

    one = _only(config, selected)
    model, tokenizer = workshop.trained_model(one)
    with ProgressBar("reading") as progress:
        print(inspect_text(model, tokenizer, one, workshop.run_folder(one).name, workshop.output, progress))


def _only(config: Config, selected: list[Row]) -> Config:
    """The configuration of a task that is done with one trained model."""
    if len(selected) > 1:
        raise UserError(f"task={config.task}: {len(selected)} rows, choose one with row=NAME")
    return selected[0].configs[0]


def _evaluate(config: Config, selected: list[Row], workshop: Workshop) -> int:
    """Evaluate the rows; how many had no record before."""
    _check_all(selected, workshop)
    if launcher():
        _check_trained(config, selected, workshop)
    made = 0
    for number, row in enumerate(selected, 1):
        for one in row.configs:
            record, new = workshop.ensure_row(one, name=row.name, group=config.name, overrides=row.overrides)
            made += new
            _say(f"[{number}/{len(selected)}] {row.name}", record, new)
    return made


def _command(config: Config, *more: str, multirun: bool = False) -> str:
    """The command line, without what made it a part of the experiment or a task alone; with `more`."""
    left_out = {"-m", "--multirun", "row", "task", *config.grid.axes, *(word.partition("=")[0] for word in more)}
    program, *words = typed()
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in left_out]
    return shlex.join(["python", program, *["-m"] * multirun, *kept, *more])


def _say_how_to_spread(config: Config, selected: list[Row], jobs: list[plan.Job]) -> None:
    """The commands that train each missing run in a job of its own, and then evaluate each row in one."""
    cluster = "hydra/launcher=submitit_slurm"
    if runs := [job.name for job in jobs if job.kind == "run" and not job.done]:
        print("on a cluster:", _command(config, "task=train", f"run={','.join(runs)}", cluster, multirun=True))
        if rows.named(config):
            names = ",".join(row.name for row in selected)
            print("and then:    ", _command(config, f"row={names}", cluster, multirun=True))


def _check_trained(config: Config, selected: list[Row], workshop: Workshop) -> None:
    """Raise UserError where a run is yet to be trained: jobs beside each other would wait for one to train it."""
    runs = {
        workshop.run_folder(one).name: row.name
        for row in selected
        for one in row.configs
        if workshop.find_row(one) is None and not workshop.is_trained(one)
    }
    if runs:
        command = _command(config, "task=train", f"run={','.join(runs)}", *launching(), multirun=True)
        raise UserError(f"row {next(iter(runs.values()))}: its run is not trained yet, `{command}` trains it")


def _say(title: str, record: dict[str, Any], new: bool) -> None:
    results = record["results"]
    how = f"{results['seconds']:.0f} s" if new else "from its record"
    if "recall_at_10" in results:
        recall = f"{100 * results['recall_at_1']:.2f} % first, {100 * results['recall_at_10']:.2f} % among ten"
        print(f"{title}: of {results['prompts']} texts {recall}, {how}")
        return
    if "accuracy" in results:
        print(f"{title}: {sum(results['correct'])} of {results['prompts']} prompts answered, {how}")
        return
    error = "" if results["perplexity_se"] is None else f" ± {results['perplexity_se']:.2f}"
    perplexity = f"perplexity {results['perplexity']:.2f}{error}"
    print(f"{title}: {perplexity}, {results['bits_per_byte']:.4f} bits/byte, {how}")


def _duration(started: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _check_all(selected: list[Row], workshop: Workshop) -> None:
    """Whatever can be refused is refused before the first run begins."""
    for row in selected:
        for one in row.configs:
            workshop.check_lengths(one)
            workshop.check_devices(one)
            workshop.row_settings(one)


def _accounted(account: "Account") -> str:
    """What an answer took, in a line."""
    said = [f"{account.tokens_read:,} tokens read in {account.seconds_reading:.1f} s"]
    if account.tokens_generated > 1:
        each = account.seconds_generating / (account.tokens_generated - 1)
        said.append(f"{account.tokens_generated:,} generated, {1e3 * each:.1f} ms each")
    if "blocks_kept" in account.stats:
        kept, on_device = (account.stats[f"{name}bytes_kept"] / 1e6 for name in ("", "device_"))
        said.append(
            f"memory of {account.stats['blocks_kept']:,} blocks, {kept:,.1f} MB, {on_device:,.1f} on the device"
        )
    return "; ".join(said)


_TASKS: dict[str, Callable[[Config, list[Row], Workshop], None]] = {
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "table": table,
    "plan": plan_ahead,
    "generate": generate,
    "inspect": inspect,
    "dashboard": publish_dashboard,
}
