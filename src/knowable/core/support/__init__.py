"""What Python and PyTorch lack: checks of arguments, seeds, time limits, progress bars, Ctrl-C, files."""
