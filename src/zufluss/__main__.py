"""`python -m zufluss` is the `zufluss` command."""

from zufluss.cli.main import process_main

if __name__ == "__main__":
    process_main()
