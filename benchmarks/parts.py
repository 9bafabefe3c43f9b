"""The parts of the benchmark. Each is measured in a new process."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks import attention, data, generation, growth, memory, training
from benchmarks.report import Report
from benchmarks.settings import Options, progress, use_threads

PARTS = {
    "attention": attention.run,
    "training": training.run,
    "memory": memory.run,
    "growth": growth.run,
    "generation": generation.run,
    "data": data.run,
}


def in_own_process(part: str, options: Options, started: float) -> Report:
    """Measure in a new process, because speed depends on the memory that the allocator holds from earlier parts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, part, options, started).result()


def measure(part: str, options: Options, started: float) -> Report:
    """Measure a part here. started: time at which the benchmark began, for its progress messages."""
    use_threads()
    return PARTS[part](options, progress(started, f"{part}: "))
