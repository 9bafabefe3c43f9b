"""Names of the ways in which attention is computed."""

BACKENDS = ("auto", "reference", "blockwise", "triton")
