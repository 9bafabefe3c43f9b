"""`python -m landmark`: the command `landmark`."""

from landmark.cli.main import main

if __name__ == "__main__":
    main()
