"""Command line, reports and demonstrations: they parse, call and render, and hold no science of their own."""
