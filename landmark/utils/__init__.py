"""Helpers of all layers: errors, files, HTML pages, FLOPs, peak memory, progress. No model, no configuration."""
