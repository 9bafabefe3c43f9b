"""The names of the implementations of landmark attention. Loads no torch."""

BACKENDS = ("auto", "reference", "blockwise", "triton")
