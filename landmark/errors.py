"""Errors meant for the person at the keyboard."""


class UserError(ValueError):
    """Bad input: the message says in one line what is wrong, where, and what to do about it."""
