"""A memory saved on disk: memory.json, for each layer layer-<n>.safetensors, and their hashes."""

import glob
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from landmark.memory.landmarks.block_store import COPIED, LANDMARKS
from landmark.memory.landmarks.layer import LayerMemory
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import (
    Keys,
    check_keys,
    delete_leftovers,
    locked,
    name_in_errors,
    read_hashes,
    read_json,
    sync_folder,
    write_atomic,
    write_hashes,
    write_json,
)
from landmark.utils.trust import inside

FORMAT = 3
CONTENT, TENSORS, HASHES = "memory.json", "tensors.safetensors", "memory.sha256"
KEYS = {"format": int, "position": int, "layers": dict}
REMEDY = "save the memory again"
SAME = (
    "was read by another model: only the model that made a memory can load it, with the same weights, model.bits and "
    "adapters (merging an adapter changes the weights)"
)
K = "retrieval.k"
BLOCKS = "blocks"  # of a layer's tensors: rows (n, B, H, 2, ℓ, d), oldest first; blocks.<name>: their summaries
_log = logging.getLogger(__name__)
Place = str | torch.device | Callable[[int], torch.device]


def save(
    folder: Path,
    identity: Mapping[str, Any],
    position: int,
    layers: Mapping[int, LayerMemory],
    others: Mapping[str, bytes],
) -> None:
    """See `landmark.memory.Memory.save`. identity: of the memory, by the user's names."""
    if any(layer.chunk is not None for layer in layers.values()):
        raise RuntimeError("a chunk is not committed yet: call commit() before save()")
    with new_folder(folder) as temporary:
        for number, layer in layers.items():
            with name_in_errors(folder):
                save_file(_tensors(layer), temporary / _file(number))
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
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
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
    if K in content:  # which earlier versions left out
        check_keys(content, {K: int}, str(folder / CONTENT), REMEDY)
    files = {}
    for number, counts in content["layers"].items():
        if not number.isdecimal():
            raise UserError(f"{folder / CONTENT}: {number!r} is no layer number: {REMEDY}")
        check_keys(counts, {"added": int, "kept": int}, f"{folder / CONTENT}: layer {number}", REMEDY)
        if not 0 <= counts["kept"] <= counts["added"]:
            raise UserError(f"{folder / CONTENT}: layer {number} kept {counts['kept']} of {counts['added']}: {REMEDY}")
        files[int(number)] = inside(folder, _file(number)), counts
    _check(identity, max_blocks, content, folder)
    layers = {}
    for number, (path, counts) in files.items():
        layers[number] = layer = new_layer()
        try:
            with safe_open(path, "pt") as tensors:
                _fill(layer, tensors, counts, device_of(device, number))
                if counts["added"] * (identity["model.block_size"] + 1) + layer.num_pending != content["position"]:
                    raise ValueError(f"layer {number} has not read position={content['position']}")
                _check_shapes(layer, layer.store.summaries if counts["kept"] else {})
        except (UserError, torch.OutOfMemoryError):
            raise
        except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:  # RuntimeError: it is gone
            raise UserError(f"{path} is missing or damaged ({in_one_line(error)}): {REMEDY}") from error
    return content["position"], layers


def _check_shapes(layer: LayerMemory, summaries: Mapping[str, Tensor]) -> None:
    """Raise ValueError where pending tokens (B, H, n, d) and summaries (B, H, blocks, d) do not fit each other."""
    pending = layer.pending or ()
    kinds = {(x.ndim, *x.shape[:2]) for x in [*layer.between.values(), *summaries.values()]}
    sizes = {x.shape[3:] for x in [*pending, *summaries.values()]}
    if len(kinds) > 1 or len(sizes) > 1 or len({x.shape for x in pending}) > 1:
        raise ValueError("its tensors do not fit each other")


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


def check_read(folder: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise UserError where a memory was read with another setting than it would be here. saved: what its file says,
    which earlier versions left open.
    """
    if missing := sorted(own.keys() - saved.keys()):
        _log.warning("%s does not say with which %s it was read: use the same here", folder, ", ".join(missing))
    for key, value in own.items():
        if saved.get(key, value) != value:
            raise UserError(f"{folder} was read with {key}={saved[key]}, here it is {value}: set {key}={saved[key]}")


def _file(number: int | str) -> str:
    return f"layer-{number}.safetensors"


def _tensors(layer: LayerMemory) -> dict[str, Tensor]:
    """The tensors of a layer by name."""
    stored = list(layer.store.stored(layer.store.added))
    tensors = dict(layer.between)
    if stored:
        tensors[BLOCKS] = torch.cat([rows for rows, _ in stored])
        for name in layer.store.summaries:
            tensors[f"{BLOCKS}.{name}"] = torch.cat([summaries[name] for _, summaries in stored], 2)
    return {name: x.contiguous() for name, x in tensors.items()}


def _check(identity: Mapping[str, Any], max_blocks: int | None, content: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError where a memory with this identity cannot load the saved one."""
    if unknown := sorted(content.keys() - identity.keys() - KEYS.keys()):
        raise UserError(f"{folder} was saved with {unknown[0]}={content[unknown[0]]}, which this version does not have")
    own_k, added = identity[K], max((counts["added"] for counts in content["layers"].values()), default=0)
    if min(own_k, added) != min(content.get(K, added), added):  # below, all blocks are read
        check_read(folder, content, {K: own_k})
    for key, own in identity.items():
        if key != K and (saved := content.get(key)) != own:
            raise UserError(f"{folder} {SAME if key == 'model' else f'was saved with {key}={saved}, here it is {own}'}")
    for counts in content["layers"].values():
        kept = counts["kept"]
        if kept < counts["added"] and (max_blocks is None or max_blocks > kept):
            raise UserError(
                f"memory.blocks={max_blocks}: {folder} has only the last {kept} blocks; set memory.blocks={kept}"
            )


def _fill(layer: LayerMemory, tensors: Any, counts: Mapping[str, int], place: torch.device) -> None:
    """Put saved tensors into an empty layer, of its blocks all, or the newest that fit."""
    names, store, kept = set(tensors.keys()), layer.store, counts["kept"]
    layer.between = {name: tensors.get_tensor(name).to(place) for name in names if not name.startswith(BLOCKS)}
    if not kept:
        return
    summaries = {name: f"{BLOCKS}.{name}" for name in store.summaries}
    if summaries.keys() - {LANDMARKS} and not names.issuperset(summaries.values()):
        raise UserError("the memory was saved without the keys that retrieval.scorer=mean_key needs")
    saved, blocks = {name: tensors.get_tensor(key) for name, key in summaries.items()}, tensors.get_slice(BLOCKS)
    if (count := blocks.get_shape()[0]) != kept:
        raise ValueError(f"{count} blocks are saved, not {kept}")
    first = kept - min(kept, store.max_blocks or kept)
    store.added = counts["added"] - kept + first
    for start in range(first, kept, COPIED):
        piece = slice(start, min(start + COPIED, kept))
        keys, values = blocks[piece].permute(3, 1, 2, 0, 4, 5).to(place)
        if start == first:
            store.reserve(counts["added"], values)
        store.add_stored(keys, values, {name: x[:, :, piece] for name, x in saved.items()})
