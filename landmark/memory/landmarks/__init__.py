"""The paper's memory: blocks that are found by the keys of their landmarks, and baselines that keep the last keys."""
