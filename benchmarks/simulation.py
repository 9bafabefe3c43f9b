"""What 1, 8, 64 and 512 GPUs do, by a simulation of a training step: `python -m benchmarks.simulation`.

It writes docs/scaling.md. A step is a list of layers; each is computed in turn, and the network sends what the layers
need or have made, one thing at a time, while others are computed. What is assumed stands in `Machine`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.settings import GPT2Vocabulary, composed
from landmark.experiment.runs.plan import Cost, run_cost
from landmark.utils.files import write_atomic
from landmark.utils.flops import PEAK_BF16_FLOPS, keys_per_query
from landmark.utils.source_tree import ROOT

PATH = ROOT / "docs" / "scaling.md"
RUNS = (  # of Tables 1 to 3 and Figures 5 and 6
    *("model=transformer", "model=landmark", "model=transformer_xl"),
    *("data=arxiv_math model=transformer", "data=arxiv_math model=landmark"),
    *(f"schedule=paper_60k model=landmark{extra}" for extra in ("", " cmt=on", " positions=jumps")),
)
GPUS = (1, 8, 64, 512)
HALF, SINGLE = 2, 4  # bytes of a number
STATE = 16  # bytes of a weight in training: itself, its gradient and two moments, in float32


@dataclass(frozen=True)
class Machine:
    """Nodes of H100s, by their data sheets, and what is assumed of them.

    peak: FLOP/s, dense bfloat16. utilisation: the share of it that matrix products reach, and all around them takes no
    time. attention: time of landmark attention by that of causal flash attention. Both as measured on an H200. node:
    GPUs of a node. link: bytes/s that a GPU sends to others of its node. fabric: bytes/s that a node sends to others.
    reached: share of both that collective operations reach, assumed. latency: seconds of each of their steps, assumed.
    memory: bytes of a GPU.
    """

    peak: float = PEAK_BF16_FLOPS["H100"]
    utilisation: float = 0.2
    attention: float = 1.3
    node: int = 8
    link: float = 450e9
    fabric: float = 8 * 50e9
    reached: float = 0.8
    latency: float = 10e-6
    memory: float = 80e9

    def ring(self, size: float, gpus: int) -> float:
        """Seconds to gather `size` bytes from all GPUs to all, or to sum them into shares."""
        if gpus == 1:
            return 0.0
        speed = self.link if gpus <= self.node else min(self.link, self.fabric)
        return (gpus - 1) / gpus * size / (speed * self.reached) + self.latency * (gpus - 1).bit_length()


@dataclass(frozen=True)
class Model:
    """The shape of a decoder. matrices: of the MLP, 3 where it is gated. tied: whether table and head are one."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    matrices: int
    vocabulary: int
    tied: bool

    @property
    def dim(self) -> int:
        return self.width // self.heads

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return 2 * self.width * (self.width + self.kv_heads * self.dim) + self.matrices * self.width * self.mlp

    @property
    def weights(self) -> int:
        return self.layers * self.layer + self.vocabulary * self.width * (1 if self.tied else 2)


PAPER = Model(12, 1024, 8, 8, 4096, 2, 50304, tied=True)
LLAMA = Model(32, 4096, 32, 8, 14336, 3, 128256, tied=False)  # Llama 3 8B


@dataclass(frozen=True)
class Work:
    """What is trained.

    tokens: of a step, of all GPUs. keys: mean number that a query attends to. sharded: whether weights, gradients and
    moments are shared out (FSDP), or kept by each GPU (DDP). recomputes: whether the forward pass is done again in the
    backward pass.
    """

    model: Model
    tokens: float
    keys: float
    sharded: bool
    recomputes: bool = False


@dataclass(frozen=True)
class Step:
    """seconds: of a step. computing: those in which a GPU computes."""

    seconds: float
    computing: float

    @property
    def waiting(self) -> float:
        """The share in which it waits."""
        return max(0.0, 1 - self.computing / self.seconds)


def simulate(work: Work, gpus: int, machine: Machine) -> Step:
    """A step, from the first layer's forward pass to the last gradient."""
    model, own = work.model, work.tokens / gpus
    products = 2 * own / (machine.utilisation * machine.peak)  # seconds of a weight
    attention = 4 * own * work.keys * model.width / (machine.utilisation * machine.peak) * machine.attention
    head = model.vocabulary * model.width
    forward = [*[products * model.layer + attention] * model.layers, products * head]
    weights = [*[model.layer] * model.layers, model.weights - model.layers * model.layer]
    backward = [(3 if work.recomputes else 2) * each for each in forward]

    computed = network = 0.0
    for size, seconds in zip(weights, forward, strict=True):
        if work.sharded:
            network += machine.ring(size * HALF, gpus)
            computed = max(computed, network)
        computed += seconds
    for size, seconds in zip(reversed(weights), reversed(backward), strict=True):
        computed += seconds
        if gpus > 1:
            times = 1 if work.sharded else 2  # shares of the sum, or the sum for all
            network = max(network, computed) + times * machine.ring(size * SINGLE, gpus)
    return Step(max(computed, network), sum(forward) + sum(backward))


