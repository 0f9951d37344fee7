"""One file for each section of a report: from the evidence to its finding, its plots and its tables."""
