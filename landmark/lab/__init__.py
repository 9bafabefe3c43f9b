"""Run identity, records, tables, plots, logs: all that is known about an experiment apart from the models."""
