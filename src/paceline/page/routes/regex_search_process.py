"""Searches a log for a regular expression, in a process that can be killed: some expressions never end."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

from paceline.client.reading.run_logs import select
from paceline.page.routes.selected_logs import SelectedLogs
from paceline.view.output.log_blocks import Search
from paceline.view.output.log_windows import Query

CPU_S = 2  # of a search, besides the start of the process; the time that passes depends on what else the machine does


def main() -> int:
    limit = math.ceil(time.process_time()) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    arguments: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    pattern = select(grep=arguments.pop("grep")).pattern
    assert pattern is not None
    folder, task, tasks = Path(arguments.pop("folder")), arguments.pop("task"), arguments.pop("tasks")
    selected = SelectedLogs(folder, task, None if tasks is None else tuple(tasks))
    search = Search(lambda line: pattern.search(line) is not None)
    sys.stdout.write(json.dumps(selected.read(Query(**arguments, search=search))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
