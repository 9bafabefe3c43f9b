"""Runs and rows: what they are (identity), what they leave (records), and making those that are missing (runner)."""
