"""Weights & Biases: runs, artifacts, the dashboard."""
