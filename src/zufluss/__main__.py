"""`python -m zufluss` is the `zufluss` command."""

from zufluss.cli.main import main

if __name__ == "__main__":
    main()
