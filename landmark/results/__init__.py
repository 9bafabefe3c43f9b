"""Tables, figures and the report page, made from records alone. Loads no torch."""
