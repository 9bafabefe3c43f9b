"""The tokenizer `code`: a small vocabulary for Python source, in a file of this package."""

from importlib.resources import files

from landmark.data.byte_pairs import BytePairTokenizer, first_ids, read_ranks

CODE_VOCAB_SIZE = 1024
CODE_RANKS = "code.tiktoken"  # beside this file; made by landmark.data.code_ranks
CODE_RANKS_SHA256 = "f63f53e5f04341f1f02d374e9cf31d2f03e9de4dfaf325727633ab67d322f4a5"
# Ends of lines with the indentation that follows; names with the underscores before them, numbers, signs, each with one
# space before; other whitespace. Every character matches, without backtracking over long runs.
CODE_PATTERN = r"""[\r\n]++[ \t]*+| ?(?:_++\p{L}*+|\p{L}++)| ?\p{N}++| ?[^\s\p{L}\p{N}_]++|[^\S\r\n]++"""


class CodeTokenizer(BytePairTokenizer):
    """Byte-pair encoding with 1024 ids, whose merges were learned from Python's standard library.

    Ids below 960 are text, 960 is end of text, 961 the landmark.
    """

    def __init__(self):
        """Raises UserError if the file of ranks was changed."""
        content = (files("landmark.data") / CODE_RANKS).read_bytes()
        ranks = read_ranks(content, CODE_RANKS_SHA256, f"tokenizer=code: {CODE_RANKS} of landmark.data was changed")
        super().__init__("code", lambda: ranks, CODE_RANKS_SHA256, CODE_PATTERN, first_ids(CODE_VOCAB_SIZE))
