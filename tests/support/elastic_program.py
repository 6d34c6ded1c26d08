"""What tests share that run `programs/elastic.py`: its data, and when it ends."""

from __future__ import annotations

from pathlib import Path

SIZE, BATCH = 120, 12


def last_step(state: Path, ahead: int = 120) -> int:
    """All tasks end with an epoch that begins after this many steps. Returns the step."""
    newest = max(int(path.name.split("-")[0]) for path in (state / "seen").iterdir())
    steps = SIZE // BATCH
    last = -(-(newest + ahead) // steps) * steps
    (state / "finish.partial").write_text(str(last))
    (state / "finish.partial").replace(state / "finish")
    return last
