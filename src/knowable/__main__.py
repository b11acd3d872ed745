"""``python -m knowable`` is the command line."""

from knowable.interfaces.cli import main

if __name__ == "__main__":
    main()
