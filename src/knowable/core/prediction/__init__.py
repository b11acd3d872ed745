"""The predictive distribution: mixtures, quantiles, units."""
