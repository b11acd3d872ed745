"""Posterior and its families: sampling, predicting, saving and loading."""
