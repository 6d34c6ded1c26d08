"""TensorBoard of a run: its files are collected, kept consistent across restarts, and shown."""
