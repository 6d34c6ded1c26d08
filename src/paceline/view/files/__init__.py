"""The folder of a run and its files: found, read and checked."""
