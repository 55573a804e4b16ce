"""`graphpp doctor`: what this machine and its PyTorch can do, and how fast the links between ranks are.

`machine.py` versions, devices, compiler · `torch_defects.py` defects of torch that graphpp avoids · `links.py` measurements
between ranks · `answer.py` all of it together, as text and as data · `command.py` the command.
"""
