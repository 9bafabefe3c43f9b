"""Numbers and names on which several folders must agree."""

DEFAULT_CHUNK = 250  # tokens that a landmark model reads at a time (the paper's local context), unless told otherwise
LANDMARK = "<landmark>"  # text of the landmark in a tokenizer of transformers
NO_LOSS = -100  # target of a position without loss; PyTorch's cross entropy ignores it by default
SHORTEST_REPEAT = 8  # tokens of a repeated stretch of a training window (`data.repeats`)
