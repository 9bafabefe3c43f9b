"""A .gguf file: its keys, and where its tensors are. It is mapped into memory, and read where a tensor is used."""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landmark.models.gguf.types import KINDS, PLAIN
from landmark.utils.errors import UserError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG = 256  # values of an array that does not stay in the file
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. shape: as torch has it. kind: a name of `PLAIN` or `KINDS`."""

    file: Mapped
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        """Its weights."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        if self.kind in PLAIN:
            return self.count * PLAIN[self.kind].itemsize
        return self.count // KINDS[self.kind].block * KINDS[self.kind].bytes

    def part(self, number: int) -> Stored:
        """One of the tensors that its first dimension counts, as the matrix of one expert."""
        offset = self.offset + number * (self.size // self.shape[0])
        return replace(self, name=f"{self.name}[{number}]", shape=self.shape[1:], offset=offset)

    def rows(self) -> Tensor:
        """Its bytes, a row each: all dimensions but the last are rows. Pages are read where they are used."""
        flat = torch.frombuffer(self.file.map, dtype=torch.uint8, count=self.size, offset=self.offset)
        return flat.view(prod(self.shape[:-1]), -1)

    def release(self) -> None:
        """Let the system drop the pages that were read, which it would count as this program's memory."""
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.file.map.madvise(mmap.MADV_DONTNEED, start, self.offset + self.size - start)

    def digest(self) -> str:
        """Hex SHA-256 of type, shape and bytes."""
        return _digest(self)


@lru_cache(None)
def _digest(tensor: Stored) -> str:
    digest = hashlib.sha256(f"{tensor.kind} {tensor.shape}\n".encode())
    digest.update(tensor.rows().numpy().data)
    return digest.hexdigest()


class Mapped:
    """A file, mapped. Copies of a model share it; one that comes out of a pickle maps it again."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            # Copy on write, because torch takes no memory that cannot be written to; nothing is written.
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __deepcopy__(self, _: Any) -> Mapped:
        return self

    def __reduce__(self) -> Any:
        return Mapped, (self.path,)


@dataclass(frozen=True)
class LongArray:
    """A long array of a header, as the tokens of a vocabulary, which would take 31 MB: it is read where it is used."""

    file: Mapped
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        header = _Header(self.file)
        header.position = self.start
        return iter(header.array())


class GGUF:
    """The keys and tensors of a file, or of all parts of a split one. path: of the file, or of any part.

    keys: of an array of more than 256 values a `LongArray`.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises UserError, naming file and fault, where it is damaged, cut short, no language model, or not whole."""
        self.path = Path(path)
        self.keys, self.tensors = _read(self.path)
        self.files = [self.path]
        if (count := self.keys.get("split.count", 1)) > 1:
            self._read_parts(count)
        if self.architecture == "clip" or self.keys.get("general.type", "model") != "model":
            kind = "vision projector" if self.architecture == "clip" else self.keys["general.type"]
            raise UserError(f"{path} is no language model, but a {kind}: name the file of the model beside it")
        for tensor in self.tensors.values():
            if tensor.kind not in PLAIN | KINDS:
                raise UserError(
                    f"{path}: tensor {tensor.name} is of type {tensor.kind}, which is not read; read are "
                    f"{', '.join(PLAIN | KINDS)}: get a file as Q4_K_M or Q8_0"
                )
            self._check_place(tensor)

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of the content of the file, or of all parts."""
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _read_parts(self, count: int) -> None:
        """Read all parts of a split file; keys are those of the first one."""
        match = _SPLIT.fullmatch(self.path.name)
        if match is None or int(match[3]) != count:
            raise UserError(f"{self.path} is a part of {count}, but not named …-00001-of-{count:05d}.gguf: name it so")
        self.files = [self.path.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
        if missing := [each.name for each in self.files if not each.is_file()]:
            raise UserError(f"{self.path} is a part of {count}: {missing[0]} is missing beside it")
        parts = [_read(each) for each in self.files]
        self.keys = parts[0][0]
        self.tensors = {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
        if (whole := self.keys.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise UserError(f"{self.path}: its parts hold {len(self.tensors)} tensors, not {whole}: get them again")

    def _check_place(self, tensor: Stored) -> None:
        block = 1 if tensor.kind in PLAIN else KINDS[tensor.kind].block
        if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % block:
            raise UserError(f"{self.path}: tensor {tensor.name} has the shape {tensor.shape}: get the file again")
        if tensor.offset + tensor.size > (length := len(tensor.file.map)):
            raise UserError(
                f"{tensor.file.path} is cut short: tensor {tensor.name} ends at byte {tensor.offset + tensor.size:,} "
                f"of {length:,}: get it again"
            )


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a .gguf file, which need not be there."""
    return str(path).endswith(".gguf")


def opened(path: str | Path) -> GGUF:
    """The file, whose header is read again only after the file has changed. Raises UserError as `GGUF`."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return _opened(str(path), status.st_size, status.st_mtime_ns)


@lru_cache(None)
def _opened(path: str, *_: int) -> GGUF:
    return GGUF(path)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    try:
        return _Header(Mapped(str(path))).read()
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged or cut short: its header cannot be read: get it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class _Header:
    """Reads the header of a file from its beginning."""

    def __init__(self, file: Mapped) -> None:
        self.file, self.position = file, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        from gguf import GGMLQuantizationType  # pyright: ignore[reportMissingImports]

        if self._bytes(4) != b"GGUF":
            raise UserError(f"{self.file.path} is no .gguf file: it does not begin with GGUF")
        if (version := self._numbers("I")[0]) not in (2, 3):
            raise UserError(f"{self.file.path} is of version {version} of the format, or of another byte order")
        tensor_count, key_count = self._numbers("QQ")
        keys = {}
        for _ in range(key_count):
            name = self._string()
            keys[name] = self._value(self._numbers("I")[0])
        places = []
        for _ in range(tensor_count):
            name, (dimensions,) = self._string(), self._numbers("I")
            shape = self._numbers(f"{dimensions}Q")[::-1]
            places.append((name, shape, *self._numbers("IQ")))
        alignment = keys.get("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        names = {each.value: each.name for each in GGMLQuantizationType}
        return keys, {
            name: Stored(self.file, name, names.get(kind, str(kind)), shape, start + offset)
            for name, shape, kind, offset in places
        }

    def _bytes(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self.file.map):
            raise IndexError(self.position)
        return self.file.map[start : self.position]

    def _numbers(self, types: str) -> tuple[Any, ...]:
        return struct.unpack(form := f"<{types}", self._bytes(struct.calcsize(form)))

    def _string(self) -> str:
        return self._bytes(self._numbers("Q")[0]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_NUMBERS[kind])[0]
        start, found = self.position, self.array()
        return found if len(found) <= _LONG else LongArray(self.file, start, len(found))

    def array(self) -> list[Any]:
        """The array that begins here."""
        kind, count = self._numbers("IQ")
        if count > len(self.file.map):
            raise IndexError(count)
        if kind in _NUMBERS:
            return list(self._numbers(f"{count}{_NUMBERS[kind]}"))
        return self._strings(count) if kind == _STRING else [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `_string`, faster: a vocabulary has hundreds of thousands."""
        content, position, length_at, texts = self.file.map, self.position, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = position + 8
            position = start + length_at(content, position)[0]
            texts.append(content[start:position].decode())
        self.position = position
        self._bytes(0)
        return texts
