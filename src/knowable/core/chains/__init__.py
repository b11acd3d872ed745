"""The chain loop: target, kernel, run, convergence, posterior of the draws."""
