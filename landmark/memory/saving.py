"""A memory on disk: `memory.json`, `tensors.safetensors` (landmarks, pending tokens), `layer-<n>.blocks`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.memory.block_files import Saved
from landmark.memory.block_store import BlockStore
from landmark.utils.errors import UserError
from landmark.utils.files import inside, read_json, write_atomic, write_json

if TYPE_CHECKING:
    from landmark.memory.memory import Memory

FORMAT = 1
SETTINGS = {"block_size": "model.block_size", "rope_base": "model.rope_base", "mapping": "positions.mapping"}
CONTENT, TENSORS = "memory.json", "tensors.safetensors"
PIECE = 1 << 24  # bytes of blocks read or written at a time


def save(memory: Memory, folder: Path) -> None:
    """See `Memory.save`. Blocks are written oldest first, a row as `landmark.memory.tiers.Blocks.rows` has it."""
    if any(layer.chunk is not None for layer in memory.layers.values()):
        raise RuntimeError("a chunk has been attended to and not committed: commit() before save()")
    if folder.exists():
        raise UserError(f"{folder} exists already: delete it, or save the memory somewhere else")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write(memory, temporary)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: the memory could not be saved ({error.strerror}), nothing is left of it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(memory: Memory, folder: Path, device: torch.device) -> None:
    """See `Memory.load`."""
    if not (folder / CONTENT).is_file():
        raise UserError(f"{folder} holds no saved memory: {CONTENT} is missing")
    content = read_json(folder / CONTENT)
    _check(memory, content, folder)
    try:
        with safe_open(inside(folder, TENSORS), "pt", device=str(device)) as tensors:
            loaded = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} is missing or damaged ({error}): save the memory again") from error
    layers = {}
    for layer, counts in content["layers"].items():
        if not layer.isdecimal():
            raise UserError(f"{folder / CONTENT}: {layer!r} is no layer: save the memory again")
        path = inside(folder, f"layer-{layer}.blocks")
        parts = {name.partition(".")[2]: x for name, x in loaded.items() if name.startswith(f"{layer}.")}
        layers[int(layer)] = state = memory.new_layer()
        state.pending = parts["pending_keys"], parts["pending_values"]
        if counts["kept"]:
            _fill(state.store, counts["added"], counts["kept"], parts, path, content["block_size"])
    memory.layers, memory.position = layers, content["position"]


def _write(memory: Memory, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for layer, state in memory.layers.items():
        store = state.store
        runs = list(store.runs(store.added - len(store), len(store)))
        for name, x in {"landmarks": store.landmarks, "means": store.means}.items():
            if x.numel():
                parts = [x[:, :, row : row + part.stop - part.start] for row, part in runs]
                tensors[f"{layer}.{name}"] = torch.cat(parts, 2).contiguous()
        assert state.pending is not None
        tensors[f"{layer}.pending_keys"], tensors[f"{layer}.pending_values"] = map(Tensor.contiguous, state.pending)
        with open(folder / f"layer-{layer}.blocks", "wb") as file:
            for row, part in runs:
                step = max(1, PIECE // (store.block_bytes * store.landmarks[:, :, 0, 0].numel()))
                for start in range(row, row + part.stop - part.start, step):
                    rows = store.blocks.rows(start, min(step, row + part.stop - part.start - start))
                    file.write(rows.flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    write_atomic(folder / TENSORS, save_tensors(tensors))
    write_json(folder / CONTENT, _content(memory))


def _content(memory: Memory) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "block_size": memory.block_size,
        "rope_base": memory.rope_base,
        "mapping": memory.mapping,
        "model": None if memory.model is None else memory.model(),
        "position": memory.position,
        "layers": {
            str(layer): {"added": state.store.added, "kept": len(state.store)} for layer, state in memory.layers.items()
        },
    }


def _check(memory: Memory, content: dict[str, Any], folder: Path) -> None:
    """Raise UserError where the saved memory is not one that this memory can go on from."""
    if content.get("format") != FORMAT:
        raise UserError(f"{folder}: a memory in format {content.get('format')}, this version reads {FORMAT}")
    expected = _content(memory)
    for key, setting in SETTINGS.items():
        if content[key] != expected[key]:
            raise UserError(f"{folder} was saved with {setting}={content[key]}, here it is {expected[key]}")
    if content["model"] != expected["model"]:
        raise UserError(f"{folder} was read by another model: a memory is of use only to the weights that made it")
    for counts in content["layers"].values():
        kept = counts["kept"]
        if kept < counts["added"] and (memory.max_blocks is None or memory.max_blocks > kept):
            raise UserError(
                f"memory.blocks={memory.max_blocks}: {folder} has only the last {kept} blocks; set memory.blocks={kept}"
            )


def _fill(store: BlockStore, added: int, kept: int, parts: dict[str, Tensor], path: Path, block_size: int) -> None:
    """Put saved blocks, the newest where not all are wanted, into an empty store."""
    landmarks = parts["landmarks"]
    batch, heads, _, dim = landmarks.shape
    like = landmarks.new_empty(batch, heads, 0, block_size, dim)
    if store.keep_means and "means" not in parts:
        raise UserError(f"{path.parent} was saved without the mean keys that retrieval.scorer=mean_key ranks by")
    wanted = min(kept, store.max_blocks or kept)
    row_bytes = 2 * batch * heads * block_size * dim * landmarks.element_size()
    if (size := path.stat().st_size if path.is_file() else 0) < kept * row_bytes:
        raise UserError(f"{path} is cut short: it has {size:,} bytes of {kept * row_bytes:,}; save the memory again")
    in_place = store.tier.name == "disk" and store.max_blocks is None
    store.reserve(min(added, store.max_blocks or added), like, Saved(path, kept) if in_place else None)
    store.added = added
    with open(path, "rb") as file:
        file.seek((kept - wanted) * row_bytes)
        for row, part in store.runs(added - wanted, wanted):
            of_saved = slice(kept - wanted + part.start, kept - wanted + part.stop)
            rows = slice(row, row + part.stop - part.start)
            store.landmarks[:, :, rows] = landmarks[:, :, of_saved]
            if store.keep_means:
                store.means[:, :, rows] = parts["means"][:, :, of_saved]
            step = max(1, PIECE // row_bytes)
            for start in range(rows.start, rows.stop, step) if not in_place else ():
                count = min(step, rows.stop - start)
                piece = torch.frombuffer(bytearray(file.read(count * row_bytes)), dtype=like.dtype).to(like.device)
                piece = piece.view(count, batch, heads, 2, block_size, dim).permute(3, 1, 2, 0, 4, 5)
                store.blocks.write(start, *piece)
