"""The core: model, posterior, prediction, the loops and storage. Everything else stands on it."""
