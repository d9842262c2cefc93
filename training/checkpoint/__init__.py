"""Checkpoints: the files of one, what they say about themselves, and weights read from them."""
