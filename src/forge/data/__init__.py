"""Data: from text to batches of tokens."""
