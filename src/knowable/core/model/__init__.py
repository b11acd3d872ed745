"""Model, data, and the contracts of likelihoods and priors."""
