"""Where the blocks of a stream begin that end early, found once and kept beside the stream."""

import hashlib
import io
from contextlib import suppress
from dataclasses import astuple

import numpy as np

from landmark.data.stream import Stream
from landmark.utils.block_ends import BlockEnds
from landmark.utils.block_places import block_starts
from landmark.utils.files import write_atomic
from landmark.utils.progress import ProgressBar


def stored_block_starts(stream: Stream, ends: BlockEnds) -> np.ndarray:
    """`block_starts` of a stream, (blocks + 2,) int64, mapped into memory.

    They are kept in a file named by the stream's content and the rule. A damaged file is made again; in a read-only
    folder they are found each time.
    """
    key = repr((stream.sha256, *astuple(ends)))
    path = stream.path.with_name(f"{stream.path.stem}.blocks-{hashlib.sha256(key.encode()).hexdigest()[:10]}.npy")
    with suppress(OSError, ValueError, EOFError):
        starts = np.load(path, mmap_mode="r", allow_pickle=False)
        if starts.dtype == np.int64 and starts.ndim == 1 and len(starts) > 1 and starts[-1] == len(stream):
            return starts
    with ProgressBar(f"blocks of {stream.path.name}") as progress:
        starts = block_starts(np.asarray(stream.tokens), ends, progress)
    file = io.BytesIO()
    np.save(file, starts)
    with suppress(OSError):
        write_atomic(path, file.getvalue())
    return starts
