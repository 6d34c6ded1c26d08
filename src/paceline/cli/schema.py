"""`paceline schema`: prints the JSON Schema of job files."""

from __future__ import annotations


def main() -> None:
    """Print the JSON Schema of job files, for editors and validators."""
    import json

    from paceline.job import schema

    print(json.dumps(schema(), indent=2), flush=True)
