"""A folder in which a program keeps its own checkpoints: captured as snapshots, and restored from them."""
