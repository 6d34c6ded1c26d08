"""What each framework's tasks are given. Pure and standard library only: agents use it on any Python from 3.9 on."""
