"""``python -m autotune`` is the command ``autotune``, where that is not on the path."""

from autotune.cli.entry import main

if __name__ == "__main__":
    main()
