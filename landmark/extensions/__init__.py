"""Variants that plug into the seams of the core, which does not name them: delete one, and all else works.

A module declares the settings that it reads, `SETTINGS = ("model.masked", …)`, and is found by them
(`landmark.utils.extensions.extension_with`). It imports public names of the core only.
"""
