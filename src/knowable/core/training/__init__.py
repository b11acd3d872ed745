"""The optimisation loop: objective, schedule, run."""
