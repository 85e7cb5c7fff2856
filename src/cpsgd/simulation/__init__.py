"""Simulation of many clients on this machine: on its processors (`cpu.py`) or on a PyTorch device (`device.py`)."""
