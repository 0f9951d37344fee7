"""Each benchmark prints a table, then one JSON line last."""
