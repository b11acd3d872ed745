"""The lab: a local page on which one draws data and watches methods fit them."""
