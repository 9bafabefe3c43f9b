"""The files that W&B keeps of its runs."""

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, FRAME = 7, 32768, 7  # bytes of W&B's files, which are logs of LevelDB
WHOLE, LAST = 1, 4  # kinds of a frame that end a record


def earlier_points(place: Path, identity: str) -> set[tuple[int, str]]:
    """Delete what earlier attempts at a run left offline. Where W&B's server has points of one, all stay, to be synced
    in any order: then the steps and metrics in their files. place: W&B's folder.
    """
    folders = list(place.glob(f"offline-run-*-{identity}*"))  # of two in a second one ends in -1
    online = list(place.glob(f"run-*-{identity}*"))
    if not online and not any(file for folder in folders for file in folder.glob("*.sync*")):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return set()
    points = set()
    for record in (
        record for folder in [*folders, *online] for path in folder.glob("*.wandb") for record in records(path)
    ):
        values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if "trainer/global_step" in values:
            points |= {(int(values["trainer/global_step"]), name) for name in values}
    return points


def is_whole(place: Path, identity: str) -> bool:
    """Whether some attempt at a run was logged to its end. place: W&B's folder."""
    files = [file for folder in place.glob(f"*run-*-{identity}*") for file in folder.glob("*.wandb")]
    return any(record.WhichOneof("record_type") == "exit" for file in files for record in records(file))


def records(path: Path) -> Iterator[Any]:
    """The records in a file of W&B's, up to the one that is cut where its process was killed."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + FRAME <= len(data):
        if (left := BLOCK - at % BLOCK) < FRAME:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += FRAME + length
        whole += data[at - length : at]
        if kind in (WHOLE, LAST):
            try:
                record = Record.FromString(whole)
            except DecodeError:
                return
            if at <= len(data):
                yield record
            whole = b""
