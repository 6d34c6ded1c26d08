"""Serves exported models over REST: TensorFlow Serving's v1 paths, with requests put together to batches."""
