"""The checks of the conformance suite, by subject; each is a function of one ``Subject``."""
