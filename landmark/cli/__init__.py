"""The command line: `landmark`, the same as `python run.py`."""
