"""``knowable serve``: a service that answers with calibrated uncertainty, and holds under load."""
