"""The command line: `landmark`, or `python run.py` in a source tree."""
