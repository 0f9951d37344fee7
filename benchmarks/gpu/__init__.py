"""The hour when a GPU is there: one script that runs everything a GPU alone can tell, and keeps what it finds."""
