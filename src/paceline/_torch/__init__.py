"""Behind `paceline.torch`: copying a state to host memory, its files, and putting it back."""
