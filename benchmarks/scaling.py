"""The cost of the paper's tables on one GPU, on a node and on a cluster: `python -m benchmarks.scaling`.

It writes scaling.md beside this file. FLOPs are those of `task=plan`. With `--output DIR` the utilisation is measured:
the median over the runs of the paper's size in DIR that were trained on GPUs. Without, two values are assumed.
"""

import argparse
import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from landmark.config import Config, register, rows, to_config
from landmark.experiment import identity, plan
from landmark.experiment.plan import Cost
from landmark.experiment.records import Records
from landmark.utils.files import write_atomic
from landmark.utils.flops import PEAK_BF16_FLOPS
from landmark.utils.locations import ROOT

PATH = ROOT / "benchmarks" / "scaling.md"
EXPERIMENTS = (
    *("table1_pg19", "table1_arxiv", "table2_granularity", "table3_cmt"),
    *("figure5_unique_blocks", "figure6_positional_jumps"),
)
VOCABULARY = 50304  # of tokenizer=gpt2
GPU = "H100"
PEAK = PEAK_BF16_FLOPS[GPU]
LINK = 450e9  # bytes/s that an H100 can send over NVLink, by its data sheet
ASSUMED = (0.2, 0.4)
CPU_RESULTS = ROOT / "benchmarks" / "results" / "2-core-cpu.csv"


@dataclass(frozen=True)
class Cluster:
    """Nodes that each train one run at a time, on all of their GPUs."""

    nodes: int
    gpus: int

    def hours(self, runs: Iterable[Cost], utilisation: float) -> float:
        """Hours until all runs are trained, if the longest start first."""
        return time_in_turns((run.flops / (self.gpus * utilisation * PEAK) / 3600 for run in runs), self.nodes)


def time_in_turns(times: Iterable[float], places: int) -> float:
    """When all pieces of work are done, if the longest start first, each at the first place that is free."""
    ends = [0.0] * places
    for time in sorted(times, reverse=True):
        ends.sort()
        ends[0] += time
    return max(ends)


CLUSTERS = {"1 GPU": Cluster(1, 1), "4 GPUs": Cluster(1, 4), "32 GPUs": Cluster(4, 8)}


def composed(overrides: list[str]) -> DictConfig:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=overrides)


def costs(experiment: str) -> tuple[dict[str, Cost], list[Cost]]:
    """The runs of an experiment at the paper's size, by identity, and its rows, as if each read a million tokens."""
    overrides = [f"+experiment={experiment}"]
    runs: dict[str, Cost] = {}
    evaluations = []
    for row in rows.select(to_config(composed(overrides)), overrides, composed):
        for one in row.configs:
            run = identity.digest(identity.run_settings(one, one.tokenizer.name, one.data.name))
            runs.setdefault(run, plan.run_cost(described(one), one, VOCABULARY, False))
            evaluations.append(plan.row_cost(row.name, one, VOCABULARY, False, 1_000_000))
    return runs, evaluations


def every_run() -> list[Cost]:
    """The runs of all experiments."""
    return list(_once(costs(experiment)[0] for experiment in EXPERIMENTS).values())


def _once(experiments: Iterable[dict[str, Cost]]) -> dict[str, Cost]:
    every: dict[str, Cost] = {}
    for runs in experiments:
        every |= {run: job for run, job in runs.items() if run not in every}
    return every


def described(config: Config) -> str:
    """A name for a run that differs from those of the other runs."""
    extras = ["context miss token"] * config.cmt.enabled + ["positional jumps"] * (config.positions.kind == "jumps")
    return ", ".join([config.model.kind, config.data.name, *extras, f"{config.train.steps // 1000}K steps"])


def utilisations(output: Path | None) -> dict[str, float]:
    """Model FLOPs utilisation by its title."""
    records = [] if output is None else Records(output).all("runs")
    measured = [
        record["results"]["mfu"]
        for record in records
        if record["labels"]["size"] == "paper" and record["results"].get("mfu")
    ]
    if measured:
        return {f"{statistics.median(measured):.0%} MFU, measured": statistics.median(measured)}
    return {f"{value:.0%} MFU": value for value in ASSUMED}


