"""The simulation of a training step against what must hold, and docs/scaling.md, which it writes."""

from dataclasses import replace

import pytest

from benchmarks import simulation
from benchmarks.simulation import LLAMA, PAPER, Machine, Work, simulate
from landmark.utils.flops import flops_per_token, keys_per_query

IDEAL = Machine(link=1e30, fabric=1e30, latency=0.0)
DATA_PARALLEL = Work(PAPER, 65_536, keys_per_query(512), sharded=False)
SHARDED = Work(LLAMA, 1 << 22, keys_per_query(1 << 15), sharded=True, recomputes=True)


def test_the_page_is_what_the_program_writes():
    assert simulation.PATH.read_text(encoding="utf-8") == simulation.report()


@pytest.mark.parametrize("work", [DATA_PARALLEL, SHARDED])
def test_without_a_network_to_wait_for_gpus_share_the_work(work):
    alone = simulate(work, 1, IDEAL)
    assert alone.seconds == pytest.approx(alone.computing)
    for gpus in (8, 64, 512):
        assert simulate(work, gpus, IDEAL).seconds == pytest.approx(alone.seconds / gpus)


def test_a_step_on_one_gpu_is_its_flops():
    """Those that a plan counts, of the published sizes, with attention as long as that of flash attention."""
    assert PAPER.layers * PAPER.layer == pytest.approx(151e6, rel=0.01)
    assert LLAMA.weights == pytest.approx(8.03e9, rel=0.01)
    machine = replace(Machine(), attention=1.0)
    flops = DATA_PARALLEL.tokens * flops_per_token(PAPER.weights, PAPER.layers, PAPER.width, DATA_PARALLEL.keys)
    expected = flops / (machine.utilisation * machine.peak)
    assert simulate(DATA_PARALLEL, 1, machine).seconds == pytest.approx(expected)
    again = simulate(replace(DATA_PARALLEL, recomputes=True), 1, machine).seconds
    assert again == pytest.approx(expected * 4 / 3)
