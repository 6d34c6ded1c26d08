"""A minimal program: prints which task it is and ends."""

import os

print(f"pod {os.environ['POD_NAME']}")
print(f"task {os.environ['PACELINE_TASK']}")
