"""task=evaluate: evaluate the rows, and train the runs that they need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from landmark.cli.command import Command
from landmark.config.command_line import started
from landmark.experiment.jobs import Job
from landmark.experiment.records import Record
from landmark.utils.errors import Diverged, UserError


def run(command: Command) -> None:
    """Raises UserError as `evaluate` does, and at the end where rows diverged."""
    evaluate(command).check()


@dataclass
class Evaluated:
    """records: of the rows that have one for each seed. made: how many were made now. diverged: names of other rows."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    made: int = 0
    diverged: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise UserError where rows diverged."""
        if self.diverged:
            count = f"{len(self.diverged)} row{'s' * (len(self.diverged) > 1)} diverged"
            raise Diverged(f"{count} and left no record: {', '.join(self.diverged)}; the lines above say where")


def evaluate(command: Command) -> Evaluated:
    """Make missing records, and print a line for each row. Rows that diverge do not end the others."""
    jobs = command.jobs()
    if started().launcher:
        _check_trained(command, jobs)
    done, names, lost = Evaluated(), [row.name for row in command.rows], set()
    number = started().number if not command.is_experiment else None

    def place(at: int) -> str:
        return f"[{at}/{len(names)}]" if number is None else f"#{number}"

    found: dict[str, Record] = {}  # by their rows' identities
    for job in command.runner.in_turn(jobs):
        title = f"{place(names.index(job.name) + 1)} {job.name}"
        try:
            if lost & {job.run.id, job.run.start and job.run.start.id}:
                raise Diverged("its run diverged")
            record, is_new = command.runner.evaluate(job)
        except Diverged as error:
            print(f"{title}: {error}")
            done.diverged += [job.name] if job.name not in done.diverged else []
            lost |= {run.id for run in (job.run, job.run.start) if run and not command.runner.is_trained(run)}
            continue
        found[job.id] = record
        done.made += is_new
        print(f"{title}: {summary(record, is_new)}, {job.run.folder}")
    for job in jobs:
        if job.name not in done.diverged:
            done.records.setdefault(job.name, []).append(found[job.id])
    return done


def _check_trained(command: Command, jobs: Sequence[Job]) -> None:
    """Raise UserError where a run is not trained yet: jobs beside each other would wait for one to train it."""
    runner = command.runner
    missing = [job for job in jobs if runner.records.find("rows", job.id) is None and not runner.is_trained(job.run)]
    if missing:
        runs = ",".join(dict.fromkeys(job.run.folder.name for job in missing))
        suggested = command.suggest("task=train", f"run={runs}", *started().launcher_words, multirun=True)
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
