"""Bytes that processes send for one layer of a long window, or of a long memory, beside ring attention.

    unshare --net sh -c 'ip link set lo up; torchrun --standalone --nproc-per-node=4 -m benchmarks.ranks'

Measured: what the loopback interface sent, which has no other traffic in a network namespace of its own. Formula: n
processes, H heads of d channels of 4 bytes, k blocks a query, a memory of N tokens read c at a time.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from landmark.attention import Window, landmark_attention
from landmark.extensions.ranks import MemoryOverRanks, attention_over_ranks
from landmark.results.figures import drawing
from landmark.results.figures.marks import Point, curves, point
from landmark.results.figures.style import COLOURS, Look
from landmark.utils.files import write_atomic
from landmark.utils.ranks import Ranks

HEADS, DIM, LENGTH, BLOCK, K, LOCAL = 8, 64, 2048, 63, 4, 256
FLOAT = 4  # bytes
LAYER = 1  # in the first one landmarks are equal
OURS, RING = "blocks stay, outputs are sent", "ring attention"
LENGTHS = (1024, 4096, 16384, 65536)  # of a memory
PICTURE = Path(__file__).parent / "ranks.png"


def on_loopback() -> int:
    """Bytes that the loopback interface has sent."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def measured(ranks: Ranks, work: Callable[[], object], tokens: int, times: int = 4) -> tuple[float, float]:
    """Bytes a token that all processes sent, by the interface and by the count of `Ranks`."""
    work()
    dist.barrier()
    before, ranks.sent = on_loopback(), 0.0
    dist.barrier()  # or others had begun to send
    for _ in range(times):
        work()
    dist.barrier()
    return (on_loopback() - before) / times / tokens, ranks.size * ranks.sent / times / tokens


def ring(ranks: Ranks, k: Tensor, v: Tensor) -> None:
    """What ring attention sends in a forward pass: keys and values go round."""
    for _ in range(ranks.size - 1):
        k, v = ranks.passed_on(k), ranks.passed_on(v)


def filled(ranks: Ranks, tokens: int) -> MemoryOverRanks:
    """A memory of one layer with this many tokens."""
    memory = MemoryOverRanks(BLOCK, ranks, K)
    for _ in range(tokens // LOCAL):
        q, k, v = torch.randn(3, 1, HEADS, LOCAL, DIM)
        memory.attend(LAYER, q, k, v)
        memory.commit()
    return memory


def draw(points: Sequence[Point], processes: int) -> bytes:
    """A PNG: bytes sent for a token against the length of the memory."""
    x = {"title": "tokens in memory", "scale": {"type": "log"}, "axis": {"values": LENGTHS, "format": ",d"}}
    y = {"title": "bytes sent for a token, one layer", "scale": {"type": "log"}, "axis": {"format": "~s"}}
    looks = {OURS: Look(COLOURS["landmark"]), RING: Look(COLOURS["transformer"], "square", filled=False)}
    return drawing.png(f"{processes} processes", [[curves("A memory over several processes", points, looks, x, y)]])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same text everywhere
    ranks, channels = Ranks(), HEADS * DIM * FLOAT
    n = ranks.size
    own = [torch.randn(1, HEADS, LENGTH // n, DIM) for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return landmark_attention(q, k, v, Window(BLOCK, torch.zeros(1, dtype=torch.int64)))[0]

    rows = [
        (
            f"a window of {LENGTH} tokens, heads exchanged",
            "4 (n−1)/n · 4Hd",
            4 * (n - 1) / n * channels,
            *measured(ranks, lambda: attention_over_ranks(attend, own[0], own[1], own[2], ranks), LENGTH),
        ),
        (
            f"a window of {LENGTH} tokens, ring",
            "2 (n−1) · 4Hd",
            2 * (n - 1) * channels,
            *measured(ranks, lambda: ring(ranks, *own[1:]), LENGTH),
        ),
    ]
    points: list[Point] = []
    for tokens in LENGTHS:
        memory, chunk = filled(ranks, tokens), torch.randn(3, 1, HEADS, LOCAL, DIM)

        def read(memory: MemoryOverRanks = memory, chunk: Tensor = chunk) -> None:
            q, k, v = chunk
            memory.attend(LAYER, q, k, v)
            memory.discard()

        best, merged = n * (n - 1) * K * (FLOAT + 8), 2 * (n - 1) * FLOAT * (DIM + 2)
        rows.append(
            (
                f"a memory of {tokens} tokens, shared out",
                "H (12 n(n−1) k + 8 (n−1)(d+2))",
                HEADS * (best + merged),
                *measured(ranks, read, LOCAL),
            )
        )
        points.append(point(OURS, tokens, rows[-1][-2]))
        stored = [torch.randn(1, HEADS, tokens // n, DIM) for _ in range(2)]
        rows.append(
            (
                f"a memory of {tokens} tokens, ring",
                "2 (n−1) N/c · 4Hd",
                2 * (n - 1) * tokens / LOCAL * channels,
                *measured(ranks, functools.partial(ring, ranks, *stored), LOCAL, 1),
            )
        )
        points.append(point(RING, tokens, rows[-1][-2]))
    if ranks.rank == 0:
        print(f"{n} processes, H={HEADS}, d={DIM}, k={K}, chunks of c={LOCAL} tokens; bytes a token, forward\n")
        print("| one layer | formula | by it | counted | measured |\n| --- | --- | ---: | ---: | ---: |")
        for name, formula, value, interface, counted in rows:
            assert math.isclose(counted, value), (name, counted, value)
            print(f"| {name} | {formula} | {value:,.0f} | {counted:,.0f} | {interface:,.0f} |")
        write_atomic(PICTURE, draw(points, n))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
