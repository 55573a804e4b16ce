"""`python -m graphpp`: the command line, as the script `graphpp`."""

from graphpp.cli.app import main

if __name__ == "__main__":
    main()
