"""What the tasks of a run are doing: stacks and profiles, which its captain collects."""
