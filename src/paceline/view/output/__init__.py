"""The output of tasks: read, followed, searched and put in order."""
