"""The tokenizer `bytes`."""

import numpy as np

from landmark.data.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0…255, end of text 256, landmark 257.

    The vocabulary is padded to 320, a multiple of 64, for which the output matrix product is fast on GPUs; GPT-2's is
    padded from 50257 to 50304 for the same reason.
    """

    def __init__(self):
        pieces = {value: bytes([value]) for value in range(256)}
        super().__init__("bytes", 256, 257, 320, pieces, encoding="utf-8")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype)
