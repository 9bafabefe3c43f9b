"""`python -m benchmarks.peak PART NAME`: run one competitor once and print the peak memory of this process."""

import argparse
import json
from importlib import import_module

from benchmarks.settings import use_threads
from landmark.utils.hardware import peak_memory_bytes

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("name")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    use_threads()
    import_module(f"benchmarks.{arguments.part}").run_once(arguments.name, arguments.quick)
    print(json.dumps({"peak_memory_bytes": peak_memory_bytes()}))