def fits(work: Work, gpus: int, machine: Machine, window: float) -> bool:
    """Whether states, copies of the weights, and the inputs of all layers of a window fit into a GPU's memory."""
    model = work.model
    states = STATE * model.weights / (gpus if work.sharded else 1)
    copies = HALF * model.weights if work.sharded else 0
    inputs = window * model.width * model.layers * HALF
    return states + copies + inputs < 0.9 * machine.memory


def of_paper(run: Cost) -> Work:
    """A run of the paper's size. Its mean number of keys follows from its FLOPs."""
    keys = (run.flops / run.tokens - 6 * PAPER.weights) / (12 * PAPER.layers * PAPER.width)
    return Work(PAPER, run.tokens / run.config.train.steps, keys, sharded=False)


def every_run() -> list[Cost]:
    """The runs of the paper's size, as `task=plan` counts them."""
    configs = {run: composed(*run.split()) for run in RUNS}
    return [run_cost(run, config, GPT2Vocabulary.vocab_size, False) for run, config in configs.items()]


def time_in_turns(times: Iterable[float], places: int) -> float:
    """When all pieces of work are done, if the longest start first, each at the first place that is free."""
    ends = [0.0] * places
    for time in sorted(times, reverse=True):
        ends.sort()
        ends[0] += time
    return max(ends)


