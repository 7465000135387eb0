"""A training run: its folder, its state, the loop that advances it, and how it is resumed."""
