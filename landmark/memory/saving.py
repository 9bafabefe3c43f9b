"""A memory saved on disk: memory.json, tensors.safetensors (landmarks, pending tokens), layer-<n>.blocks, hashes."""

import glob
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.memory.layer import LayerMemory
from landmark.memory.store import BlockStore
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import (
    Keys,
    check_keys,
    delete_leftovers,
    locked,
    read_hashes,
    read_json,
    sync_folder,
    write_atomic,
    write_hashes,
    write_json,
)
from landmark.utils.trust import inside

FORMAT = 2
IDENTITY = {  # what must be equal in a memory that loads another, as the user knows it
    "block_size": "model.block_size",
    "landmark_key": "model.landmark_key",
    "rope_base": "model.rope_base",
    "mapping": "positions.mapping",
    "key_offset": "model.key_offset",
    "alpha": "model.alpha",
    "model": "model",
}
CONTENT, TENSORS, HASHES = "memory.json", "tensors.safetensors", "memory.sha256"
KEYS = {"format": int, "block_size": int, "position": int, "layers": dict}
REMEDY = "save the memory again"
SAME = (
    "was read by another model: only the model that made a memory can load it, with the same weights and adapters "
    "(merging an adapter changes the weights)"
)
SUMMARIES = {"landmarks": "landmark", "means": "mean_key"}  # and the scorer that ranks by each
Place = str | torch.device | Callable[[int], torch.device]
PIECE = 1 << 24  # bytes of blocks read or written at a time


def save(
    folder: Path,
    identity: Mapping[str, Any],
    position: int,
    layers: Mapping[int, LayerMemory],
    others: Mapping[str, bytes],
) -> None:
    """See `landmark.memory.Memory.save`. identity: of the memory, with the keys of IDENTITY.

    Blocks are written oldest first, as rows in the format of `landmark.memory.store.tiers.DeviceBlocks.rows`.
    """
    if any(layer.chunk is not None for layer in layers.values()):
        raise RuntimeError("a chunk is not committed yet: call commit() before save()")
    with new_folder(folder) as temporary:
        tensors = {}
        for number, layer in layers.items():
            tensors |= {f"{number}.{name}": x for name, x in _tensors(layer).items()}
            _write_blocks(layer.store, temporary / _blocks(number))
        write_atomic(temporary / TENSORS, save_tensors(tensors))
        counts = {str(n): {"added": layer.store.added, "kept": len(layer.store)} for n, layer in layers.items()}
        write_json(temporary / CONTENT, {"format": FORMAT, **identity, "position": position, "layers": counts})
        for name, content in others.items():
            write_atomic(temporary / name, content)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which gets its name and the hashes of its files when the context ends.

    Raises UserError, and leaves nothing behind, where the folder exists or the disk is full.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: delete it, or save the memory to another folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    delete_leftovers(folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"))
    try:
        temporary.mkdir(parents=True)
        with locked(temporary):
            yield temporary
            write_hashes(temporary, [path.name for path in temporary.iterdir()], HASHES)
            temporary.rename(folder)
            sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"{folder}: the memory could not be saved ({error.strerror}), nothing is left of it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(
    folder: Path,
    identity: Mapping[str, Any],
    max_blocks: int | None,
    new_layer: Callable[[], LayerMemory],
    device: Place,
) -> tuple[int, dict[int, LayerMemory]]:
    """The stream positions committed, and the layers, of a saved memory: see `landmark.memory.Memory.load`.

    identity, max_blocks: of the memory that loads it. new_layer: makes an empty layer.
    """
    content = read_content(folder, KEYS)
    blocks = []
    for number, counts in content["layers"].items():
        if not number.isdecimal():
            raise UserError(f"{folder / CONTENT}: {number!r} is no layer number: {REMEDY}")
        check_keys(counts, {"added": int, "kept": int}, f"{folder / CONTENT}: layer {number}", REMEDY)
        if not 0 <= counts["kept"] <= counts["added"]:
            raise UserError(f"{folder / CONTENT}: layer {number} kept {counts['kept']} of {counts['added']}: {REMEDY}")
        blocks.append(_blocks(number))
    read_hashes(folder, (TENSORS, *blocks), HASHES, REMEDY)
    _check(identity, max_blocks, content, folder)
    layers = {}
    try:
        with safe_open(inside(folder, TENSORS), "pt") as tensors:
            loaded = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
        for number, counts in content["layers"].items():
            layers[int(number)] = layer = new_layer()
            place = device_of(device, int(number))
            parts = {name.partition(".")[2]: x.to(place) for name, x in loaded.items() if name.startswith(f"{number}.")}
            summaries = {name: parts.pop(name) for name in SUMMARIES if name in parts}
            layer.between = parts
            if counts["added"] * (content["block_size"] + 1) + layer.num_pending != content["position"]:
                raise ValueError(f"layer {number} has not read position={content['position']}")
            if counts["kept"]:
                batch, heads, _, dim = summaries["landmarks"].shape
                like = parts["pending_keys"].new_empty(batch, heads, 0, content["block_size"], dim)
                _fill(layer.store, counts, inside(folder, _blocks(number)), summaries, like)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:  # RuntimeError: it is deleted
        raise UserError(f"{folder / TENSORS} is missing or damaged ({in_one_line(error)}): {REMEDY}") from error
    return content["position"], layers


