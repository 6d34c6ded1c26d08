"""What tasks are doing: their stacks and profiles."""
