"""The researcher's wing: settings, data, training, evaluation, records of runs and rows, tables and pictures."""
