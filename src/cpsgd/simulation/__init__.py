"""Many clients on this machine: on its processors (`cpu.py`) or on a PyTorch device such as a GPU (`device/`)."""
