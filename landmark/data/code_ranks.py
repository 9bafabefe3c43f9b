"""Learns the ranks of `tokenizer=code`: `python -m landmark.data.code_ranks OUT [FOLDER]`.

OUT is the file to write, FOLDER holds Python source (default: the standard library of this Python). To use other ranks,
put OUT in place of landmark/data/code.tiktoken, and its SHA-256 into landmark/data/tokenizers.py. Those of the
package were learned from the standard library of Python 3.11.7.
"""

import base64
import hashlib
import sys
from pathlib import Path

from landmark.data.stdlib import StandardLibrary
from landmark.data.tokenizers import CODE_PATTERN, CODE_VOCAB_SIZE, first_ids
from landmark.utils.errors import UserError

_EXCERPT, _EXCERPTS = 2000, 200  # characters, and how many of them: enough for 704 merges in about a minute


def learn_ranks(text: str, count: int) -> dict[bytes, int]:
    """The ranks of all 256 bytes, and of the pairs that are most frequent in a text, `count` in all.

    The same text gives the same ranks. Raises UserError where the text has too few different pairs.
    """
    from tiktoken._educational import bpe_train

    try:
        return bpe_train(text, count, CODE_PATTERN, visualise=None)
    except ValueError:  # no pair is left
        raise UserError(
            f"a text of {len(text)} characters has too few pairs of bytes for {count} ranks: give a longer one"
        ) from None


def excerpts(text: str) -> str:
    """At most 200 stretches of 2000 characters, evenly spaced over a text, so that no long file outweighs others."""
    step = max(_EXCERPT, -(-len(text) // _EXCERPTS))
    return "".join(text[start : start + _EXCERPT] for start in range(0, len(text), step))


def main(out: str, folder: str | None = None) -> None:
    """Writes the ranks learned from the training split of a folder, and prints the SHA-256 of the file."""
    source = StandardLibrary(None if folder is None else Path(folder))
    text = "".join(document.text for document in source.documents("train"))
    ranks = sorted(learn_ranks(excerpts(text), first_ids(CODE_VOCAB_SIZE)[0]).items(), key=lambda item: item[1])
    content = b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks)
    Path(out).write_bytes(content)
    print(f"{out}: sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m landmark.data.code_ranks OUT [FOLDER]")
    try:
        main(*sys.argv[1:])
    except (UserError, OSError) as error:
        sys.exit(str(error))
