"""The terminal view of runs: `paceline watch`. Only `app.py` and the modules that it imports need textual."""
