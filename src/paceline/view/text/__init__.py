"""How things are shown to users: words, terminals, YAML."""
