"""Models in .gguf files: opened where they lie, with their integers of four to eight bits as they are."""
