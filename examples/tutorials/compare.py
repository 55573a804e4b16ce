# compare.py
import sys

from safetensors.torch import load_file

first, second = (load_file(f"{folder}/final/model.safetensors") for folder in sys.argv[1:])
assert first.keys() == second.keys()
print("largest difference of a weight:", max((first[name] - second[name]).abs().max().item() for name in first))
