"""What can stand for a block: one file for each `retrieval.scorer`, with one class `Scorer` (`landmark.memory.blocks.scorer`)."""
