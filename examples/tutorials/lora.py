# lora.py
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import graphpp

differences = "".join(f"{a}-{b}={a - b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(differences.encode()))


def batch(step, rows=16, length=64):
    starts = torch.randint(len(text) - length, (rows, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(length)]


kind = sys.argv[1]
quantised = None
if kind == "qlora":  # linear layers in 4 bits, which compute in float32
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
base = LlamaForCausalLM.from_pretrained("base", quantization_config=quantised)

torch.manual_seed(0)  # the same adapters on every process
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
rows = batch(0)[:2]
pipe = graphpp.compile(
    model,
    example=graphpp.Microbatch((), {"input_ids": rows, "labels": rows}),
    split=2,
    microbatches=8,
)
adapters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)

for step in range(60):
    tokens = batch(step)
    loss = pipe.step(input_ids=tokens, labels=tokens).loss
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_last and step % 20 in (0, 19):
        print(f"{kind}, step {step:2}: loss {loss:.4f}")

unseen = batch(1_000_000)
loss = pipe.eval(input_ids=unseen, labels=unseen).loss
state = pipe.gather()  # on the first rank; {} on the others
if pipe.is_first:
    model.save_pretrained(f"adapters-{kind}", state_dict=state)
    print(f"{kind}, unseen text: loss {loss:.4f}")

if pipe.is_first and kind == "lora":
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    for name, saved in load_file("base/model.safetensors").items():
        first, _, last = f"base_model.model.{name}".rpartition(".")
        own = state.get(f"{first}.{last}", state.get(f"{first}.base_layer.{last}"))
        assert torch.equal(own, saved), name
    print(f"{len(trained)} tensors trained, the base is as it was")
