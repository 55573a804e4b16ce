"""The command `graphpp`, also `python -m graphpp`: one file for each command or group of commands.

Contract
    `app.py` collects the commands. Every command is a function that returns an `Answer` and raises `GraphPPError`; `command.py`
    prints the answer as text or as JSON, and ends the process: 0 if the answer is yes, 1 if it is no, 2 for wrong usage or an
    error, 130 after Ctrl-C. `docs/command_line.md` is the page for users.
    Nothing in graphpp imports this package.
"""
