"""The environment of tasks for each framework. Standard library only: agents use it on Python 3.9 and later."""
