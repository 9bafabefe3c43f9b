"""Tasks that show something, one file each, with a function `run(command)`; `Command` itself has the others."""
