"""Spares: interpreters that have already imported what a program needs when its task starts."""
