"""Tables and figures, made from records alone. Loads no torch."""
