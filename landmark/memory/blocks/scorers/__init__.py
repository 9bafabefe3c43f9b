"""What can stand for a block: a file for each `retrieval.scorer`, with one class `Scorer` (../scorer.py)."""
