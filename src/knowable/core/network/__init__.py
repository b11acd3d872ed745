"""A user's module as a pure function of its parameters, and what its layers do with which weight."""
