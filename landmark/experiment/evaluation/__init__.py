"""Measurements of a trained model."""
