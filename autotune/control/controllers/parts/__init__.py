"""What several controllers are made of: targets, whole tiles, windows of steps, running statistics, a galloping search."""
