# load_adapters.py
from lora import batch
