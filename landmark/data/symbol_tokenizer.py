"""The tokenizer `symbols`: ids without text, for tasks that need none."""

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError


class SymbolTokenizer(Tokenizer):
    """So many symbols; then end of text and landmark, padded to a multiple of 64. A text is encoded as no ids."""

    def __init__(self, symbols: int = 8192):
        """symbols: number of ids. Raises UserError for fewer than 4, or an odd number."""
        if symbols < 4 or symbols % 2:
            raise UserError(f"tokenizer.vocab_size={symbols}: choose an even number of symbols, at least 4")
        super().__init__(f"symbols-{symbols}", symbols, symbols + 1, -(-(symbols + 2) // 64) * 64, {})
