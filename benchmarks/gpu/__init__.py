"""Ten minutes of a GPU: what the kernels compute, then how long they take. `python -m benchmarks.gpu --list`."""
