"""What settings would do under the traffic of a server that is up: observed from outside, simulated from a profile."""
