"""`python run.py +experiment=NAME`: see README.md."""

from landmark.cli.main import main

if __name__ == "__main__":
    main()
