"""The landmark as a token of a tokenizer of transformers."""

from __future__ import annotations

from typing import Any

from landmark.utils.constants import LANDMARK
from landmark.utils.errors import UserError


def new_landmark(tokenizer: Any) -> int:
    """The id that a tokenizer will give to `<landmark>`. Raises UserError where another token has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    counted = len(tokenizer) if backend is None else backend.get_vocab_size(with_added_tokens=False)
    token = max([counted, *(each + 1 for each in tokenizer.added_tokens_decoder if each >= counted)])
    is_taken = backend is not None and backend.id_to_token(token) is not None
    if is_taken or (backend is None and token in tokenizer.get_vocab().values()):
        known = set(tokenizer.get_vocab().values())
        unused = next(each for each in range(len(known) + 1) if each not in known)
        raise UserError(
            f"the tokenizer has {len(known)} tokens with ids up to {max(known)} and none with the id {unused}, so "
            f"{LANDMARK} would get the id {token} of {tokenizer.convert_ids_to_tokens(token)!r}: give the tokenizer a "
            f"token with the id {unused} first"
        )
    return token
