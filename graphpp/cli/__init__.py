"""The command `graphpp`, also `python -m graphpp`: one file for each command or group of commands.

`app.py` collects the commands. Each returns an `Answer` or raises `GraphPPError`, which `command.py` prints.
`docs/command_line.md` is the page for users. Nothing in graphpp imports this package.
"""
