# lora.py
import sys

import torch
from peft import LoraConfig, get_peft_model
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
model.train()  # from_pretrained returns a model in eval mode
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
    if pipe.is_last and step % 20 == 19:
        print(f"{kind}, step {step:2}: loss {loss:.4f}")

state = pipe.gather()  # on the first rank; {} on the others
if pipe.is_first:
    model.save_pretrained(f"adapters-{kind}", state_dict=state)

if pipe.is_first:
    fresh = LlamaForCausalLM.from_pretrained("base", quantization_config=quantised).state_dict()
    names = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in state}
    assert all(torch.equal(fresh[name], state[names[name]]) for name in fresh)
    print(f"{len(fresh)} entries of the base are as they were, {len(state) - len(fresh)} of the adapters trained")
