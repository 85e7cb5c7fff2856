"""Rounds whose clients, sums and mean stay on a PyTorch device, such as a GPU.

`rounds.py` is the engine. What it computes is written twice: in plain PyTorch (`plain.py`), for any device, and in
Triton (`fused.py`), for GPUs. The two give the same integers, bit for bit.
"""

from cpsgd.simulation.device.rounds import DeviceFloatMean as DeviceFloatMean
from cpsgd.simulation.device.rounds import DeviceRound as DeviceRound
