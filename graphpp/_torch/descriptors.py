"""The private names of torch that describe inputs and outputs of a joint trace (`meta["desc"]`). Imports in 20 ms.

Checked on torch 2.11.0, 2.13.0 and 2.15.0: `torch._functorch._aot_autograd.descriptors`
"""

from __future__ import annotations

from torch._functorch._aot_autograd import descriptors

ParamAOTInput = descriptors.ParamAOTInput
BufferAOTInput = descriptors.BufferAOTInput
PlainAOTInput = descriptors.PlainAOTInput
TangentAOTInput = descriptors.TangentAOTInput
PlainAOTOutput = descriptors.PlainAOTOutput
GradAOTOutput = descriptors.GradAOTOutput
InputMutationAOTOutput = descriptors.InputMutationAOTOutput
