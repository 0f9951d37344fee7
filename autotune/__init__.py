"""Tunes: profiles an engine offline, steers it online, exports what it found."""
