"""Triton's kernels are interpreted in the tests, which so need no GPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is when they are first run
