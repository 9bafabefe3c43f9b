"""Triton's kernels are interpreted in the tests, which so need no GPU; processes beside each other take one thread each."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is when they are first run
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
