"""Studies of sparse networks: how much of a network its posterior says can go, and what is lost with it."""
