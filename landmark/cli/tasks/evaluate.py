"""task=evaluate: evaluate the rows, and train the runs that they need."""

from collections.abc import Sequence

from landmark.cli.command import Command
from landmark.config.command_line import launcher, launcher_words
from landmark.experiment.jobs import Job
from landmark.experiment.records import Record
from landmark.utils.errors import UserError


def run(command: Command) -> tuple[dict[str, list[Record]], int]:
    """Make missing records, and print a line for each row. Returns the records by row, and how many were made."""
    jobs = command.jobs()
    if launcher():
        _check_trained(command, jobs)
    records: dict[str, list[Record]] = {}
    made = 0
    for job in jobs:
        record, is_new = command.runner.evaluate(job)
        records.setdefault(job.name, []).append(record)
        made += is_new
        print(f"[{len(records)}/{len(command.rows)}] {job.name}: {summary(record, is_new)}, {job.run.folder}")
    return records, made


def _check_trained(command: Command, jobs: Sequence[Job]) -> None:
    """Raise UserError where a run is not trained yet: jobs beside each other would wait for one to train it."""
    runner = command.runner
    missing = [job for job in jobs if runner.records.find("rows", job.id) is None and not runner.is_trained(job.run)]
    if missing:
        runs = ",".join(dict.fromkeys(job.run.folder.name for job in missing))
        suggested = command.suggest("task=train", f"run={runs}", *launcher_words(), multirun=True)
        raise UserError(f"row {missing[0].name}: its run is not trained yet, `{suggested}` trains it")


def summary(record: Record, is_new: bool) -> str:
    """What a row measured, in some words. is_new: whether it was evaluated now."""
    results = record["results"]
    how = f"{results['seconds']:.0f} s" if is_new else "from its record"
    if "recall_at_10" in results:
        recall = f"{100 * results['recall_at_1']:.2f} % first, {100 * results['recall_at_10']:.2f} % among ten"
        return f"of {results['prompts']} texts {recall}, {how}"
    if "accuracy" in results:
        if any(share % 1 for share in results["correct"]):  # prompts with several answers
            return f"{100 * results['accuracy']:.1f} % of the answers to {results['prompts']} prompts given, {how}"
        return f"{sum(results['correct']):.0f} of {results['prompts']} prompts answered, {how}"
    if "second_copy" in results:
        return f"first copy {results['first_copy']:.4f}, second {results['second_copy']:.4f} nats a token, {how}"
    if "recall" in results:
        return f"{100 * results['recall']:.1f} % of {results['tokens']} values recalled, {how}"
    error = "" if results["perplexity_se"] is None else f" ± {results['perplexity_se']:.2f}"
    bits = f"{results['bits_per_byte']:.4f} bits/byte" if "bits_per_byte" in results else "of hidden tokens"
    return f"perplexity {results['perplexity']:.2f}{error}, {bits}, {how}"
