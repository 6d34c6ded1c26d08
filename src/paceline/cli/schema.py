"""`paceline schema`: the JSON Schema of job files, for editors."""

from __future__ import annotations


def main() -> None:
    """Print the JSON Schema of job files, for editors and checkers."""
    import json

    from paceline.job import schema

    print(json.dumps(schema(), indent=2), flush=True)
