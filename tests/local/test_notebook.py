"""A real notebook: trains, follows the run, kills a worker, and reads its loss and its snapshot."""

from __future__ import annotations

import json
from pathlib import Path

from support import notebooks, person

KILL = 'os.kill(next(t.pid for t in run.status().tasks if t.name == "worker-1"), signal.SIGKILL)'


def test_a_notebook_trains_follows_and_kills_a_worker(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    submit = 'client.submit(train, workers=2, arguments={"steps": 60, "pace": 0.04})'
    with person.nothing_left(home):
        outputs = notebooks.execute(tmp_path, notebooks.cells(submit, KILL), person.environment(home))
    result = json.loads(notebooks.text_of(outputs[6]))
    assert (result["status"], result["generations"], result["snapshot"]) == ("succeeded", 2, "step-60-g2")
    assert result["notes"] == ["train is sent as source"]
    assert result["state"][0] == 60 and abs(result["state"][1] - 3) < 0.01
    first, second = (int(line.split()[1]) for line in result["starts"])
    assert first == 0 and second == 20, "it has resumed from a snapshot"
    assert result["run"] in notebooks.html_of(outputs[2])
    assert "succeeded: step 60; 1 restart" in notebooks.html_of(outputs[5])
    assert f"<td>{result['run']}</td><td>succeeded</td>" in notebooks.html_of(outputs[7])
    assert [notebooks.text_of(each) for number, each in enumerate(outputs) if number != 6] == [""] * 7
