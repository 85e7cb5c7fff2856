"""`python -m cpsgd` is `cpsgd`."""

from cpsgd.cli.app import main

if __name__ == "__main__":
    main()
