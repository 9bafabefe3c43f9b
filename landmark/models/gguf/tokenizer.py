"""The tokenizer that the keys of a .gguf file describe."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from landmark.models.gguf.config import TOKENS
from landmark.models.gguf.file import GGUF, LongArray
from landmark.utils.errors import UserError

# How byte-level vocabularies split a text, beside those that transformers knows.
_AS_GPT2 = {"gpt-2", "phi-2", "olmo", "mpt", "jais"}
_DIGITS_ONE_BY_ONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_NORMALISED = {"qwen2", "deepseek-r1-qwen"}  # whose models were trained on texts in Unicode's form NFC
_TAKEN = {"gpt2", "llama"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(file: GGUF) -> Any:
    """A fast tokenizer of transformers. Raises UserError, naming the key, where a key is missing or not known."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    keys = {
        key.removeprefix("tokenizer."): [*value] if isinstance(value, LongArray) else value
        for key, value in file.keys.items()
    }
    _check(file, keys)
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    described = {name: keys[key] for key, name in names.items() if key in keys}
    if keys["ggml.model"] == "llama" and "ggml.merges" not in keys:
        described["merges"] = _merges(keys, by_place=file.architecture.startswith("gemma"))
    backend, _ = convert_gguf_tokenizer(file.architecture, described)
    _complete(file, backend, keys)
    special = {name: _token(file, keys, key) for name, key in _SPECIAL.items()}
    begins = keys.get("ggml.add_bos_token", keys["ggml.model"] == "llama")
    return _wrapped(
        backend,
        **{name: token for name, token in special.items() if token is not None},
        add_bos_token=bool(begins and special["bos_token"]),
        add_eos_token=bool(keys.get("ggml.add_eos_token", False)),
        padding_side="left" if file.architecture.startswith("gemma") else "right",
        chat_template=keys.get("chat_template"),
    )


def _check(file: GGUF, keys: Mapping[str, Any]) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if not keys.get("ggml.tokens"):
        raise UserError(f"{file.path}: {TOKENS} is missing: get the file again")
    if (kind := keys.get("ggml.model")) not in _TAKEN:
        raise UserError(f"{file.path}: tokenizer.ggml.model={kind}: read are {', '.join(sorted(_TAKEN))}")
    before = keys.get("ggml.pre")
    if kind == "gpt2" and before not in {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_ONE_BY_ONE}:
        raise UserError(f"{file.path}: tokenizer.ggml.pre={before}: how it splits a text is not known here")
    if kind == "gpt2" and not keys.get("ggml.merges"):
        raise UserError(f"{file.path}: tokenizer.ggml.merges is missing: get the file again")


def _merges(keys: Mapping[str, Any], by_place: bool) -> list[str]:
    """The merges that a vocabulary implies, best first, in the order of transformers' `generate_merges`.

    by_place: Gemma's scores are not in the order of its merges, but its tokens are; and it has spaces, where other
    vocabularies have ▁, in tokens of nothing else.
    """
    tokens = [text if text.strip(" ") else "▁" * len(text) for text in keys["ggml.tokens"]]
    known, found = set(tokens), []
    for place, token in enumerate(tokens):
        score = -place if by_place else keys["ggml.scores"][place]
        for end in range(len(token) - 1, 0, -1):
            if (start := token[:end]) in known and token[end:] in known:
                found.append((score, end, f"{start} {token[end:]}"))
    found.sort(key=itemgetter(0, 1), reverse=True)
    return [pair for _, _, pair in found]


def _token(file: GGUF, keys: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token; of several, of the first."""
    id = keys.get(f"ggml.{name}_token_id")
    id = id[0] if isinstance(id, list) and id else id
    if id is not None and not (isinstance(id, int) and 0 <= id < len(keys["ggml.tokens"])):
        raise UserError(f"{file.path}: tokenizer.ggml.{name}_token_id={id}: there is no such token")
    return None if id is None else keys["ggml.tokens"][id]


def _complete(file: GGUF, backend: Any, keys: Mapping[str, Any]) -> None:
    """Add to the tokenizer what transformers leaves out."""
    from tokenizers import normalizers, pre_tokenizers

    if keys.get("ggml.pre") in _NORMALISED:
        backend.normalizer = normalizers.NFC()
    if keys["ggml.model"] == "gpt2" and keys["ggml.pre"] in _DIGITS_ONE_BY_ONE:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    is_bare = keys["ggml.model"] == "llama" and not keys.get("ggml.add_space_prefix", True)
    if is_bare and isinstance(spaces := backend.pre_tokenizer, pre_tokenizers.Metaspace):
        spaces.prepend_scheme = "never"


def _wrapped(backend: Any, **settings: Any) -> Any:
    """The tokenizer around a backend, which its class would copy by way of JSON, in seconds."""
    from transformers import PreTrainedTokenizerFast

    class Given(PreTrainedTokenizerFast):
        def __init__(self, **settings: Any) -> None:
            self._tokenizer = backend
            super().__init__(**settings)

    tokenizer: Any = Given(**settings)
    tokenizer.__class__ = PreTrainedTokenizerFast  # the name that is saved, and that a pickle finds
    return tokenizer
