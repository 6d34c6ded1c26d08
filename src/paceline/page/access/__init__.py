"""Who may use the page."""
