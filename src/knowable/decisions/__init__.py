"""What uncertainty is for: decisions taken with a posterior in hand."""