def on_cpu() -> tuple[float, float]:
    """FLOP/s of the small landmark model's training step, as the benchmark measured it, and as a plan assumes."""
    with open(CPU_RESULTS, encoding="utf-8") as file:
        (step,) = (
            row
            for row in csv.DictReader(file)
            if (row["part"], row["setting"], row["measured"]) == ("training", "small, 4 × 512", "landmark")
            and row["against"] == "plain transformer"
        )
    config = to_config(composed(["model=landmark", "size=small"]))
    cost = plan.run_cost("", config, VOCABULARY, False)
    flops = 4 * 512 * cost.flops / cost.tokens
    return flops / (float(step["value"]) / 1e3), 2 * plan.CPU_CORE


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def report(output: Path | None = None) -> str:
    """The text of scaling.md."""
    assumed = utilisations(output)
    made = {experiment: costs(experiment) for experiment in EXPERIMENTS}
    every = _once(runs for runs, _ in made.values())

    def hours(runs: Iterable[Cost]) -> list[str]:
        runs = list(runs)
        return [f"{cluster.hours(runs, value):,.1f}" for value in assumed.values() for cluster in CLUSTERS.values()]

    def of_run(job: Cost) -> list[str]:
        alone = [f"{job.flops / (value * PEAK) / 3600:,.1f}" for value in assumed.values()]
        return [job.name, f"{job.tokens / 1e9:.2f}", f"{job.flops / job.tokens / 1e9:.3f}", f"{job.flops:.2e}", *alone]

    def of_experiment(name: str, runs: Iterable[Cost], evaluations: list[Cost]) -> list[str]:
        trained, read = list(runs), sum(job.flops for job in evaluations)
        flops = sum(job.flops for job in trained)
        return [name, str(len(trained)), f"{flops:.2e}", str(len(evaluations)), f"{read:.1e}", *hours(trained)]

    lines = [of_experiment(name, runs.values(), evaluations) for name, (runs, evaluations) in made.items()]
    rows_of_all = [job for _, evaluations in made.values() for job in evaluations]
    lines.append(of_experiment("**all, each run once**", every.values(), rows_of_all))
    times = [f"{cluster}, {name}" for name in assumed for cluster in CLUSTERS]
    measured, planned = on_cpu()
    shortest = min(every.values(), key=lambda job: job.flops / job.config.train.steps)
    step = shortest.flops / shortest.config.train.steps / (ASSUMED[-1] * PEAK)
    gradients = 4.0 * shortest.parameters[0]
    sent = {n: 2 * (n - 1) / n * gradients for n in (1, 4, 8)}
    batch = shortest.config.train.batch_size
    traffic = [
        [str(n), str(batch // n), f"{1e3 * step / n:.0f}", f"{size / 1e9:.2f}", f"{1e3 * size / LINK:.1f}"]
        for n, size in sent.items()
    ]
    source = "measured" if output is not None and len(assumed) == 1 else "assumed: no GPU was measured yet"
    return TEXT.format(
        gpu=GPU,
        peak=f"{PEAK / 1e12:.0f}",
        source=source,
        runs=table(
            ["run", "tokens, 10⁹", "GFLOPs a token", "FLOPs", *(f"h, {name}" for name in assumed)],
            map(of_run, every.values()),
        ),
        experiments=table(
            [
                "experiment",
                "runs",
                "FLOPs to train",
                "rows",
                "FLOPs to evaluate 10⁶ tokens",
                *(f"h, {time}" for time in times),
            ],
            lines,
        ),
        traffic=table(
            [
                "GPUs",
                "windows each",
                f"ms a step at {ASSUMED[-1]:.0%}",
                "GB sent by each",
                f"ms at {LINK / 1e9:.0f} GB/s",
            ],
            traffic,
        ),
        share=f"{sent[8] / LINK / (step / 8):.0%}",
        measured=f"{measured / 1e9:.0f}",
        planned=f"{planned / 1e9:.0f}",
        plan_mfu=f"{plan.GPU / PEAK:.0%}",
    )


TEXT = """# What the paper's tables cost

`python -m benchmarks.scaling` writes this page from the FLOPs of `task=plan`, and a test compares the two. Training
takes 6 FLOPs a token for each parameter and 12 · layers · width for each key attended. An evaluation takes a third of
that. Hours are FLOPs / (GPUs · peak · MFU). The peak is the {gpu}'s {peak} TFLOP/s in dense bfloat16. The MFU (model
FLOPs utilisation) is the share of the peak that a training reaches.

**The MFU is {source}.** `task=plan` assumes {plan_mfu} for a GPU, until runs of that kind and size on such a machine
have a record; then it uses their speed. `python -m benchmarks.scaling --output outputs` writes this page with the MFU
of the runs of the paper's size that were trained on GPUs. On a CPU the speed was measured: a training step of the
small landmark model reaches {measured} GFLOP/s on two cores ([benchmarks](README.md)), and `task=plan` assumes
{planned}.

## Runs

Each run is trained once, even if several tables need it.

{runs}

## Tables

32 GPUs are four nodes of eight, and every run has a node of its own: three runs take as long as the longest one. On
four GPUs and on one, the runs follow each other. The hours do not include evaluations; a column has the FLOPs of all
rows for a million tokens of the split (for arXiv Math: for the four million that are read).

{experiments}

## Communication between GPUs

Every GPU sends its gradients once a step (float32, 2·(n−1)/n of their bytes in a ring). Part of this overlaps with the
backward pass. For the run with the shortest step:

{traffic}

With eight GPUs this is {share} of a step if nothing overlaps; the hours above do not include it. A run can train on
several nodes ([how](../docs/cluster.md)); the links between nodes, which are slower, have not been measured.

## Commands

On one GPU, or on all GPUs of a machine:

```bash
python run.py +experiment=table1_pg19 task=plan
python run.py +experiment=table1_pg19
python run.py +experiment=table1_pg19 trainer=ddp
```

On a cluster, prepare the corpus first, then train each run on a node of its own, then evaluate each row on a GPU. After
the preparation, `task=plan` prints the second and the third command with the names of the runs and rows:

```bash
python run.py +experiment=table1_pg19 task=prepare
python run.py -m +experiment=table1_pg19 task=train run=RUN1,RUN2 trainer=ddp hydra/launcher=submitit_slurm \\
    hydra.launcher.gpus_per_node=8
python run.py -m +experiment=table1_pg19 row=plain_512,landmark_2048_k4 hydra/launcher=submitit_slurm
python run.py +experiment=table1_pg19 task=table
```

The other tables are started in the same way, with their names.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder whose records give the MFU")
    write_atomic(PATH, report(parser.parse_args().output))


if __name__ == "__main__":
    main()
