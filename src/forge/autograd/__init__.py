"""Reverse-mode differentiation: the tape, hooks on it, and the checker of gradients."""
