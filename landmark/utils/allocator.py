"""Reuse of freed memory on a CPU.

glibc gives the memory of a large tensor back to the system as soon as the tensor is freed. Each training step then
gets the same pages again, empty, one page fault at a time: more than a third of a step's time where the logits of a
vocabulary of 8192 take 36 MB.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = (1 << 30, 1 << 25)  # bytes of a tensor whose memory is reused; glibc before 2.35 takes no more than 32 MiB


def reuse_freed_memory() -> bool:
    """Let this process keep the memory that it frees, up to 2 GiB, for its next tensors. Returns whether it does.

    Larger tensors are given back as before. Where the C library is not glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST) and bool(mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
