"""Devices, links and machines: the figures that price a plan for other hardware. Imports no torch.

machines = graphpp.devices.Machines.read("512xH100")
machines.all_reduce(2**30, ranks=8) # seconds; the ranks are neighbours
machines.send(2**26, stride=8) # seconds; to the rank 8 further
"""

from graphpp.devices.device import Device as Device
from graphpp.devices.device import Link as Link
from graphpp.devices.efficiency import Curve as Curve
from graphpp.devices.efficiency import Efficiency as Efficiency
from graphpp.devices.goodput import Goodput as Goodput
from graphpp.devices.known import A100 as A100
from graphpp.devices.known import B200 as B200
from graphpp.devices.known import CPU_CORE as CPU_CORE
from graphpp.devices.known import H100_SXM as H100_SXM
from graphpp.devices.known import H200 as H200
from graphpp.devices.known import KNOWN_NAMES as KNOWN_NAMES
from graphpp.devices.known import MI300X as MI300X
from graphpp.devices.known import known_device as known_device
from graphpp.devices.machines import Machines as Machines
from graphpp.devices.mixed import MixedMachines as MixedMachines
from graphpp.devices.mixed import read_machines as read_machines
