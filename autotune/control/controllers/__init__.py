"""Controllers: from records of steps and requests to knobs. One algorithm a file; guardrails and logging wrap them."""
