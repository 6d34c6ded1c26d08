"""Serves exported models over REST, with the v1 API of TensorFlow Serving and batching of requests."""