def device_of(device: Place, layer: int) -> torch.device:
    """The device of a layer."""
    return torch.device(device(layer) if callable(device) else device)


def read_content(folder: Path, keys: Keys = MappingProxyType({})) -> dict[str, Any]:
    """The memory.json of a saved memory, all of whose files are as they were saved, with these keys, or UserError."""
    if not (folder / CONTENT).exists():
        raise UserError(f"{folder} holds no saved memory: {CONTENT} is missing")
    content = read_json(folder / CONTENT, {"format": int}, REMEDY)
    if content["format"] != FORMAT:
        raise UserError(f"{folder}: the memory has format {content['format']}, this version reads {FORMAT}")
    if missing := keys.keys() - content.keys():
        how = "with" if "landmarks" in missing else "without"
        raise UserError(f"{folder} is the memory of a text {how} landmarks, {CONTENT} has no {sorted(missing)[0]}")
    check_keys(content, keys, str(folder / CONTENT), REMEDY)
    if content.get("position", 0) < 0:
        raise UserError(f"{folder / CONTENT}: position is {content['position']}, below 0: {REMEDY}")
    read_hashes(folder, {path.name for path in folder.iterdir()} - {HASHES}, HASHES, REMEDY)
    return content


def _blocks(number: int | str) -> str:
    return f"layer-{number}.blocks"


def _tensors(layer: LayerMemory) -> dict[str, Tensor]:
    """The tensors of a layer, except the blocks' keys and values, by name."""
    store = layer.store
    runs = [rows for rows, _ in store.runs(store.added - len(store), len(store))]
    summaries = {name: torch.cat([x[:, :, rows] for rows in runs], 2) for name, x in store.summaries.items() if runs}
    return {name: x.contiguous() for name, x in (summaries | layer.between).items()}


def _write_blocks(store: BlockStore, path: Path) -> None:
    with open(path, "wb") as file:
        for rows, _ in store.runs(store.added - len(store), len(store)):
            step = max(1, PIECE // (store.block_bytes * store.landmarks[:, :, 0, 0].numel()))
            for start in range(rows.start, rows.stop, step):
                piece = store.blocks.rows(start, min(step, rows.stop - start))
                file.write(piece.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _check(identity: Mapping[str, Any], max_blocks: int | None, content: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError where a memory with this identity cannot load the saved one."""
    if unknown := sorted(content.keys() - IDENTITY.keys() - KEYS.keys()):
        raise UserError(f"{folder} was saved with {unknown[0]}={content[unknown[0]]}, which this version does not have")
    for key, setting in IDENTITY.items():
        saved = content.get(key)
        if saved != identity[key] and key == "model":
            raise UserError(f"{folder} {SAME}")
        if saved != identity[key]:
            raise UserError(f"{folder} was saved with {setting}={saved}, here it is {identity[key]}")
    for counts in content["layers"].values():
        kept = counts["kept"]
        if kept < counts["added"] and (max_blocks is None or max_blocks > kept):
            raise UserError(
                f"memory.blocks={max_blocks}: {folder} has only the last {kept} blocks; set memory.blocks={kept}"
            )


def _fill(
    store: BlockStore, counts: Mapping[str, int], path: Path, summaries: Mapping[str, Tensor], like: Tensor
) -> None:
    """Put saved blocks like (B, H, 0, ℓ, d), and their summaries, into an empty store: all, or the newest that fit."""
    added, rows_saved = counts["added"], counts["kept"]
    if missing := store.summaries.keys() - summaries.keys():
        scorer = next(SUMMARIES[name] for name in missing)
        raise UserError(f"{path.parent} was saved without the keys that retrieval.scorer={scorer} needs")
    batch, heads, _, block_size, dim = like.shape
    row_bytes = 2 * batch * heads * block_size * dim * like.element_size()
    if (size := path.stat().st_size if path.is_file() else 0) < rows_saved * row_bytes:
        raise UserError(f"{path} is cut short: it has {size:,} bytes of {rows_saved * row_bytes:,}; {REMEDY}")
    wanted = min(rows_saved, store.max_blocks or rows_saved)
    store.reserve(added, like)
    store.added = added
    with open(path, "rb") as file:
        file.seek((rows_saved - wanted) * row_bytes)
        for rows, part in store.runs(added - wanted, wanted):
            of_saved = slice(rows_saved - wanted + part.start, rows_saved - wanted + part.stop)
            for name, summary in store.summaries.items():
                summary[:, :, rows] = summaries[name][:, :, of_saved]
            step = max(1, PIECE // row_bytes)
            for start in range(rows.start, rows.stop, step):
                count = min(step, rows.stop - start)
                piece = torch.frombuffer(bytearray(file.read(count * row_bytes)), dtype=like.dtype)
                piece = piece.view(count, batch, heads, 2, block_size, dim).permute(3, 1, 2, 0, 4, 5)
                store.blocks.write(start, *piece)
