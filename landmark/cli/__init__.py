"""The command line, `python run.py`."""
