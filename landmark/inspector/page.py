"""A reading as one HTML file that needs nothing else: the text, and behind it what was retrieved for each token."""

from __future__ import annotations

import base64
import codecs
import html
import json
import zlib
from collections.abc import Iterable
from importlib import resources
from typing import Any

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.inspector.reading import Reading

SCRIPTS = "text.js", "data.js", "panel.js", "page.js"
UNIT = 0xFFFF  # weights are stored in this many parts
NATS = 1 << 11  # losses in this many parts of a nat, up to 32 nats


def render(reading: Reading, tokenizer: Tokenizer, title: str, settings: dict[str, Any]) -> str:
    """The page. title: of the text; settings: what to say of the model and how it read, by name.

    Its data are JSON, which can be seen at once, and after it numbers as little-endian uint16, each array in two
    planes, low bytes and high bytes, deflated: blocks, weights, missed (if there is a context miss token) and losses,
    in the order and of the shapes of `Reading`.
    """
    arrays = {"blocks": reading.blocks, "weights": _parts(reading.weights, UNIT)}
    if reading.missed is not None:
        arrays["missed"] = _parts(reading.missed, UNIT)
    arrays["losses"] = _parts(reading.losses, NATS)
    packed = zlib.compressobj(6)
    data = b"".join([*(packed.compress(_planes(array)) for array in arrays.values()), packed.flush()])
    layers, heads, k, length = reading.blocks.shape
    described = {
        "title": title,
        "settings": settings,
        "layers": layers,
        "heads": heads,
        "k": k,
        "length": length,
        "blockSize": reading.block_size,
        "chunks": reading.chunks,
        "sizes": {name: array.size for name, array in arrays.items()},
        "tokens": token_texts(tokenizer, reading.tokens),
    }
    return _fill(
        title=html.escape(title),
        style=_part("page.css"),
        script="\n".join(_part(name) for name in SCRIPTS),
        # "<" would let a text end the element that it stands in.
        described=json.dumps(described, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        data=base64.b64encode(data).decode(),
    )


def token_texts(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    """The characters that begin in each token, "" where one only goes on; what is no text becomes U+FFFD."""
    pieces = {token: tokenizer.decode_bytes([token]) for token in np.unique(tokens).tolist()}
    return _characters(pieces[token] for token in np.asarray(tokens).tolist())


def _characters(pieces: Iterable[bytes]) -> list[str]:
    """The characters that begin in each of consecutive pieces of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    begun = None  # the piece in which a character began that has not ended yet
    for number, piece in enumerate(pieces):
        text = decoder.decode(piece)
        texts.append(text)
        if text and begun is not None:
            texts[begun] += text[0]
            texts[number] = text[1:]
        if not decoder.getstate()[0]:
            begun = None
        elif text or begun is None:
            begun = number
    if begun is not None:
        texts[begun] += decoder.decode(b"", final=True)
    return texts


def _parts(values: np.ndarray, unit: int) -> np.ndarray:
    """Whole parts of one, uint16."""
    return np.clip(np.rint(values * np.float64(unit)), 0, 0xFFFF).astype(np.uint16)


def _planes(array: np.ndarray) -> bytes:
    """Low bytes, then high bytes, which compress better apart."""
    return array.astype("<u2").reshape(-1, 1).view(np.uint8).T.tobytes()


def _part(name: str) -> str:
    return resources.files("landmark.inspector").joinpath(name).read_text(encoding="utf-8")


def _fill(**parts: str) -> str:
    """page.html with each `{{name}}` replaced, once."""
    pieces = _part("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)
