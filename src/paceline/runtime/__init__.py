"""Functions and classes for training scripts. Standard library only."""