def shortest(runs: Sequence[Cost], gpus: int, machine: Machine) -> tuple[float, int]:
    """Hours to train all runs, and on how many GPUs each of them: the fastest way."""
    ways = []
    for each in (2**n for n in range(8)):  # the paper's batch has 128 windows
        if each <= gpus:
            hours = [simulate(of_paper(run), each, machine).seconds * run.config.train.steps / 3600 for run in runs]
            ways.append((time_in_turns(hours, gpus // each), each))
    return min(ways)


def of_step(runs: Sequence[Cost], machine: Machine) -> Iterable[list[str]]:
    """A line for each number of GPUs: a step of the landmark model, and all runs."""
    landmark = of_paper(next(run for run in runs if run.name == "model=landmark"))
    alone = simulate(landmark, 1, machine).seconds
    for gpus in GPUS:
        hours, each = shortest(runs, gpus, machine)
        most = min(gpus, 128)
        step = simulate(landmark, most, machine)
        speedup = f"{alone / step.seconds:.0f}" + (f" (on {most})" if most < gpus else "")
        yield [str(gpus), f"{1e3 * step.seconds:.0f}", speedup, f"{step.waiting:.0%}", f"{hours:.1f}", str(each)]


def of_llama(machine: Machine) -> Iterable[list[str]]:
    """A line for each window: tokens a second by number of GPUs."""
    for window, name in ((4_096, "4 K"), (32_768, "32 K"), (131_072, "128 K")):
        line = [name]
        for gpus in GPUS[1:]:
            work = Work(LLAMA, max(1 << 22, window * gpus), keys_per_query(window), sharded=True, recomputes=True)
            speed = work.tokens / simulate(work, gpus, machine).seconds
            line.append(f"{speed:,.0f}" if fits(work, gpus, machine, window) else "does not fit")
        yield line


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def report() -> str:
    """The text of docs/scaling.md."""
    runs = every_run()
    machine, thin = Machine(), replace(Machine(), fabric=50e9)
    large = replace(machine, utilisation=LARGE)
    *_, slow = of_step(runs, thin)
    step = ["GPUs", "ms a step", "speed-up", "waiting", "h, all eight runs", "GPUs of a run"]
    llama = ["window", *(f"tokens/s on {gpus} GPUs" for gpus in GPUS[1:])]
    return TEXT.format(
        machine=machine,
        gpu="../benchmarks/README.md#on-a-gpu",
        peak=f"{machine.peak / 1e12:.0f}",
        link=f"{machine.link / 1e9:.0f}",
        adapter=f"{machine.fabric / 8e9:.0f}",
        latency=f"{machine.latency * 1e6:.0f}",
        weights=f"{PAPER.weights / 1e6:.0f}",
        llama_weights=f"{LLAMA.weights / 1e9:.1f}",
        step=table(step, of_step(runs, machine)),
        thin_hours=slow[4],
        llama=table(llama, of_llama(large)),
        large=f"{LARGE:.0%}",
    )


LARGE = 0.4  # utilisation of large matrices, assumed

TEXT = """# What 1, 8, 64 and 512 GPUs do

These numbers are simulated. One GPU was measured, but no traffic between GPUs. `python -m benchmarks.simulation` writes
this page. It computes the layers of a training step one after the other, while the network sends one thing at a time.
It assumes:

| assumed | value | from |
| --- | ---: | --- |
| matrix products of an H100 | {machine.utilisation:.0%} of {peak} TFLOP/s | data sheet; [measured]({gpu}), paper |
| the same, a model of 8 B weights | {large} | assumed |
| landmark attention | {machine.attention} × causal flash attention | 1.23 to 1.29 on an H200, ℓ = 50 |
| a GPU sends to its node of {machine.node} | {machine.reached:.0%} of {link} GB/s | data sheet; the share is assumed |
| a node sends to others | {machine.reached:.0%} of 8 adapters of {adapter} GB/s | data sheet; the share is assumed |
| each of the log₂ n steps of a collective operation | {latency} µs | assumed |

## The paper's models

The model has {weights} M weights (`trainer=ddp`, gradients in float32). A step has 128 windows of 512 tokens, so a run
cannot use more than 128 GPUs. `waiting` is the share of a step in which GPUs compute nothing. The hours are for the
eight runs of Tables 1 to 3 and Figures 5 and 6. The last column is the number of GPUs for each run that finishes all
runs first.

{step}

Small models on many GPUs wait for their gradients, so several runs at once use a cluster better. With one adapter a
node, 512 GPUs take {thin_hours} hours for the eight runs.

## A model of 8 B weights

It has the shape of Llama 3 8B ({llama_weights} B weights). With `trainer=fsdp` each GPU holds a part of the weights,
gradients and moments. The backward pass computes the forward pass again. A step has four million tokens, or a window
for each GPU if that is more. No GPU waits for more than 0.5 % of a step.

{llama}

## A pretrained model's Table 1, on one GPU

This command has not been run on a GPU yet. It teaches Gemma 3 270M landmarks, and trains the same model on the same
text without them, on 25 M tokens each; then it evaluates the rows of
[Table 1 with a pretrained model](../experiments/table1_pretrained/README.md):

```sh
timeout 570 python run.py -m +experiment=table1_pretrained size=small model.name=gemma-3-270m.gguf \\
    train.steps=1500 train.batch_size=32 train.checkpoint_every=100 model.dtype=bfloat16 logger=csv \\
    task=evaluate data.path=books
```

A step has 16,384 tokens, for which the loss of the head needs 512 MB at a time. It goes on as below. With
`train.steps=200` it is a matter of minutes; run it first. On a CPU the command was rehearsed with a tiny Llama and
`train.steps=150 train.batch_size=8`: six calls, each stopped after 90 seconds, made both trainings and all 23 rows.

## The paper's tables at size small, on one GPU

This command has not been run on a GPU yet. It trains the three models of Table 1 with 25 M parameters (without
embeddings) on 131 M tokens each, and evaluates the rows of five tables with them:

```sh
timeout 570 python run.py -m \\
    +experiment=table1_pg19,table2_granularity,sweep_k_local,figure5_unique_blocks,ablation_retrieval \\
    size=small train.steps=2000 trainer.compile=true logger=csv task=evaluate \\
    data.path=books tokenizer.file=gpt2.tiktoken
```

After 570 seconds `timeout` stops the command: a training ends with a checkpoint, and the same command continues it.
Unfinished rows begin anew. Leave half a minute between this limit and the limit of a job. `task=table` makes the tables
from `outputs/records`, without weights or a GPU. `+debug=limit` is a first try.

**On a machine without a network** the command needs this source tree, `gpt2.tiktoken`, and the corpus: `task=prepare`
writes it into a folder of `outputs/data` (36 MB when compressed), and such a folder is a `data.path`. Beside PyTorch,
Triton and Lightning it needs the wheels of hydra-core, altair and their dependencies (2 MB). `LANDMARK_COMMIT` names
the commit for the records. This was rehearsed with tiny models on two CPU cores (Python 3.12, PyTorch 2.11). Eight
calls, each stopped after four minutes, made all 56 rows.

**Speed.** `size=small` trained at 8.5 % of an H200's peak. Since then the kernels of a landmark model's step fell from
2087 to 1327 (1031 with `trainer.compile=true`). It was not timed again.
"""


def main() -> None:
    write_atomic(PATH, report())


if __name__ == "__main__":
    main()
