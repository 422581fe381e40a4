"""Train forty small crypto-price models at once, and tell the truth about them and about the GPU."""

__version__ = "0.1.0"
