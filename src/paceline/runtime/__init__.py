"""What training scripts may use. Standard library only."""
