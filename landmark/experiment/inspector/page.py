"""A trace as one HTML file that works without a network: the text, and for each token the blocks it retrieves."""

from __future__ import annotations

import base64
import codecs
import hashlib
import zlib
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from landmark.experiment.config import Config
from landmark.experiment.config.schema import memory_settings
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.experiment.inspector.trace import Trace, trace_retrieval
from landmark.models import LanguageModel
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.files import write_atomic

SCRIPTS = "text.js", "data.js", "panel.js", "page.js"
UNIT = 0xFFFF  # a weight is stored as a multiple of 1 / UNIT
NATS = 1 << 11  # a loss as a multiple of 1 / NATS nats, up to 32 nats


def prompt_texts(config: Config) -> list[str]:
    """The text of `prompt_file`, if it is set, and `prompt`."""
    texts = [] if config.prompt_file is None else [config.prompt_file.text]
    return texts if config.prompt is None else [*texts, config.prompt]


def inspect_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: Config,
    run: str,
    output: Path,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Read `prompt_file` and `prompt`, and write `inspect/NAME.html` below `output`. Returns a line that describes it.
    Raises UserError if the text cannot be read or traced.
    """
    tokens = tokenizer.encode("".join(prompt_texts(config)))
    tokens = np.concatenate([np.array(tokenizer.beginning, dtype=tokens.dtype), tokens])
    title = "prompt" if config.prompt_file is None else config.prompt_file.name
    path = output / "inspect" / f"{Path(title).stem}-{run}.html"
    trace = trace_retrieval(
        model, tokens, config.eval.local or DEFAULT_CHUNK, **vars(memory_settings(config)), progress=progress
    )
    page = render(trace, tokenizer, title, _settings(model, config, run, tokens))
    write_atomic(path, page)
    size = len(page.encode()) / 1e6
    return f"{path}: {len(tokens):,} tokens, {len(tokens) // trace.block_size:,} blocks, {size:.1f} MB"


def _settings(model: LanguageModel, config: Config, run: str, tokens: np.ndarray) -> dict[str, Any]:
    """Facts about the model and the reading, for the page."""
    memory = memory_settings(config)
    return {
        "run": run,
        "tokens": f"{len(tokens):,}",
        "blocks of": model.config.block_size,
        "chunks of": config.eval.local or DEFAULT_CHUNK,
        "k": memory.k,
        **{name.replace("_", " "): value for name, value in memory.saved().items() if name not in ("tier", "folder")},
    }


def render(trace: Trace, tokenizer: Tokenizer, title: str, settings: dict[str, Any]) -> str:
    """The page. settings: facts that it prints, by name. Its arrays are little-endian uint16, low bytes before high
    bytes, deflated together: blocks, weights, cmt_weights (if any) and losses, with the shapes of `Trace`.
    """
    arrays = {"blocks": trace.blocks, "weights": _quantized(trace.weights, UNIT)}
    if trace.cmt_weights is not None:
        arrays["cmt_weights"] = _quantized(trace.cmt_weights, UNIT)
    arrays["losses"] = _quantized(trace.losses, NATS)
    deflate = zlib.compressobj(6)
    low_and_high = [array.astype("<u2").reshape(-1, 1).view(np.uint8).T.tobytes() for array in arrays.values()]
    data = b"".join([*map(deflate.compress, low_and_high), deflate.flush()])
    layers, heads, k, length = trace.blocks.shape
    content = {
        "title": title,
        "settings": settings,
        "layers": layers,
        "heads": heads,
        "k": k,
        "length": length,
        "blockSize": trace.block_size,
        "width": trace.width,
        "chunks": trace.chunks,
        "visible": trace.visible,
        "sizes": {name: array.size for name, array in arrays.items()},
        "tokens": token_texts(tokenizer, trace.tokens),
    }
    return filled_page(content=content, title=title, data=base64.b64encode(data).decode())


def filled_page(**values: Any) -> str:
    """page.html filled by Jinja, with its style and scripts. values: shown as text, not as HTML. The policy allows
    this style and these scripts alone. Raises ValueError for a number that is not finite.
    """
    import jinja2
    from markupsafe import Markup

    names = "page.html", "page.css", *SCRIPTS
    template, style, *scripts = ((files("landmark.experiment.inspector") / name).read_text("utf-8") for name in names)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    safe = {"style": Markup(style), "scripts": [Markup(script) for script in scripts]}
    return environment.from_string(template).render(values, policy=policy, **safe)


def _hash(text: str) -> str:
    """The source of a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def token_texts(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    """The characters that begin in each token, U+FFFD for bytes that are no text; "" if none begins there."""
    pieces = {token: tokenizer.decode_bytes([token]) for token in np.unique(tokens).tolist()}
    return _characters(pieces[token] for token in np.asarray(tokens).tolist())


def _characters(pieces: Iterable[bytes]) -> list[str]:
    """The characters that begin in each of consecutive pieces of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    start = None  # number of the piece in which an incomplete character began
    for number, piece in enumerate(pieces):
        text = decoder.decode(piece)
        texts.append(text)
        if text and start is not None:
            texts[start] += text[0]
            texts[number] = text[1:]
        if not decoder.getstate()[0]:
            start = None
        elif text or start is None:
            start = number
    if start is not None:
        texts[start] += decoder.decode(b"", final=True)
    return texts


def _quantized(values: np.ndarray, steps: int) -> np.ndarray:
    """uint16 multiples of 1 / steps."""
    return np.clip(np.rint(values * np.float64(steps)), 0, 0xFFFF).astype(np.uint16)
