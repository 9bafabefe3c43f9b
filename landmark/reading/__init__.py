"""Answers from a pretrained model: sampling, ends, templates for chats, reasoning, and the text of generated tokens."""
