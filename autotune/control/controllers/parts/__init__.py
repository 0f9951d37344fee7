"""What several controllers are made of: targets, whole tiles, running statistics, a galloping search."""
