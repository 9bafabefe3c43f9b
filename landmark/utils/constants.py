"""Numbers and names on which several folders must agree. Loads no torch."""

import math

ANSWER_WEIGHT = 10.0  # of the loss of tokens that a sample determines, as answers are
BACKENDS = ("auto", "reference", "blockwise", "triton")  # implementations of landmark attention
BETAS = (0.9, 0.95)  # of AdamW, as in the paper
DEFAULT_CHUNK = 250  # tokens that a landmark model reads at a time (the paper's local context), unless told otherwise
DENSE_SHARE = 0.5  # of training windows of pass keys: those that are dense from their beginning
LANDMARK = "<landmark>"  # text of the landmark in a tokenizer of transformers
LEAST_TEMPERATURE = 1e-3  # with a lower one the most probable token is taken: scores of float32 would overflow
LOG2_E = math.log2(math.e)  # factor from nats to units of log 2, in which attention takes its exponentials
MAPPINGS = ("stingy", "true")  # how a memory places blocks
NO_LOSS = -100  # target of a position without loss; PyTorch's cross entropy ignores it by default
PASSKEY_VERSION = 2  # of training windows with pass keys: raised where the same settings give others
PASSKEY_PROMPTS_VERSION = 2  # of prompts with pass keys: raised where the same settings give others
ROPE_BASE = 10000.0  # of the rotary frequencies, as in the paper
RULER_VERSION = 1  # of the texts of these tasks: raised where the same settings give others
RULER_SAMPLES_VERSION = 2  # of the windows with which they are trained
RULER_TASKS = {  # tokens that are generated for an answer, as published
    "niah_single_1": 128,
    "niah_single_2": 128,
    "niah_single_3": 128,
    "niah_multikey_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "niah_multivalue": 128,
    "niah_multiquery": 128,
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
}
SHORTEST_REPEAT = 8  # tokens of a repeated stretch of a training window (`data.repeats`)
TIERS = ("device", "cpu", "disk")  # where a memory keeps its blocks


def channels_of(fraction: float, head_dim: int) -> int:
    """The nearest even number of a head's channels, so that no pair that positions rotate is parted."""
    return 2 * round(fraction * head_dim / 2)
