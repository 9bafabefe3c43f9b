"""Numbers and names on which several folders must agree."""

import math

DEFAULT_CHUNK = 250  # tokens that a landmark model reads at a time (the paper's local context), unless told otherwise
LANDMARK = "<landmark>"  # text of the landmark in a tokenizer of transformers
LOG2_E = math.log2(math.e)  # factor from nats to units of log 2, in which attention takes its exponentials
NO_LOSS = -100  # target of a position without loss; PyTorch's cross entropy ignores it by default
SHORTEST_REPEAT = 8  # tokens of a repeated stretch of a training window (`data.repeats`)
