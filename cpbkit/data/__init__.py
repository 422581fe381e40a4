"""Klines: where they come from, what they must look like, where they are kept."""
