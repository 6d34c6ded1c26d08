"""Jobs of functions, such as those of a notebook."""
