"""A page that shows what a landmark model retrieves while it reads a text: `task=inspect`."""
