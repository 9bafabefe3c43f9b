"""What `task=` chooses, one file a task: each has a function `run(command)`."""
