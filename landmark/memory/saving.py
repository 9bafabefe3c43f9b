"""A memory saved on disk: memory.json, tensors.safetensors (landmarks, pending tokens), layer-<n>.blocks."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.memory.block_files import SavedRows
from landmark.memory.block_store import BlockStore
from landmark.memory.carried import CarriedStates
from landmark.memory.layer import LayerMemory
from landmark.utils.errors import UserError
from landmark.utils.files import inside, read_json, write_atomic, write_json
from landmark.utils.leftovers import delete_leftovers, locked

FORMAT = 2
SETTINGS = {
    "block_size": "model.block_size",
    "rope_base": "model.rope_base",
    "mapping": "positions.mapping",
    "key_offset": "model.key_offset",
    "landmark_key": "model.landmark_key",
    "local_blocks": "model.local_blocks",
    "uneven": "uneven blocks (model.block_ends)",
    "landmark_values": "model.landmark_values",
    "joint_softmax": "model.joint_softmax",
}
CONTENT, TENSORS = "memory.json", "tensors.safetensors"
CARRIED = "carried."  # prefix of the hidden states of the last places
PIECE = 1 << 24  # bytes of blocks read or written at a time


@dataclass(frozen=True)
class Identity:
    """The settings that must be equal in a memory and in the saved memory that it loads.

    model: a string that identifies the model; None: unknown. The others are settings of `Memory`.
    """

    block_size: int
    rope_base: float | list[float]
    mapping: str
    key_offset: float
    landmark_key: str
    local_blocks: int
    uneven: bool
    landmark_values: bool
    joint_softmax: float
    model: str | None


def save(
    folder: Path, identity: Identity, position: int, layers: dict[int, LayerMemory], carried: CarriedStates
) -> None:
    """See `landmark.memory.Memory.save`.

    Blocks are written oldest first, as rows in the format of `landmark.memory.tiers.DeviceBlocks.rows`.

    Args:
        folder: the new folder.
        identity: of the memory.
        position: stream positions committed, landmarks included.
        layers: by number.
        carried: hidden states of the last places.
    """
    if any(layer.chunk is not None for layer in layers.values()):
        raise RuntimeError("a chunk is not committed yet: call commit() before save()")
    if folder.exists():
        raise UserError(f"{folder} exists already: delete it, or save the memory to another folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    delete_leftovers(folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"))
    try:
        temporary.mkdir(parents=True)
        with locked(temporary):
            _write_layers(layers, carried, temporary)
            counts = {str(n): {"added": layer.store.added, "kept": len(layer.store)} for n, layer in layers.items()}
            content = {"format": FORMAT, **asdict(identity), "position": position, "layers": counts}
            write_json(temporary / CONTENT, content)
            temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: the memory could not be saved ({error.strerror}), nothing is left of it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(
    folder: Path,
    identity: Identity,
    max_blocks: int | None,
    new_layer: Callable[[], LayerMemory],
    device: torch.device,
) -> tuple[int, dict[int, LayerMemory], CarriedStates]:
    """See `landmark.memory.Memory.load`.

    Args:
        folder: a folder that `save` has written.
        identity: of the memory that loads it.
        max_blocks: most blocks that this memory keeps in each layer; None: all.
        new_layer: makes an empty layer.
        device: of the loaded tensors.

    Returns the stream positions committed, the layers, and the hidden states of the last places.
    """
    if not (folder / CONTENT).is_file():
        raise UserError(f"{folder} holds no saved memory: {CONTENT} is missing")
    # Of versions that had no such settings.
    earlier = {"local_blocks": 0, "uneven": False, "landmark_values": False, "joint_softmax": 0.0}
    content = earlier | read_json(folder / CONTENT)
    _check(identity, max_blocks, content, folder)
    try:
        with safe_open(inside(folder, TENSORS), "pt", device=str(device)) as tensors:
            loaded = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} is missing or damaged ({error}): save the memory again") from error
    layers = {}
    for layer, counts in content["layers"].items():
        if not layer.isdecimal():
            raise UserError(f"{folder / CONTENT}: {layer!r} is no layer number: save the memory again")
        path = inside(folder, f"layer-{layer}.blocks")
        parts = {name.partition(".")[2]: x for name, x in loaded.items() if name.startswith(f"{layer}.")}
        layers[int(layer)] = state = new_layer()
        state.pending = parts["pending_keys"], parts["pending_values"]
        state.last_key, state.weights = parts.get("last_key"), parts.get("pending_weights")
        state.queries = parts.get("queries")
        if counts["kept"]:
            _fill(state.store, counts["added"], counts["kept"], parts, path, content["block_size"])
    states = {name.removeprefix(CARRIED): x for name, x in loaded.items() if name.startswith(CARRIED)}
    return content["position"], layers, CarriedStates(states)


def _write_layers(layers: dict[int, LayerMemory], carried: CarriedStates, folder: Path) -> None:
    tensors = {f"{CARRIED}{name}": x.contiguous() for name, x in carried.states.items()}
    for layer, state in layers.items():
        store = state.store
        runs = [rows for rows, _ in store.runs(store.added - len(store), len(store))]
        for name in ("landmarks", "means", "landmark_values"):
            if (x := getattr(store, name)).numel():
                tensors[f"{layer}.{name}"] = torch.cat([x[:, :, rows] for rows in runs], 2).contiguous()
        if store.sizes is not None:
            tensors[f"{layer}.sizes"] = torch.cat([store.sizes[rows] for rows in runs])
        assert state.pending is not None
        tensors[f"{layer}.pending_keys"], tensors[f"{layer}.pending_values"] = map(Tensor.contiguous, state.pending)
        if state.last_key is not None:
            tensors[f"{layer}.last_key"] = state.last_key.contiguous()
        if state.queries is not None:
            tensors[f"{layer}.queries"] = state.queries.contiguous()
        if state.weights is not None:
            tensors[f"{layer}.pending_weights"] = state.weights.contiguous()
        with open(folder / f"layer-{layer}.blocks", "wb") as file:
            for rows in runs:
                step = max(1, PIECE // (store.block_bytes * store.landmarks[:, :, 0, 0].numel()))
                for start in range(rows.start, rows.stop, step):
                    piece = store.blocks.rows(start, min(step, rows.stop - start))
                    file.write(piece.flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    write_atomic(folder / TENSORS, save_tensors(tensors))


def _check(identity: Identity, max_blocks: int | None, content: dict[str, Any], folder: Path) -> None:
    """Raise UserError where a memory with this identity cannot load the saved one."""
    if content.get("format") != FORMAT:
        raise UserError(f"{folder}: the memory has format {content.get('format')}, this version reads {FORMAT}")
    expected = asdict(identity)
    for key, setting in SETTINGS.items():
        if content[key] != expected[key]:
            raise UserError(f"{folder} was saved with {setting}={content[key]}, here it is {expected[key]}")
    if content["model"] != expected["model"]:
        raise UserError(f"{folder} was read by another model: only the model that made a memory can load it")
    for counts in content["layers"].values():
        kept = counts["kept"]
        if kept < counts["added"] and (max_blocks is None or max_blocks > kept):
            raise UserError(
                f"memory.blocks={max_blocks}: {folder} has only the last {kept} blocks; set memory.blocks={kept}"
            )


def _fill(store: BlockStore, added: int, kept: int, parts: dict[str, Tensor], path: Path, block_size: int) -> None:
    """Put saved blocks into an empty store: all, or the newest ones if it keeps fewer."""
    landmarks = parts["landmarks"]
    batch, heads, _, dim = landmarks.shape
    like = parts["pending_keys"].new_empty(batch, heads, 0, block_size, dim)
    if store.keep_means and "means" not in parts:
        raise UserError(f"{path.parent} was saved without the mean keys that retrieval.scorer=mean_key ranks by")
    wanted = min(kept, store.max_blocks or kept)
    row_bytes = 2 * batch * heads * block_size * dim * like.element_size()
    if (size := path.stat().st_size if path.is_file() else 0) < kept * row_bytes:
        raise UserError(f"{path} is cut short: it has {size:,} bytes of {kept * row_bytes:,}; save the memory again")
    in_place = store.tier.name == "disk" and store.max_blocks is None
    store.reserve(min(added, store.max_blocks or added), like, SavedRows(path, kept) if in_place else None)
    store.added = added
    if "sizes" in parts:
        store.sizes = parts["sizes"].new_empty(store.capacity)
    with open(path, "rb") as file:
        file.seek((kept - wanted) * row_bytes)
        for rows, part in store.runs(added - wanted, wanted):
            of_saved = slice(kept - wanted + part.start, kept - wanted + part.stop)
            store.landmarks[:, :, rows] = landmarks[:, :, of_saved]
            if store.keep_means:
                store.means[:, :, rows] = parts["means"][:, :, of_saved]
            if store.keep_landmark_values:
                store.landmark_values[:, :, rows] = parts["landmark_values"][:, :, of_saved]
            if store.sizes is not None:
                store.sizes[rows] = parts["sizes"][of_saved]
            step = max(1, PIECE // row_bytes)
            for start in range(rows.start, rows.stop, step) if not in_place else ():
                count = min(step, rows.stop - start)
                piece = torch.frombuffer(bytearray(file.read(count * row_bytes)), dtype=like.dtype).to(like.device)
                piece = piece.view(count, batch, heads, 2, block_size, dim).permute(3, 1, 2, 0, 4, 5)
                store.blocks.write(start, *piece)
