"""Folders written by version 0.x, before the rooms of core were made, which every later version must read."""
